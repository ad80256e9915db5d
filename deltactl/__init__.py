"""Chains of anchors and sparse deltas: a trainer's weights on their way to inference servers.

The names below are the library; deltactl-python(3) describes them. Each is imported when it is
first asked for, so that ``import deltactl`` alone costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltactl.api import (
        apply,
        diff,
        open_chain,
        open_checkpoint,
        open_delta,
        pull,
        push,
        verify,
    )
    from deltactl.core.errors import DeltactlError
    from deltactl.trainer.publisher import Publisher

__version__ = "0.1.0"

__all__ = [
    "DeltactlError",
    "Publisher",
    "apply",
    "diff",
    "open_chain",
    "open_checkpoint",
    "open_delta",
    "pull",
    "push",
    "verify",
]


_HOMES = {"DeltactlError": "deltactl.core.errors", "Publisher": "deltactl.trainer"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES.get(name, "deltactl.api")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
