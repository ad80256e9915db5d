"""Every key of every header and every field of every row: a false value, and who says so.

A liar seals what it writes. Where other keys would give a row away at once they are made to fit it
(``fit``), so that each check is tried by itself.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.core.digest import TensorState, state_digest
from deltactl.core.errors import Malformed
from deltactl.format.delta_index import DELTA_INDEX
from deltactl.format.link_names import (
    anchor_directory,
    anchor_file_name,
    delta_directory,
    delta_name,
)
from deltactl.ops.apply import apply_delta
from deltactl.ops.pull import pull
from deltactl.ops.push import push
from deltactl.ops.verify import LEVELS, verify_bucket
from tests.support.chains import every_kind, first_state, make_delta, write
from tests.support.checkpoints import write_safetensors
from tests.support.lies import Header, rewrite, rewrite_index
from tests.support.several import table, write_parts

BEFORE = first_state()
AFTER = every_kind(BEFORE)

MISSING = object()
OTHER = "f" * 64
SUM = "0123456789abcdef"

# False values, or functions from the true one to it. Headers alone show that they are false, unless
# the lowest level that says so stands beside.

COMMON: dict[str, list[Any]] = {
    "format": [MISSING, "pt", ""],
    "version": [MISSING, "2"],
    "model_version": [MISSING, "3", "-1", "01", " 1"],
    "total_elements": [MISSING, "0", lambda n: str(int(n) + 1), lambda n: str(int(n) - 1), "1e3"],
    "deltactl.format": [MISSING, "0", "2", "1.0"],
    "deltactl.header_digest": [MISSING, OTHER, "", "0"],
    "deltactl.result_state": [MISSING, OTHER, "f"],
    "deltactl.tensors": [MISSING, "[]", "{}", "", lambda t: t.replace("[{", "[{},{", 1)],
}
ANCHOR = {**COMMON, "sparse": [MISSING, "True", "false"]}
ANCHOR_INDEX = {
    **ANCHOR,
    "deltactl.files": [MISSING, "[]", "{}"],
    "total_size": [MISSING, 0, lambda n: n + 1, lambda n: str(n), lambda n: float(n), True],
}
DELTA = {
    **COMMON,
    "sparse": [MISSING, "False", "true"],
    "encoding": [MISSING, "raw", "nonsense", ""],
    "prev_model_version": [MISSING, "0", "2", "x"],
    "num_changed_params": [MISSING, "0", "7", "06"],
    "total_changed_elements": [MISSING, "0", lambda n: str(int(n) + 1), "-1"],
    "sparsity": [MISSING, "1.0", "-97.57", "nan", "inf", "0_1", "", "1" * 400],
    "deltactl.base_state": [MISSING, OTHER, 64 * "F"],
}
DELTA_FILE = {**DELTA, "deltactl.payload_digest": [MISSING, (OTHER, "data")]}
DELTA_INDEX_ = {
    **DELTA,
    "encoding": [MISSING, ("raw", "data"), "nonsense", ""],  # entries are seen in the parts alone
    "deltactl.files": [MISSING, "[]", "null"],
}

NAMES = [MISSING, "another", 1, None]
DTYPES = [MISSING, "F64", "nonsense", 1]
SHAPES = [MISSING, [7], [-1], "x", [1 << 70], [True]]
DIGESTS = [MISSING, "f", 1]
KINDS = [MISSING, "copied", None, []]
COUNTS = [MISSING, -1, 1 << 50, "1", 1.5, True]
ROWS: dict[str, dict[str, list[Any]]] = {
    "sparse": {
        "name": NAMES,
        "kind": [*KINDS, "dense", "added", "removed"],
        "dtype": DTYPES,
        "shape": SHAPES,
        "changed": [*COUNTS, 0, (lambda n: n + 1, "data")],
        "digest": [*DIGESTS, (OTHER, "rebuild")],
        "old": [MISSING, SUM.upper(), 0, (SUM, "rebuild")],
        "new": [MISSING, SUM[:15], 0, (SUM, "rebuild")],
        "base": [{"dtype": "BF16", "shape": [1]}],
    },
    "dense": {
        "name": NAMES,
        "kind": [*KINDS, "sparse", "added", "removed"],
        "dtype": DTYPES,
        "shape": SHAPES,
        "changed": [*COUNTS, 0, (lambda n: n - 1, "rebuild")],
        "digest": [*DIGESTS, (OTHER, "data")],
        "old": [SUM],
        "new": [SUM],
        "base": [{"dtype": "F32", "shape": [64]}, {"dtype": "F32", "shape": [63]}, None],
    },
    "replaced": {
        "name": NAMES,
        "kind": [*KINDS, "sparse", "added", "removed"],
        "dtype": DTYPES,
        "shape": SHAPES,
        "changed": [*COUNTS, 0, 1],
        "digest": [*DIGESTS, (OTHER, "data")],
        "old": [SUM],
        "new": [SUM],
        "base": [MISSING, {}, {"dtype": "F32"}, {"dtype": "F32", "shape": [1]}, "F32"],
    },
    "added": {
        "name": NAMES,
        "kind": [*KINDS, "sparse", "dense", "removed"],
        "dtype": DTYPES,
        "shape": SHAPES,
        "changed": [*COUNTS, 0, 2],
        "digest": [*DIGESTS, (OTHER, "data")],
        "old": [SUM],
        "new": [SUM],
        "base": [{"dtype": "F32", "shape": [1]}],
    },
    "removed": {
        "name": NAMES,
        "kind": [*KINDS, "sparse", "dense", "added"],
        "dtype": DTYPES,
        "shape": SHAPES,
        "changed": [0, 1],
        "digest": [OTHER],
        "old": [SUM],
        "new": [SUM],
        "base": [{"dtype": "F32", "shape": [1]}],
    },
}
_SIZES = [MISSING, -1, 1.5, 1 << 63]
# The parts have each row too, so that a false one needs no base to be seen.
OF_INDEX: dict[str, dict[str, list[Any]]] = {
    "sparse": {
        "bytes": [*_SIZES, (0, "data")],
        "digest": [*DIGESTS, (OTHER, "data")],
        "old": [MISSING, (SUM, "data")],
        "new": [MISSING, (SUM, "data")],
    },
    "dense": {"bytes": [*_SIZES, 0], "changed": [*COUNTS, 0, (lambda n: n - 1, "data")]},
    "replaced": {"bytes": [*_SIZES, 0]},
    "added": {
        "bytes": [*_SIZES, 0],
        "dtype": [MISSING, "BF16", ("F64", "data"), "nonsense", 1],
    },
    "removed": {"bytes": [0]},
}
STATE_ROW = {
    "name": NAMES,
    "dtype": DTYPES,
    "shape": SHAPES,
    "digest": [*DIGESTS, (OTHER, "data")],
    "sum": [0, "", SUM.upper(), (SUM, "data")],
}
NAMES_OF_FILES = [
    MISSING,
    "/etc/passwd",
    "../a.safetensors",
    "a\\b.safetensors",
    1,
    "zz.safetensors",
]
DELTA_FILE_ROW = {
    "name": [*NAMES_OF_FILES, "sub/a.safetensors"],
    "bytes": [MISSING, -1, 0, lambda n: n + 1, "1", True],
    "header": [*DIGESTS, (OTHER, "data")],
    "payload": [*DIGESTS, (OTHER, "data")],
}
SHARD_ROW = {
    "name": [*NAMES_OF_FILES, "sub/a.safetensors", "./model-00001-of-00002.safetensors"],
    "bytes": [MISSING, -1, 0, lambda n: n + 1, "1", True],
    "header": [*DIGESTS, (OTHER, "data")],
    "digest": [OTHER],
}
AUX_ROW = {
    "name": [*NAMES_OF_FILES, "tokenizer/../config.json"],
    "bytes": [MISSING, -1, 0, lambda n: n + 1, "1", True],
    "digest": [*DIGESTS, (OTHER, "data")],
    "header": [OTHER],
}

FILES_KEY, ROWS_KEY = "deltactl.files", "deltactl.tensors"


# What is lied about.


class Subject:
    """A link of a small chain; ``metadata`` and ``rows``: what a case changes, by its keys."""

    def __init__(self, name: str, link: str, cases: dict[str, list[Any]]) -> None:
        self.name, self.link = name, link
        self.cases = cases
        self.rows: dict[
            str, tuple[str, Callable[[dict[str, Any]], bool], dict[str, list[Any]]]
        ] = {}

    def with_rows(
        self, kind: str, key: str, is_one: Callable[[dict[str, Any]], bool], cases: Any
    ) -> Subject:
        self.rows[kind] = (key, is_one, cases)
        return self

    def rewrite(self, root: Path, change: Callable[[Header], None]) -> None:
        """``change`` gets the metadata."""
        if self.link.endswith(".json"):
            rewrite_index(root / self.link, lambda document: change(document["metadata"]))
        else:
            rewrite(root / self.link, lambda header, _: change(header["__metadata__"]))

    def every_case(self) -> Iterator[tuple[str, str, Any, str]]:
        """Which table, "" for the metadata itself; key; false value; level."""
        tables = {"": self.cases, **{kind: cases for kind, (_, _, cases) in self.rows.items()}}
        for kind, cases in tables.items():
            for key, values in cases.items():
                for value in values:
                    level = value[1] if isinstance(value, tuple) else "links"
                    yield kind, key, value[0] if isinstance(value, tuple) else value, level


def of_kind(kind: str) -> Callable[[dict[str, Any]], bool]:
    if kind == "replaced":
        return lambda row: "base" in row
    return lambda row: row["kind"] == kind and "base" not in row


def delta_subject(name: str, link: str, cases: dict[str, list[Any]], more: Any = None) -> Subject:
    subject = Subject(name, link, cases)
    for kind, of_row in ROWS.items():
        subject.with_rows(kind, ROWS_KEY, of_kind(kind), {**of_row, **(more or {}).get(kind, {})})
    return subject


def is_shard(row: dict[str, Any]) -> bool:
    return "header" in row


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("anchor", anchor_file_name(1), ANCHOR).with_rows(
            "state", ROWS_KEY, lambda row: bool(row["shape"]), STATE_ROW
        ),
        Subject(
            "anchor's index", f"{anchor_directory(1)}/model.safetensors.index.json", ANCHOR_INDEX
        )
        .with_rows("state", ROWS_KEY, lambda row: bool(row["shape"]), STATE_ROW)
        .with_rows("shard", FILES_KEY, is_shard, SHARD_ROW)
        .with_rows("file", FILES_KEY, lambda row: not is_shard(row), AUX_ROW),
        delta_subject("delta", delta_name(2), DELTA_FILE),
        delta_subject(
            "delta's index", f"{delta_directory(2)}/{DELTA_INDEX}", DELTA_INDEX_, OF_INDEX
        ).with_rows("part", FILES_KEY, lambda row: True, DELTA_FILE_ROW),
    )
}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bucket for each subject."""
    place = tmp_path_factory.mktemp("made")
    for name in SUBJECTS:
        root = place / name
        base = write(place / f"{name} base", BEFORE, shards=2 if name == "anchor's index" else 0)
        push(base, LocalBucket(root), step=1)
        if name == "delta":
            make_delta(root / "deltas" / "x", BEFORE, AFTER, step=2).rename(root / delta_name(2))
        elif name == "delta's index":
            write_parts(root / delta_directory(2), BEFORE, AFTER, count=2, step=2)
    return place


@pytest.fixture
def bucket(made: Path, tmp_path: Path) -> Callable[[Subject], Path]:
    def copy(subject: Subject) -> Path:
        return Path(shutil.copytree(made / subject.name, tmp_path / "bucket"))

    return copy


def table_rows(metadata: Header, key: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(metadata[key])
    return found


def lie(target: dict[str, Any], key: str, value: Any) -> None:
    if value is MISSING:
        del target[key]
    else:
        target[key] = value(target[key]) if callable(value) else value


def fit(metadata: Header) -> None:
    """Make all that follows from the rows follow from them again, as far as they are rows."""
    rows = table_rows(metadata, ROWS_KEY)
    before = table(BEFORE)
    after = dict(before) if metadata["sparse"] == "True" else {}
    for row in rows:
        if row.get("kind") == "removed":
            after.pop(row["name"], None)
        else:
            shape = tuple(row["shape"])
            after[row["name"]] = TensorState(row["name"], row["dtype"], shape, row["digest"])
    metadata["deltactl.result_state"] = state_digest(after.values())
    total = sum(tensor.elements for tensor in after.values())
    metadata["total_elements"] = str(total)
    if metadata["sparse"] == "True":
        changed = sum(row.get("changed", 0) for row in rows)
        metadata["num_changed_params"] = str(len(rows))
        metadata["total_changed_elements"] = str(changed)
        metadata["sparsity"] = repr(1 - changed / total)


def tell(root: Path, subject: Subject, kind: str, key: str, value: Any) -> None:
    def change(metadata: Header) -> None:
        if not kind:
            lie(metadata, key, value)
            return
        table_key, is_one, _ = subject.rows[kind]
        rows = table_rows(metadata, table_key)
        lie(next(row for row in rows if is_one(row)), key, value)
        metadata[table_key] = json.dumps(rows, separators=(",", ":"))
        with contextlib.suppress(Exception):  # what is no row at all fits nothing
            fit(metadata)

    subject.rewrite(root, change)


CASES = [
    pytest.param(subject, kind, key, value, level, id=f"{subject.name}-{kind}-{key}-{n}")
    for subject in SUBJECTS.values()
    for n, (kind, key, value, level) in enumerate(subject.every_case())
]


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_what_is_told_is_the_truth_at_first(
    bucket: Callable[[Subject], Path], subject: Subject
) -> None:
    root = bucket(subject)
    subject.rewrite(root, fit)
    report = verify_bucket(LocalBucket(root), level="rebuild")
    assert (report.errors, report.unproven) == ([], [])


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_every_key_has_a_case(bucket: Callable[[Subject], Path], subject: Subject) -> None:
    """So a key that is new in the format has none until somebody says who looks at it."""
    found: dict[str, Any] = {}
    subject.rewrite(bucket(subject), found.update)
    assert found.keys() == subject.cases.keys()
    for kind, (key, is_one, cases) in subject.rows.items():
        rows = [row for row in table_rows(found, key) if is_one(row)]
        assert rows, kind
        for row in rows:
            assert row.keys() <= cases.keys()
    tables = {key for key, _, _ in subject.rows.values()}
    for key in tables:
        for row in table_rows(found, key):
            kinds = [k for k, (of, is_one, _) in subject.rows.items() if of == key and is_one(row)]
            assert len(kinds) <= 1


@pytest.mark.parametrize(("subject", "kind", "key", "value", "level"), CASES)
def test_a_false_value_is_said_by_the_level_that_can_know(
    bucket: Callable[[Subject], Path],
    subject: Subject,
    kind: str,
    key: str,
    value: Any,
    level: str,
) -> None:
    root = bucket(subject)
    tell(root, subject, kind, key, value)
    for name in LEVELS:
        report = verify_bucket(LocalBucket(root), level=name)
        if LEVELS.index(name) < LEVELS.index(level):
            assert report.errors == []
        else:
            assert not report.ok
            place = subject.link.rsplit("/", 1)[0]
            assert all(str(row["file"]).startswith(place) for row in report.errors[:1])


@pytest.mark.parametrize("encoding", ["raw", "gap_delta"], ids=lambda encoding: encoding)
def test_new_bits_that_are_told_as_they_are_show_their_sum(
    bucket: Callable[[Subject], Path], tmp_path: Path, encoding: str
) -> None:
    subject = SUBJECTS["delta"]
    root = bucket(subject)
    make_delta(tmp_path / "x", BEFORE, AFTER, encoding=encoding).replace(root / subject.link)
    tell(root, subject, "sparse", "new", SUM)
    assert verify_bucket(LocalBucket(root), level="links").ok
    (row,) = verify_bucket(LocalBucket(root), level="data").errors
    assert row["expected"] == SUM
    assert "touch sum" in row["what"]


# Who writes what a delta says does not take a row's word for it either.


@pytest.mark.parametrize("kind", ["sparse", "dense", "replaced", "added"])
def test_apply_and_pull_look_at_each_tensors_digest(
    bucket: Callable[[Subject], Path], tmp_path: Path, kind: str
) -> None:
    """Though the whole has the state that the delta names: the row alone is false."""
    subject = SUBJECTS["delta"]
    root = bucket(subject)

    def change(metadata: Header) -> None:
        rows = table_rows(metadata, ROWS_KEY)
        next(row for row in rows if of_kind(kind)(row))["digest"] = OTHER
        metadata[ROWS_KEY] = json.dumps(rows, separators=(",", ":"))

    subject.rewrite(root, change)
    base = write_safetensors(tmp_path / "base.safetensors", BEFORE)
    for run in (
        lambda out: apply_delta(root / subject.link, base, out),
        lambda out: pull(LocalBucket(root), out),
    ):
        with pytest.raises(Malformed, match="does not have the digest") as caught:
            run(tmp_path / "out.safetensors")
        assert caught.value.expected == OTHER
        assert not (tmp_path / "out.safetensors").exists()
