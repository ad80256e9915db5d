"""A delta onto a checkpoint on disk: what is refused, what is kept, and what a crash leaves."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.checkpoint.state import state_of
from deltactl.core.errors import Conflict, DeltactlError, Malformed, NotFound, UsageError
from deltactl.ops import apply as apply_module
from deltactl.ops.apply import ApplyReport, apply_delta
from tests.support.chains import (
    AUX,
    Tensors,
    content,
    every_kind,
    first_state,
    holds,
    make_delta,
    next_state,
    write,
    write_torch,
)
from tests.support.checkpoints import (
    flip_bit,
    random_tensor,
    read_metadata,
    read_tensors,
    write_hf_directory,
)
from tests.support.crash import crashes
from tests.support.lies import Header, rewrite
from tests.support.surroundings import decorate, holds_weights, others_of

ENCODINGS = ("raw", "gap_delta", "ulp")


@pytest.fixture
def before() -> Tensors:
    return first_state()


@pytest.fixture
def after(before: Tensors) -> Tensors:
    return every_kind(before)


@pytest.fixture
def delta(tmp_path: Path, before: Tensors, after: Tensors) -> Path:
    return make_delta(tmp_path / "delta.safetensors", before, after)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# What it writes.


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_file_to_a_file(tmp_path: Path, before: Tensors, after: Tensors, encoding: str) -> None:
    delta = make_delta(tmp_path / "delta.safetensors", before, after, encoding=encoding)
    base = write(tmp_path / "base.safetensors", before, shards=0)
    out = tmp_path / "new" / "out.safetensors"
    report = apply_delta(delta, base, out)
    assert holds(out, after)
    assert holds(base, before)
    with open_checkpoint(out) as checkpoint:
        state = state_of(checkpoint)
    changed = report.changed_elements
    assert report == ApplyReport(out, state, 2, changed, written=True, proven=True)
    assert names(out.parent) == [out.name]


def test_a_directory_to_a_directory_keeps_the_shards_and_the_other_files(
    tmp_path: Path, before: Tensors, delta: Path, after: Tensors
) -> None:
    base = write(tmp_path / "base", before)
    out = tmp_path / "out"
    apply_delta(delta, base, out)
    assert holds(out, after)
    with open_checkpoint(base) as old, open_checkpoint(out) as new:
        homes = [{n: s.file for s in c.shards for n in s.tensors} for c in (old, new)]
    kept = homes[0].keys() & homes[1].keys()
    assert len(kept) == 4
    assert all(homes[0][name] == homes[1][name] for name in kept)
    assert {name: (out / name).read_bytes() for name in AUX} == AUX
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in after.values())
    assert read_metadata(out / "model-00001-of-00002.safetensors") == {"format": "pt"}


@pytest.mark.parametrize("shards", [0, 1, 2])
def test_in_place(
    tmp_path: Path, before: Tensors, after: Tensors, delta: Path, shards: int
) -> None:
    base = write(tmp_path / ("base" if shards else "base.safetensors"), before, shards=shards)
    was = names(tmp_path)
    report = apply_delta(delta, base, None)
    assert report.written
    assert report.out == base
    assert holds(base, after)
    assert names(tmp_path) == was


def test_a_torch_directory_is_written_as_safetensors(
    tmp_path: Path, before: Tensors, after: Tensors, delta: Path
) -> None:
    base = write_torch(tmp_path / "base", before)
    apply_delta(delta, base, tmp_path / "out")
    assert holds(tmp_path / "out", after)
    with pytest.raises(UsageError, match="in place"):
        apply_delta(delta, base, None)


# What it refuses.


def altered(tensors: Tensors, name: str, at: int) -> Tensors:
    dtype, shape, data = tensors[name]
    return {**tensors, name: (dtype, shape, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])}


def unchanged_byte(before: Tensors, after: Tensors, name: str) -> int:
    """A byte of an element that the delta does not touch."""
    pairs = zip(before[name][2][::2], after[name][2][::2], strict=True)
    odd = zip(before[name][2][1::2], after[name][2][1::2], strict=True)
    same = [a == b and c == d for (a, b), (c, d) in zip(pairs, odd, strict=True)]
    return 2 * same.index(True)


def changed_byte(before: Tensors, after: Tensors, name: str) -> int:
    return next(
        i for i, (a, b) in enumerate(zip(before[name][2], after[name][2], strict=True)) if a != b
    )


OTHERS = {
    "a changed element": lambda b, a: altered(b, "model.embed", changed_byte(b, a, "model.embed")),
    "an unchanged element of a changed tensor": lambda b, a: altered(
        b, "model.embed", unchanged_byte(b, a, "model.embed")
    ),
    "an unchanged tensor": lambda b, _: altered(b, "model.keep", 0),
    "a tensor too many": lambda b, _: {**b, "model.more": random_tensor("U8", (3,), 9)},
    "a tensor that the delta adds": lambda b, _: {**b, "model.new": random_tensor("I64", (3,), 9)},
    "a tensor missing": lambda b, _: {n: t for n, t in b.items() if n != "model.keep"},
    "a changed tensor missing": lambda b, _: {n: t for n, t in b.items() if n != "model.embed"},
    "the removed tensor missing": lambda b, _: {n: t for n, t in b.items() if n != "model.nothing"},
    "another shape": lambda b, _: {**b, "model.embed": ("BF16", (20, 40), b["model.embed"][2])},
    "another dtype": lambda b, _: {**b, "model.embed": ("F16", (40, 20), b["model.embed"][2])},
    "minus zero for plus zero": lambda b, _: {**b, "model.zero": ("F32", (1,), b"\0\0\0\x80")},
}


@pytest.mark.parametrize("layout", ["file", "directory", "in place", "file in place"])
@pytest.mark.parametrize("other", OTHERS)
def test_another_base_is_refused_and_nothing_is_visible(
    tmp_path: Path, before: Tensors, other: str, layout: str
) -> None:
    before = {
        **before,
        "model.keep": random_tensor("U8", (9,), 5),
        "model.zero": ("F32", (1,), bytes(4)),
    }
    after = every_kind(before)
    delta = make_delta(tmp_path / "delta.safetensors", before, after)
    wrong: Tensors = OTHERS[other](before, after)
    as_file = layout.startswith("file")
    base = write(
        tmp_path / ("b.safetensors" if as_file else "b"), wrong, shards=0 if as_file else 2
    )
    out = None if layout.endswith("in place") else tmp_path / "out"
    was = content(tmp_path)
    with pytest.raises(Conflict, match="wrong base") as caught:
        apply_delta(delta, base, out)
    assert caught.value.file == str(delta)
    assert content(tmp_path) == was
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.norm", "model.scale"])
def test_a_base_that_differs_in_what_the_delta_carries_whole_leads_to_the_same(
    tmp_path: Path, before: Tensors, after: Tensors, delta: Path, name: str
) -> None:
    """Of those tensors nothing is taken from the base, and the result is proven all the same."""
    report = apply_delta(
        delta, write(tmp_path / "base", altered(before, name, 0)), tmp_path / "out"
    )
    assert report.proven
    assert holds(tmp_path / "out", after)


def test_what_the_sums_see_is_refused_before_anything_is_written(
    tmp_path: Path, before: Tensors, after: Tensors, delta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = altered(before, "model.embed", changed_byte(before, after, "model.embed"))
    base = write(tmp_path / "base", wrong)
    monkeypatch.setattr("deltactl.ops.apply.write_result", lambda *_, **__: pytest.fail("written"))
    with pytest.raises(Conflict) as caught:
        apply_delta(delta, base, tmp_path / "out")
    assert caught.value.tensor == "model.embed"


@pytest.mark.parametrize("where", ["header", "payload"])
def test_a_torn_delta_is_refused(tmp_path: Path, before: Tensors, delta: Path, where: str) -> None:
    base = write(tmp_path / "base", before)
    flip_bit(delta, 40 if where == "header" else delta.stat().st_size - 1)
    was = content(tmp_path)
    with pytest.raises(Malformed) as caught:
        apply_delta(delta, base, None)
    assert caught.value.file == str(delta)
    assert content(tmp_path) == was


def test_a_delta_that_shrinks_while_it_is_applied(
    tmp_path: Path, before: Tensors, delta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read of it since may be anything, also where the result is as named."""
    base = write(tmp_path / "base", before)
    going_on = apply_module.write_directory

    def cut_meanwhile(*args: Any, **kwargs: Any) -> Any:
        done = going_on(*args, **kwargs)
        os.truncate(delta, delta.stat().st_size - 1)
        return done

    monkeypatch.setattr(apply_module, "write_directory", cut_meanwhile)
    with pytest.raises(Malformed, match="truncated while it was read"):
        apply_delta(delta, base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_payload_without_its_digest_is_refused_though_it_changes_nothing(
    tmp_path: Path, before: Tensors
) -> None:
    """The level of a compressor is the writer's choice, so another payload may lead to the same
    result: what was torn on the way is told by the payload's digest alone."""
    delta = make_delta(tmp_path / "d.safetensors", before, next_state(before, 9))
    other = "f" * 64

    def change(header: Header, _: bytearray) -> None:
        header["__metadata__"]["deltactl.payload_digest"] = other

    rewrite(delta, change)
    base = write(tmp_path / "base", before)
    was = content(tmp_path)
    for out in (tmp_path / "out", None):
        with pytest.raises(Malformed, match="payload") as caught:
            apply_delta(delta, base, out)
        assert (caught.value.file, caught.value.expected) == (str(delta), other)
        assert content(tmp_path) == was


def test_a_result_that_is_not_the_one_named_is_refused(
    tmp_path: Path, before: Tensors, delta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a decoder had a fault: the wire was right, the outcome is not."""
    from deltactl.replay.states import Stack

    def faulty(self: Stack) -> Any:
        for offset, chunk in chunks(self):
            if self.name == "model.embed":
                chunk[-1] ^= 1
            yield offset, chunk

    chunks = Stack.chunks
    monkeypatch.setattr(Stack, "chunks", faulty)
    base = write(tmp_path / "base", before)
    was = content(tmp_path)
    with pytest.raises(Malformed, match="digest") as caught:
        apply_delta(delta, base, tmp_path / "out")
    assert caught.value.tensor == "model.embed"
    assert content(tmp_path) == was


def test_no_base_and_no_delta(tmp_path: Path, before: Tensors, delta: Path) -> None:
    base = write(tmp_path / "base", before)
    with pytest.raises(NotFound):
        apply_delta(delta, tmp_path / "nothing", None)
    with pytest.raises(NotFound):
        apply_delta(tmp_path / "nothing", base, None)


@pytest.mark.parametrize("there", ["other content", "torn", "not empty", "a file", "the base"])
def test_an_output_that_holds_something_else_is_left_alone(
    tmp_path: Path, before: Tensors, delta: Path, there: str
) -> None:
    base = write(tmp_path / "base", before)
    out = tmp_path / "out"
    if there == "other content":
        write(out, next_state(before, 3))
    elif there == "torn":
        write(out, before)
        os.truncate(out / "model-00001-of-00002.safetensors", 100)
    elif there == "not empty":
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    elif there == "a file":
        out.write_text("mine")
    else:
        out = base
    was = content(tmp_path)
    with pytest.raises(UsageError if out == base else Conflict) as caught:
        apply_delta(delta, base, out)
    assert caught.value.file == str(out)
    assert content(tmp_path) == was


def test_a_file_does_not_replace_a_directory(tmp_path: Path, before: Tensors, delta: Path) -> None:
    base = write(tmp_path / "base.safetensors", before, shards=0)
    (tmp_path / "out").mkdir()
    with pytest.raises(Conflict, match="another kind"):
        apply_delta(delta, base, tmp_path / "out")
    with pytest.raises(UsageError, match="PyTorch"):
        apply_delta(delta, base, tmp_path / "out.bin")
    assert names(tmp_path / "out") == []


def test_an_empty_directory_is_as_good_as_none(
    tmp_path: Path, before: Tensors, after: Tensors, delta: Path
) -> None:
    (tmp_path / "out").mkdir()
    apply_delta(delta, write(tmp_path / "base", before), tmp_path / "out")
    assert holds(tmp_path / "out", after)


def test_devices_are_not_replaced(tmp_path: Path, before: Tensors, delta: Path) -> None:
    base = write(tmp_path / "base.safetensors", before, shards=0)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DeltactlError):
        apply_delta(delta, base, tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


# Twice.


def small(state: Tensors) -> Tensors:
    return next_state(state, 3)


def only_whole(state: Tensors) -> Tensors:
    return {**state, "model.scale": random_tensor("F32", (), 33)}


def only_added(state: Tensors) -> Tensors:
    return {**state, "more": random_tensor("U8", (4,), 34)}


def only_removed(state: Tensors) -> Tensors:
    return {name: spec for name, spec in state.items() if name != "model.norm"}


def nothing(state: Tensors) -> Tensors:
    return dict(state)


@pytest.mark.parametrize(
    "change", [small, every_kind, only_whole, only_added, only_removed, nothing]
)
@pytest.mark.parametrize("shards", [0, 2])
def test_applying_twice_does_nothing_the_second_time(
    tmp_path: Path, before: Tensors, change: Any, shards: int
) -> None:
    after = change(before)
    delta = make_delta(tmp_path / "delta.safetensors", before, after)
    base = write(tmp_path / ("base" if shards else "base.safetensors"), before, shards=shards)
    out = tmp_path / "out"
    first = apply_delta(delta, base, out)
    was = content(tmp_path)
    assert first.written
    second = apply_delta(delta, base, out)
    assert not second.written
    assert second.state == first.state
    assert content(tmp_path) == was

    assert apply_delta(delta, base, None).written == (after != before)
    was = content(tmp_path)
    again = apply_delta(delta, base, None)
    assert not again.written
    assert again.state == first.state
    assert content(tmp_path) == was
    assert not apply_delta(delta, base, out).written, (
        "the base is the result already, and so is OUT"
    )
    assert apply_delta(delta, base, tmp_path / "copy").written
    assert holds(tmp_path / "copy", after)


def test_the_result_with_one_other_bit_is_not_the_result(
    tmp_path: Path, before: Tensors, after: Tensors, delta: Path
) -> None:
    base = write(
        tmp_path / "base",
        altered(after, "model.embed", unchanged_byte(before, after, "model.embed")),
    )
    was = content(base)
    with pytest.raises(Conflict, match="wrong base"):
        apply_delta(delta, base, None)
    assert content(base) == was


# What else lies in the directory.


def test_in_place_other_files_survive(
    tmp_path: Path, before: Tensors, after: Tensors, delta: Path
) -> None:
    base = write(tmp_path / "base", before)
    others = decorate(base)
    apply_delta(delta, base, None)
    assert others_of(base) == others
    assert holds_weights(base, after)


def test_in_place_permissions_stay(tmp_path: Path, before: Tensors, delta: Path) -> None:
    base = write(tmp_path / "base", before)
    single = write(tmp_path / "base.safetensors", before, shards=0)
    base.chmod(0o710)
    single.chmod(0o640)
    apply_delta(delta, base, None)
    apply_delta(delta, single, None)
    assert base.stat().st_mode & 0o777 == 0o710
    assert single.stat().st_mode & 0o777 == 0o640


def test_in_place_through_a_link_to_the_directory(
    tmp_path: Path, before: Tensors, after: Tensors, delta: Path
) -> None:
    base = write(tmp_path / "base", before)
    (tmp_path / "current").symlink_to("base")
    apply_delta(delta, tmp_path / "current", None)
    assert (tmp_path / "current").is_symlink()
    assert holds(base, after)


def test_in_place_an_index_of_another_name_does_not_stay(
    tmp_path: Path, before: Tensors, after: Tensors, delta: Path
) -> None:
    base = write(tmp_path / "base", before)
    index = base / "model.safetensors.index.json"
    index.rename(base / "weights.safetensors.index.json")
    apply_delta(delta, base, None)
    assert [path.name for path in base.glob("*.index.json")] == [index.name]
    assert holds(base, after)


# Crashes.


CRASHES = [("apply", False), ("apply", True), ("apply file", False)]


@pytest.mark.parametrize(("verb", "fallback"), CRASHES)
def test_killed_at_any_moment(
    tmp_path: Path, before: Tensors, after: Tensors, verb: str, fallback: bool
) -> None:
    delta = make_delta(tmp_path / "delta.safetensors", before, after)
    is_file = verb == "apply file"
    name = "model.safetensors" if is_file else "model"
    start = write(tmp_path / "start" / name, before, shards=0 if is_file else 2)
    others = {} if is_file else decorate(start)
    found = crashes(tmp_path, verb, fallback=fallback)
    calls = [call for _, call in found]
    assert {"pwrite", "fsync", "unlink"} - {"unlink" * is_file} <= set(calls)
    assert set(calls) & {"replace", "renameat2", "rename"}
    states = []
    for place, call in found:
        model = place / name
        if fallback and not model.exists():
            assert call == "rename", "only between two renames"
            states.append("aside")
        else:
            tensors = read_weights(model)
            assert tensors in (before, after), call
            states.append("old" if tensors == before else "new")
            assert is_file or others_of(model) == others, call
        apply_delta(delta, model, None)
        assert read_weights(model) == after
        assert is_file or others_of(model) == others
        assert names(place) == [name], f"left after dying before {call}"
    assert states == sorted(states, key=["old", "aside", "new"].index)
    assert set(states) == {"old", "new"} | ({"aside"} if fallback else set()) or is_file


def read_weights(model: Path) -> Tensors:
    if model.is_file():
        return read_tensors(model)
    with open_checkpoint(model) as checkpoint:
        return {t.name: (t.dtype, t.shape, t.data.tobytes()) for t in checkpoint.tensors.values()}


@pytest.mark.parametrize(
    ("call", "shards", "in_place"),
    [
        *(
            (call, n, place)
            for call in ("pwrite", "fsync", "ftruncate")
            for n in (0, 2)
            for place in (0, 1)
        ),
        ("mkdir", 2, 0),
        ("mkdir", 2, 1),
        ("copy_file_range", 2, 0),
    ],
)
def test_a_full_disk_leaves_all_as_it_was(
    tmp_path: Path,
    before: Tensors,
    delta: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    shards: int,
    in_place: int,
) -> None:
    base = write(tmp_path / ("base" if shards else "base.safetensors"), before, shards=shards)
    was = content(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            apply_delta(delta, base, None if in_place else tmp_path / "out")
    assert content(tmp_path) == was
    assert names(tmp_path) == sorted([delta.name, base.name])


def test_a_checkpoint_of_many_shards(tmp_path: Path) -> None:
    before = {f"t{n:02d}": random_tensor("BF16", (n, 7), n) for n in range(12)}
    after = {name: (d, s, data[::-1]) for name, (d, s, data) in before.items()}
    delta = make_delta(tmp_path / "delta.safetensors", before, after)
    base = write_hf_directory(tmp_path / "base", before, shards=5)
    files = names(base)
    apply_delta(delta, base, None)
    assert names(base) == files
    assert holds(base, after)
