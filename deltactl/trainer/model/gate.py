"""Whether the model that trains may go on with a chain, by the rules that ``push`` goes by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deltactl.chain.admission import (
    Architecture,
    Described,
    Model,
    check_first,
    check_same_model,
)
from deltactl.chain.model import CONFIG, read_architecture
from deltactl.trainer.report import log

_WAY = "publish into a new bucket, or, if it is meant, with allow_other_model=True"


class Gate:
    """Of the chain at ``url``. ``aux``: the files that travel with anchors, of which the config
    says what the model is; ``allow``: another model is let in. What changed of a model, or is odd
    about it, is logged."""

    def __init__(self, url: str, aux: Mapping[str, Path], *, allow: bool) -> None:
        self._url, self._allow = url, allow
        config = aux.get(CONFIG)
        self._architecture = Architecture() if config is None else read_architecture(config)

    def admit(self, tip: Model | None, step: int | None, tensors: Mapping[str, Described]) -> bool:
        """Whether the model of these tensors is another than the tip's, at ``step``, and was let in
        since that is meant; ``tip``: None where the chain begins.

        Raises Conflict as ``check_same_model`` and ``check_first``.
        """
        new = Model(tensors, self._architecture)
        if tip is None:
            self._tell(check_first(new, way=_WAY, file=self._url, allow=self._allow))
            return False
        found = check_same_model(tip, new, way=_WAY, file=self._url, tip=step, allow=self._allow)
        self._tell(found.notes)
        return found.other

    def watch(self, before: Mapping[str, Described], now: Mapping[str, Described]) -> None:
        """Between two steps of a run. Raises Conflict as ``admit``."""
        if before and _has_changed(before, now):
            self.admit(Model(before, self._architecture), None, now)

    def _tell(self, notes: tuple[str, ...]) -> None:
        for note in notes:
            log.warning("%s: of the model: %s", self._url, note)


def _has_changed(before: Mapping[str, Described], now: Mapping[str, Described]) -> bool:
    return before.keys() != now.keys() or any(
        (tensor.dtype, tensor.shape) != (now[name].dtype, now[name].shape)
        for name, tensor in before.items()
    )
