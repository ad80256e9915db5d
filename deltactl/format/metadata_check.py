"""What a link's metadata says twice, or may say in one way only: each of it has to be so.

People and other readers go by these keys, and ours by the tensor table; so a header in which they
differ shows two links. Nothing here is of TRL's links, which lack most of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from deltactl.core.errors import Malformed
from deltactl.format.header import PREFIX, TRL_FORMAT, Record, need_count

_FIXED = {"format": TRL_FORMAT, "version": "1"}
_STRINGS = {
    *_FIXED,
    "sparse",
    "encoding",
    "model_version",
    "prev_model_version",
    "total_elements",
    "num_changed_params",
    "total_changed_elements",
    "sparsity",
}
_FRACTION = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,40})?(e-?[0-9]{1,3})?")
_ROUNDING = 1e-6  # of a share that a writer may have rounded


def check_fixed(metadata: Mapping[str, object], file: object) -> None:
    """Raise Malformed unless the keys that have one value alone have it."""
    for key, value in _FIXED.items():
        if metadata.get(key) != value:
            _refuse(key, file, value, metadata.get(key))


def check_strings(metadata: Mapping[str, object], file: object) -> None:
    """Raise Malformed for a key of ours or TRL's whose value is no string: only an index can have
    such, as the container lets pass nothing else."""
    for key, value in metadata.items():
        if (key in _STRINGS or key.startswith(PREFIX)) and not isinstance(value, str):
            _refuse(key, file, "a string", type(value).__name__)


def check_total(metadata: Mapping[str, object], elements: int, file: object) -> None:
    """Raise Malformed unless ``total_elements`` is this many."""
    said = need_count(metadata, "total_elements", file)
    if said != elements:
        _refuse("total_elements", file, elements, said)


def check_counts(
    metadata: Mapping[str, object],
    records: Sequence[Record],
    base_state: str,
    result_state: str,
    file: object,
) -> None:
    """Compare what a delta's metadata says with its table. Raises Malformed.

    Of ``total_elements`` the delta alone shows no more than that there are those of its tensors.
    """
    changed = sum(record.changed for record in records)
    for key, count in (("num_changed_params", len(records)), ("total_changed_elements", changed)):
        said = need_count(metadata, key, file)
        if said != count:
            _refuse(key, file, count, said)
    total = need_count(metadata, "total_elements", file)
    least = sum(_elements_after(records))
    if total < least:
        _refuse("total_elements", file, f">= {least}", total)
    _check_sparsity(metadata.get("sparsity"), 1 - changed / total if total else 1.0, file)
    if (base_state == result_state) != (not records):
        what = "the two states of a delta are equal where it changes nothing, and only there"
        found = f"{len(records)} changed tensors"
        raise Malformed(what, file=file, expected=f"state {result_state}", found=found)


def _elements_after(records: Iterable[Record]) -> Iterable[int]:
    return (record.elements or 0 for record in records if record.kind != "removed")


def _check_sparsity(said: object, share: float, file: object) -> None:
    sound = isinstance(said, str) and _FRACTION.fullmatch(said)
    if not sound or abs(float(str(said)) - share) > _ROUNDING:
        _refuse("sparsity", file, repr(share), said)


class _Steps(Protocol):
    @property
    def step(self) -> int | None: ...
    @property
    def result_state(self) -> str | None: ...
    @property
    def metadata(self) -> dict[str, str]: ...


def check_steps(header: _Steps, kind: str, step: int, file: object) -> None:
    """Raise Malformed unless a link in a chain names its own step, and a delta that below it.

    TRL's need not; where they name a step it has to be the right one.
    """
    if header.step not in (None, step):
        what = "the link's header names another step than its file's name"
        raise Malformed(what, file=file, step=step, expected=step, found=header.step)
    if header.result_state is None:
        return
    for key in ("model_version", *(["prev_model_version"] if kind == "delta" else [])):
        need_count(header.metadata, key, file)


def _refuse(key: str, file: object, expected: object, found: object) -> None:
    what = f"the header's {key} is not what it has to be"
    raise Malformed(what, file=file, expected=expected, found=found)
