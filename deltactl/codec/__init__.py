"""Bits and encodings: the elements of a tensor that change, and how few bytes say which and how.

Works on arrays in memory, block by block, and knows nothing of files' names or of steps; the
compiled loops of ``core.native`` and numpy give the same bits. Imports ``core`` and ``files``.

Names to call: ``bits``, ``base.Encoding``, ``base.Decoder``, and ``encoding_named`` of this module.
"""

from __future__ import annotations

from deltactl.codec.absolute import GapDelta, Raw
from deltactl.codec.base import Encoding
from deltactl.codec.ulp import Ulp
from deltactl.codec.ulp_ctx import UlpCtx
from deltactl.core.errors import Unsupported, UsageError

ENCODINGS: dict[str, Encoding] = {e.name: e for e in (Raw(), GapDelta(), Ulp(), UlpCtx())}
"""What can be written and read."""

DEFAULT = "ulp"


def encoding_named(name: str, file: object = None) -> Encoding:
    """The encoding of that name. Raises UsageError, or Unsupported where a ``file`` names it."""
    if name in ENCODINGS:
        return ENCODINGS[name]
    known = ", ".join(ENCODINGS)
    if file is None:
        raise UsageError("unknown encoding", expected=f"one of {known}", found=name)
    raise Unsupported(
        "the delta's encoding is not one that this version reads",
        file=file,
        expected=f"one of {known}",
        found=name,
        hint="pip install --upgrade deltactl",
    )
