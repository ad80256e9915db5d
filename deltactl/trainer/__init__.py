"""What runs inside a trainer: every optimizer step becomes a link of a chain in a bucket."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltactl.trainer.callbacks import DeltaCallback
    from deltactl.trainer.policy import AnchorEvery, AnchorPolicy, SinceAnchor
    from deltactl.trainer.publisher import Publisher
    from deltactl.trainer.report import Publication

__all__ = [
    "AnchorEvery",
    "AnchorPolicy",
    "DeltaCallback",
    "Publication",
    "Publisher",
    "SinceAnchor",
]

_HOMES = {
    "AnchorEvery": "policy",
    "AnchorPolicy": "policy",
    "DeltaCallback": "callbacks",
    "Publication": "report",
    "Publisher": "publisher",
    "SinceAnchor": "policy",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for, and with it torch or transformers, only now."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
