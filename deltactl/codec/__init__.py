"""The encodings of a sparse tensor, by the name that a delta's header gives."""

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
