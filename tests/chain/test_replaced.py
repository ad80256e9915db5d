"""Links that keep next to nothing of the step before are told of; ordinary training is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltactl.bucket.local import LocalBucket
from deltactl.chain.chain import Link
from deltactl.chain.reading import read_chain
from deltactl.chain.replaced import delta_replaces_all, keeps_nothing, replaces_all
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.format.delta import open_delta
from deltactl.format.header import Record
from deltactl.format.link_names import delta_name
from deltactl.ops.diff import diff
from deltactl.ops.push import push
from deltactl.ops.verify import verify_bucket, verify_delta
from tests.support.chains import Tensors, first_state, make_chain, next_state
from tests.support.checkpoints import changed, random_weights, write_safetensors
from tests.support.trl_writer import write_chain

NAMES = ("a", "b", "c")
BEFORE: Tensors = {name: random_weights("BF16", (8, 8), n) for n, name in enumerate(NAMES)}


def inverted(data: bytes) -> bytes:
    return bytes(255 - byte for byte in data)


WAYS = {
    "kept": lambda spec: spec,
    "changed": lambda spec: changed(spec, 0.1, 3),
    "inverted": lambda spec: (spec[0], spec[1], inverted(spec[2])),
    "another dtype": lambda spec: ("F32", spec[1], spec[2] * 2),
    "emptied": lambda spec: (spec[0], (0,), b""),
    "removed": lambda spec: None,
}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))


def after(ways: tuple[str, ...], added: bool) -> Tensors:
    found = {name: WAYS[way](BEFORE[name]) for name, way in zip(NAMES, ways, strict=True)}
    found = {name: spec for name, spec in found.items() if spec is not None}
    return found | ({"new": random_weights("BF16", (4,), 9)} if added else {})


def bypassed(directory: Path, result: Tensors) -> LocalBucket:
    """A chain whose second link leads there, as a push before there was a gate put it."""
    bucket = LocalBucket(directory / "bucket")
    one = write_safetensors(directory / "one.safetensors", BEFORE)
    two = write_safetensors(directory / "two.safetensors", result)
    push(one, bucket)
    with open_checkpoint(one) as a, open_checkpoint(two) as b:
        diff(a, b, directory / "delta", step=2, base_step=1)
    bucket.put(delta_name(2), directory / "delta")
    return bucket


@given(st.tuples(*[st.sampled_from(sorted(WAYS))] * 3), st.booleans())
def test_a_delta_replaces_all_where_no_element_is_kept(
    tmp_path_factory: pytest.TempPathFactory, ways: tuple[str, ...], added: bool
) -> None:
    directory = tmp_path_factory.mktemp("pair")
    bucket = bypassed(directory, after(ways, added))
    chain = read_chain(bucket)
    delta: Link = chain.deltas[2]
    kept = any(way in ("kept", "changed") for way in ways)
    assert replaces_all(chain, delta) == (not kept)
    assert not replaces_all(chain, chain.anchors[1])
    report = verify_bucket(bucket, level="rebuild")
    assert report.ok
    assert report.replaced == ([] if kept else [delta.name])
    alone = verify_delta(directory / "delta")
    assert alone.replaced == ([] if kept else [str(directory / "delta")])
    assert delta.sparsity is not None
    assert (delta.sparsity > 0) == kept
    one, two = directory / "one.safetensors", directory / "two.safetensors"
    with open_checkpoint(one) as a, open_checkpoint(two) as b:
        assert diff(a, b, None).sparsity == delta.sparsity


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_an_anchor_where_another_model_begins(tmp_path: Path, dtype: str) -> None:
    bucket = LocalBucket(tmp_path / "bucket")
    push(write_safetensors(tmp_path / "1.safetensors", BEFORE), bucket)
    other = {name: random_weights(dtype, (4, 4), n + 50) for n, name in enumerate(NAMES)}
    path = write_safetensors(tmp_path / "2.safetensors", other)
    push(path, bucket, allow_other_model=True)
    chain = read_chain(bucket)
    assert [link.name for link in chain.links if replaces_all(chain, link)] == (
        verify_bucket(bucket).replaced
    )
    assert verify_bucket(bucket).replaced == ["anchors/step_000002.safetensors"]


def test_nothing_is_said_of_a_chain_that_trains(tmp_path: Path) -> None:
    states = [first_state()]
    states += [next_state(first_state(), n) for n in range(1, 5)]
    bucket = make_chain(tmp_path, [*states, states[-1]], anchor_every=2)
    assert verify_bucket(bucket).replaced == []
    assert {link.sparsity for link in read_chain(bucket).links if link.kind == "anchor"} == {None}


@pytest.mark.parametrize("dialect", ["trl-1", "raw", "gap_delta"])
def test_nothing_is_said_of_trls_anchors(tmp_path: Path, dialect: str) -> None:
    """Which have no delta beside them, and no digests."""
    states = [BEFORE]
    for n in range(1, 7):
        states.append({name: changed(spec, 0.1, n) for name, spec in states[-1].items()})
    write_chain(tmp_path / "bucket", states, dialect, anchor_every=3)
    assert verify_bucket(LocalBucket(tmp_path / "bucket")).replaced == []


def test_a_delta_without_changes_keeps_all(tmp_path: Path) -> None:
    path = tmp_path / "delta"
    for tensors in ({}, BEFORE, {"empty": ("BF16", (0,), b"")}):
        checkpoint = write_safetensors(tmp_path / "x.safetensors", tensors)  # type: ignore[arg-type]
        with open_checkpoint(checkpoint) as opened:
            diff(opened, opened, path)
        header = open_delta(path).header
        assert (delta_replaces_all(header), header.sparsity) == (False, 1.0)


def pushed(directory: Path, *states: Tensors) -> tuple[LocalBucket, list[tuple[str, ...]]]:
    """A chain of these states, and what each push had to say."""
    bucket = LocalBucket(directory / "bucket")
    notes = []
    for n, state in enumerate(states, 1):
        path = write_safetensors(directory / f"{n}.safetensors", state)
        notes.append(push(path, bucket).notes)
    return bucket, notes


def said(bucket: LocalBucket) -> list[str]:
    """The links that are told of, by ``log`` and ``verify`` alike."""
    chain = read_chain(bucket)
    names = [link.name for link in chain.links if replaces_all(chain, link)]
    assert verify_bucket(bucket).replaced == names
    return names


def of(*dtypes: str, seed: int = 0) -> Tensors:
    return {f"w{n}": random_weights(dtype, (16, 64), seed + n) for n, dtype in enumerate(dtypes)}


def trained(state: Tensors) -> Tensors:
    """All elements of more than 16 bits changed, and about 1 % of the others."""
    wide = ("F32", "F64", "I32")
    return {n: changed(s, 1.0 if s[0] in wide else 0.01, 5) for n, s in state.items()}


@pytest.mark.parametrize(
    "dtypes",
    [("F32",), ("F32", "F32"), ("F64",), ("I32",), ("BF16", "F32"), ("F8_E4M3", "F32", "F32")],
)
def test_training_that_changes_every_wide_element_is_ordinary(
    tmp_path: Path, dtypes: tuple[str, ...]
) -> None:
    first = of(*dtypes)
    second = trained(first)
    third = trained(second) | {"score": random_weights("F32", (2, 4), 9)}
    bucket, notes = pushed(tmp_path, first, second, third)
    assert notes == [(), (), ("1 tensor is new: score",)]
    assert said(bucket) == []


@pytest.mark.parametrize(
    "dtypes",
    [("BF16",), ("F16", "BF16"), ("F8_E4M3",), ("U8",), ("BF16", "BF16", "F32")],
)
@pytest.mark.parametrize("head", [False, True])
def test_another_runs_weights_are_told_of(
    tmp_path: Path, dtypes: tuple[str, ...], head: bool
) -> None:
    before, after = of(*dtypes), of(*dtypes, seed=50)
    after |= {"score": random_weights("F32", (2, 4), 9)} if head else {}
    bucket, notes = pushed(tmp_path, before, after)
    (delta,) = (link for link in read_chain(bucket).links if link.kind == "delta")
    assert said(bucket) == [delta.name]
    counts = f"{delta.changed_elements:,} of {delta.total_elements:,} elements changed"
    assert notes[1][-1] == f"{counts}: these look like another run's weights"
    assert len(notes[1]) == 1 + head
    # As a delta that was made before, and as an anchor too, it is the same.
    bucket.fetch(delta.name, tmp_path / "delta")
    for n, options in enumerate([{}, {"anchor_every": 1}]):
        elsewhere = LocalBucket(tmp_path / f"elsewhere{n}")
        push(tmp_path / "1.safetensors", elsewhere)
        assert push(tmp_path / "delta", elsewhere, **options).notes == notes[1]
        assert said(elsewhere) == [delta.name]
    assert verify_delta(tmp_path / "delta").replaced == [str(tmp_path / "delta")]


def test_another_model_that_was_let_in_is_told_of_as_such(tmp_path: Path) -> None:
    bucket, _ = pushed(tmp_path, of("BF16"))
    other = write_safetensors(tmp_path / "other.safetensors", of("F32"))
    report = push(other, bucket, allow_other_model=True)
    assert not any("another run" in note for note in report.notes)
    assert said(bucket) == ["anchors/step_000002.safetensors"]


def sparse(dtype: str | None, changed: int, size: int = 1000) -> Record:
    return Record("w", "sparse", dtype, (size,), changed)


ADDED = Record("new", "added", "F32", (1000,), 1000)
REMOVED = Record("old", "removed", "BF16", (1000,), 0)
RESHAPED = Record("w", "dense", "BF16", (9,), 9, base_dtype="BF16", base_shape=(8,))


@pytest.mark.parametrize(
    ("records", "total", "expected"),
    [
        ([], 0, False),
        ([], 1000, False),
        ([sparse("BF16", 950)], 1000, False),
        ([sparse("BF16", 951)], 1000, True),
        ([sparse("BF16", 951)], None, False),
        ([sparse("BF16", 1000)], 2000, False),  # another tensor is as it was
        ([sparse("F32", 1000)], 1000, False),
        ([sparse("F32", 951)], 1000, False),
        ([sparse(None, 1000)], 1000, False),
        ([sparse("BF16", 1000), sparse("F32", 1000)], 2000, False),  # half tells, and not more
        ([sparse("BF16", 1001, 1001), sparse("F32", 1000)], 2001, True),
        ([sparse("BF16", 1000), sparse("F32", 500)], 2000, False),  # half of float32 is as it was
        ([ADDED, REMOVED], 1000, True),
        ([ADDED, REMOVED], 1001, False),
        ([REMOVED], 0, True),
        ([RESHAPED], 9, True),
        ([RESHAPED, sparse("F32", 1000)], 1009, False),
        ([RESHAPED, sparse("BF16", 960)], 1009, True),
        ([ADDED, sparse("BF16", 10)], 2000, False),
    ],
)
def test_what_tells(records: list[Record], total: int | None, expected: bool) -> None:
    assert keeps_nothing(records, total) == expected
