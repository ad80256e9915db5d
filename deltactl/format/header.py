"""What a link's metadata says: TRL's keys, ours, and the digest that guards the header itself.

All values are strings. Ours begin with ``deltactl.``; a header that has one of them has to have all
that its kind needs. man/deltactl-format.5 is the specification.
"""

from __future__ import annotations

import json
import operator
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, SupportsIndex, cast

from deltactl.core.digest import HEX_DIGITS, TensorState, hasher, is_digest
from deltactl.core.dtypes import DTYPES, elements_of, nbytes_of
from deltactl.core.errors import Malformed, Unsupported, UsageError
from deltactl.files.untrusted import parse_json_list

FORMAT_VERSION = "1"
PREFIX = "deltactl."
TRL_FORMAT = "sparse_weight_patch"
HEADER_DIGEST = PREFIX + "header_digest"
PLACEHOLDER = "0" * HEX_DIGITS

Kind = Literal["sparse", "dense", "added", "removed"]

Form = tuple[str, tuple[int, ...]]
"""A tensor's dtype and shape."""


@dataclass(frozen=True, slots=True)
class Record:
    """One tensor that a delta changes.

    ``dtype`` and ``shape`` are the result's (the base's for a removed one); ``base_dtype`` and
    ``base_shape`` are set where the base's differ. ``changed`` counts elements; ``digest`` is that
    of the whole new tensor, ``old_sum`` and ``new_sum`` are touch sums over the changed elements,
    for sparse ones alone. ``nbytes`` is what the tensor takes in the delta. TRL's deltas have no
    digests, no sums, and no shape: then ``shape`` is None and ``dtype`` may be.
    """

    name: str
    kind: Kind
    dtype: str | None
    shape: tuple[int, ...] | None
    changed: int
    digest: str | None = None
    old_sum: int | None = None
    new_sum: int | None = None
    base_dtype: str | None = None
    base_shape: tuple[int, ...] | None = None
    nbytes: int = 0

    @property
    def elements(self) -> int | None:
        """Elements of the result's tensor (of the base's for a removed one); None: not known."""
        if self.dtype is None or self.shape is None:
            return None
        return elements_of(self.dtype, self.shape)

    @property
    def whole(self) -> bool:
        """Whether the delta carries all of the tensor."""
        return self.kind in ("dense", "added")

    @property
    def replaced(self) -> bool:
        """Whether the base has a tensor of this name with another dtype or shape."""
        return self.base_dtype is not None

    @property
    def base_form(self) -> tuple[str | None, tuple[int, ...] | None] | None:
        """Dtype and shape of the base's tensor; None where it has none of this name."""
        if self.kind == "added":
            return None
        return (self.base_dtype, self.base_shape) if self.replaced else (self.dtype, self.shape)

    def fits(self, form: Form | None) -> bool:
        """Whether a base that has the tensor in this form, or None, is one that it can stand on.
        What it does not say of itself, as TRL's do not of shapes, fits any."""
        if self.base_form is None or form is None:
            return self.base_form == form
        dtype, shape = self.base_form
        return dtype == form[0] and shape in (None, form[1])


MAX_STEP = 10**18 - 1
"""The format's limit; a model that makes a step each nanosecond gets there in 32 years."""


def check_step(step: SupportsIndex) -> int:
    """The step as an int. Raises UsageError for what is no whole number, and for one that is out of
    range."""
    try:
        number = operator.index(step)
    except TypeError:
        number = None
    if number is None or _is_truth(step):
        what = "a step is a whole number"
        raise UsageError(what, expected="such as 4", found=f"{step!r}, {type(step).__name__}")
    if not 0 <= number <= MAX_STEP:
        raise UsageError("the step is out of range", expected=f"0 to {MAX_STEP}", found=number)
    return number


def _is_truth(value: object) -> bool:
    """Whether it is True or False, also one of an array's: as an index those are 1 and 0."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def utf8(name: str) -> bytes:
    """The sort key of names, everywhere."""
    return name.encode()


def record_to_json(record: Record) -> dict[str, Any]:
    """One row of ``deltactl.tensors`` of a delta."""
    row: dict[str, Any] = {
        "name": record.name,
        "kind": record.kind,
        "dtype": record.dtype,
        "shape": list(record.shape or ()),
    }
    if record.kind != "removed":
        row |= {"changed": record.changed, "digest": record.digest}
    if record.kind == "sparse":
        assert record.old_sum is not None and record.new_sum is not None
        row |= {"old": touch_sum_text(record.old_sum), "new": touch_sum_text(record.new_sum)}
    if record.base_dtype is not None and record.base_shape is not None:
        row["base"] = {"dtype": record.base_dtype, "shape": list(record.base_shape)}
    return row


_NOT_IN: Mapping[Kind, frozenset[str]] = {
    "sparse": frozenset({"base"}),
    "dense": frozenset({"old", "new"}),
    "added": frozenset({"old", "new", "base"}),
    "removed": frozenset({"changed", "digest", "old", "new", "base", "bytes"}),
}
"""The keys of a table that rows of other kinds have."""


def record_from_json(row: object, file: object) -> Record:
    """Check and read one row. Raises Malformed."""
    name = row.get("name") if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(name, str):
        raise Malformed("a row of the header's tensor table has no name", file=file)

    def need(good: object, key: str) -> None:
        if not good:
            what = f"the tensor table's {key!r} is malformed"
            raise Malformed(what, file=file, tensor=name, found=row.get(key))

    kind = row.get("kind")
    need(isinstance(kind, str) and kind in _NOT_IN, "kind")
    for key in sorted(_NOT_IN[cast(Kind, kind)] & row.keys()):
        need(False, key)
    dtype, shape = _dtype_and_shape(row, name, file)
    record = Record(name, cast(Kind, kind), dtype, shape, 0)
    if kind == "removed":
        return record
    need(is_digest(row.get("digest")), "digest")
    changed, every = row.get("changed"), record.elements or 0
    least = every if kind == "added" or "base" in row else 1  # or the row would not be there
    need(type(changed) is int and least <= changed <= every, "changed")
    record = replace(record, changed=cast(int, changed), digest=row["digest"])
    if kind == "sparse":
        old, new = (touch_sum_from_json(row, key, file) for key in ("old", "new"))
        record = replace(record, old_sum=old, new_sum=new)
    if "base" in row:
        need(isinstance(row["base"], dict), "base")
        base_dtype, base_shape = _dtype_and_shape(row["base"], name, file)
        need((base_dtype, base_shape) != (dtype, shape), "base")
        record = replace(record, base_dtype=base_dtype, base_shape=base_shape)
    return record


def touch_sum_from_json(row: Mapping[str, Any], key: str, file: object) -> int:
    """The touch sum under ``key`` of a row with a name. Raises Malformed."""
    value = row.get(key)
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{16}", value):
        what = f"the tensor table's {key!r} is malformed"
        raise Malformed(what, file=file, tensor=row["name"], found=reprlib.repr(value))
    return int(value, 16)


def touch_sum_text(touch: int) -> str:
    """A touch sum as the format writes it."""
    return f"{touch:016x}"


def _dtype_and_shape(
    row: Mapping[str, Any], name: str, file: object
) -> tuple[str, tuple[int, ...]]:
    dtype, shape = row.get("dtype"), row.get("shape")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Malformed("unknown dtype in the tensor table", file=file, tensor=name, found=dtype)
    sizes = isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in shape)
    try:
        if not sizes or nbytes_of(dtype, shape or ()) >= 1 << 63:
            raise ValueError
    except ValueError:
        what = "the shape in the tensor table is malformed"
        raise Malformed(what, file=file, tensor=name, found=shape) from None
    return dtype, tuple(shape or ())


def delta_metadata(
    records: Sequence[Record],
    *,
    encoding: str,
    base_state: str,
    result_state: str,
    total_elements: int,
    step: int | None,
    base_step: int | None,
) -> dict[str, str]:
    """The metadata of a delta but for the payload's digest; the header's own is a placeholder."""
    changed = sum(record.changed for record in records)
    metadata = {
        "format": TRL_FORMAT,
        "version": "1",
        "sparse": "True",
        "encoding": encoding,
        "num_changed_params": str(len(records)),
        "total_changed_elements": str(changed),
        "total_elements": str(total_elements),
        "sparsity": repr(1 - changed / total_elements if total_elements else 1.0),
        PREFIX + "format": FORMAT_VERSION,
        PREFIX + "base_state": base_state,
        PREFIX + "result_state": result_state,
        PREFIX + "tensors": table_text(map(record_to_json, records)),
        HEADER_DIGEST: PLACEHOLDER,
    }
    if step is not None:
        metadata["model_version"] = str(step)
    if base_step is not None:
        metadata["prev_model_version"] = str(base_step)
    return metadata


def state_to_json(tensor: TensorState) -> dict[str, Any]:
    """One row of ``deltactl.tensors`` of an anchor."""
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "digest": tensor.digest,
    }


def state_from_json(row: object, file: object) -> TensorState:
    """Check and read one row. Raises Malformed."""
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise Malformed("a row of the header's tensor table has no name", file=file)
    dtype, shape = _dtype_and_shape(row, row["name"], file)
    if not is_digest(row.get("digest")):
        what = "the tensor table's 'digest' is malformed"
        raise Malformed(what, file=file, tensor=row["name"], found=row.get("digest"))
    return TensorState(row["name"], dtype, shape, row["digest"])


def table_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """The value of ``deltactl.tensors``."""
    return json.dumps(list(rows), separators=(",", ":"), ensure_ascii=False)


def table_rows(text: str, file: object) -> list[Any]:
    """The rows of ``deltactl.tensors`` or ``deltactl.files``. Raises Malformed."""
    return parse_json_list(text, file, what="the header's table")


def in_order(names: list[str], file: object, *, what: str = "the tensor table") -> None:
    """Raise Malformed unless the names of a table rise strictly by their UTF-8 bytes."""
    try:
        keys = [utf8(name) for name in names]
    except UnicodeEncodeError:
        raise Malformed(f"a name in {what} is no text", file=file) from None
    for before, after in pairwise(keys):
        if before >= after:
            fault = f"{what} is not in order of names"
            raise Malformed(fault, file=file, found=reprlib.repr(after.decode()))


def is_ours(metadata: Mapping[str, object]) -> bool:
    """Whether any key is ours; such a header has to be whole."""
    return any(key.startswith(PREFIX) for key in metadata)


def need_digest(metadata: Mapping[str, object], key: str, file: object) -> str:
    """The digest under ``key``. Raises Malformed."""
    value = metadata.get(PREFIX + key)
    if not isinstance(value, str) or not is_digest(value):
        raise Malformed(f"the header has no sound {PREFIX + key}", file=file, found=value)
    return value


def need_count(metadata: Mapping[str, object], key: str, file: object) -> int:
    """The non-negative integer that TRL's ``key`` spells. Raises Malformed."""
    value = metadata.get(key)
    if not isinstance(value, str) or not re.fullmatch("0|[1-9][0-9]{0,17}", value):
        raise Malformed(f"the header has no sound {key}", file=file, found=value)
    return int(value)


def check_version(metadata: Mapping[str, object], file: object) -> None:
    """Raise Unsupported for a later format, Malformed for none."""
    version = metadata.get(PREFIX + "format")
    if version == FORMAT_VERSION:
        return
    if isinstance(version, str) and re.fullmatch("[1-9][0-9]{0,5}", version):
        raise Unsupported(
            "the link has a later format",
            file=file,
            expected=f"format {FORMAT_VERSION}",
            found=f"format {version}",
            hint="pip install --upgrade deltactl",
        )
    raise Malformed("the header has no sound deltactl.format", file=file, found=version)


def seal(raw: bytes) -> bytes:
    """Put the header's own digest in the place that PLACEHOLDER holds for it.

    ``raw``: all bytes of the header (of an index, all bytes of the file), compact JSON, in which
    the value of ``deltactl.header_digest`` is 64 zeros.
    """
    at = _digest_place(raw, PLACEHOLDER)
    if at is None:
        raise ValueError("no place for the header's digest")
    digest: bytes = hasher().update(raw).hexdigest().encode()
    return raw[:at] + digest + raw[at + HEX_DIGITS :]


def check_seal(raw: bytes, metadata: Mapping[str, object], file: object) -> None:
    """Raise Malformed unless the header's bytes have the digest that they name."""
    expected = need_digest(metadata, "header_digest", file)
    at = _digest_place(raw, expected)
    if at is None:
        raise Malformed("the header's digest stands in no place of its own", file=file)
    whole = memoryview(raw)  # a copy of which may be 100 MB
    digest = hasher().update(whole[:at]).update(PLACEHOLDER.encode())
    found = digest.update(whole[at + HEX_DIGITS :]).hexdigest()
    if found != expected:
        what = "the header does not have the digest that it names"
        raise Malformed(what, file=file, expected=expected, found=found)


def _digest_place(raw: bytes, digest: str) -> int | None:
    """Where the digest's digits begin, if it stands exactly once."""
    key = f'"{HEADER_DIGEST}":"'.encode()
    text = key + digest.encode() + b'"'
    return raw.index(text) + len(key) if raw.count(text) == 1 else None
