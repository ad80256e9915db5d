"""What servers say of themselves, made fit to be shown."""

from __future__ import annotations

import html
import re

_LONGEST_TEXT = 200
_ADDRESS = re.compile(r"\b[a-z]+://[^\s)]+", re.IGNORECASE)
_TOKEN = re.compile(r"\bhf_\w+")
_NAMED = re.compile(
    r"\b[\w-]*(?:key|secret|signature|sig|token|credential|password|authorization)\w*\s*[=:]\s*\S+",
    re.IGNORECASE,
)
_LONG_WORD = re.compile(r"\b(?:eyJ|ya29\.)\S+|[A-Za-z0-9+/=_%~]{16,}")


def plain(text: str) -> str:
    """A server's text, fit to be shown: one line, not long, without addresses and tokens."""
    text = _TOKEN.sub("hf_...", _ADDRESS.sub("...", text))
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."


def said(message: str) -> str:
    """The first line of an object store's message, without what may be a key, a token or a
    signature: values that are named so, and words of 16 characters and more."""
    first = html.unescape(message).strip().partition("\n")[0].removesuffix(".")
    text = plain(_LONG_WORD.sub("...", _NAMED.sub("...", _ADDRESS.sub("...", first))))
    return text if re.search(r"[A-Za-z]{2}", text) else ""
