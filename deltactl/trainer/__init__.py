"""What runs inside a trainer: every optimizer step becomes a link of a chain in a bucket."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltactl.chain.anchor_policy import Adaptive, Every
    from deltactl.trainer.callbacks import DeltaCallback
    from deltactl.trainer.publisher import Publisher
    from deltactl.trainer.ranks.publisher import RanksPublisher
    from deltactl.trainer.report import Publication

__all__ = ["Adaptive", "DeltaCallback", "Every", "Publication", "Publisher", "RanksPublisher"]

_HOMES = {
    "Adaptive": "deltactl.chain.anchor_policy",
    "DeltaCallback": "deltactl.trainer.callbacks",
    "Every": "deltactl.chain.anchor_policy",
    "Publication": "deltactl.trainer.report",
    "Publisher": "deltactl.trainer.publisher",
    "RanksPublisher": "deltactl.trainer.ranks.publisher",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for, and with it torch or transformers, only now."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
