"""Every kind of fault is found once and named, nothing is passed over, and nothing is a pass."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.core.errors import Malformed, NotFound, UsageError
from deltactl.format.anchor import AnchorHeader
from deltactl.format.link_names import anchor_directory, delta_name
from deltactl.ops.pull import pull
from deltactl.ops.push import push
from deltactl.ops.verify import LEVELS, VerifyReport, verify_bucket, verify_delta
from tests.support.chains import (
    Tensors,
    every_kind,
    first_state,
    make_chain,
    make_delta,
    next_state,
    states,
    write,
)
from tests.support.checkpoints import flip_bit, random_tensor, write_safetensors
from tests.support.lies import Header, rewrite, rows, set_rows
from tests.support.page_reader import touch_sum as touch_sum_of

STEPS = states(7)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two buckets: ``one/bucket`` of STEPS with anchors at 1, 3 and 6, ``two/bucket`` of others."""
    root = tmp_path_factory.mktemp("made")
    others = [every_kind(first_state())]
    while len(others) < 7:
        others.append(next_state(others[-1], 500 + len(others)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))
        make_chain(root / "one", STEPS, anchor_every=3)
        make_chain(root / "two", others, anchor_every=3)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """The first bucket's directory, the test's own."""
    return Path(shutil.copytree(made / "one/bucket", tmp_path / "bucket"))


@pytest.fixture
def other(made: Path) -> Path:
    return made / "two/bucket"


def verify(root: Path, level: str = "data", **options: Any) -> VerifyReport:
    return verify_bucket(LocalBucket(root), level=level, **options)


def named(report: VerifyReport) -> list[tuple[int | None, str]]:
    """Step and file of every error, the file without its suffix."""
    return [(row["step"], str(row["file"]).removesuffix(".safetensors")) for row in report.errors]


def delta(step: int) -> str:
    return delta_name(step).removesuffix(".safetensors")


# What is sound.


@pytest.mark.parametrize("level", LEVELS)
def test_a_sound_chain(root: Path, level: str) -> None:
    report = verify(root, level)
    assert report.ok
    assert (report.errors, report.unproven) == ([], [])
    assert (report.level, report.links, report.steps) == (level, 9, 7)


@pytest.mark.parametrize("level", LEVELS)
def test_a_chain_of_which_all_before_an_anchor_was_removed(root: Path, level: str) -> None:
    """With the delta of the anchor's step or without."""
    chain = read_chain(LocalBucket(root))
    anchor = max(chain.anchors)
    assert anchor in chain.deltas and anchor < chain.steps[-1]
    for link in chain.links:
        if link.step < anchor:
            for item in link.objects:
                (root / item.name).unlink()
    assert verify(root, level).ok
    (root / delta_name(anchor)).unlink()
    assert verify(root, level).ok
    (root / delta_name(chain.steps[-1])).write_bytes(b"torn")
    assert not verify(root, level).ok


def test_how_much_is_read(root: Path) -> None:
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    headers = verify(root, "links").bytes_read
    assert 0 < headers < size
    assert verify(root, "data").bytes_read == headers + size


@pytest.mark.parametrize("level", LEVELS)
def test_progress_ends_where_it_said(root: Path, level: str) -> None:
    calls: dict[str, list[tuple[int, int]]] = {}

    def progress(what: str, done: int, total: int) -> None:
        calls.setdefault(what, []).append((done, total))

    verify(root, level, progress=progress)
    assert ("verifying" in calls) == (level != "links")
    for row in calls.values():
        assert all(0 <= done <= total for done, total in row)
        assert row[-1][0] == row[-1][1]


# What is empty, and what makes no sense.


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("there", ["nothing", "junk", "an unfinished anchor"])
def test_empty_is_not_a_pass(tmp_path: Path, level: str, there: str) -> None:
    root = tmp_path / "bucket"
    directory = root / anchor_directory(1)
    directory.mkdir(parents=True)
    if there == "junk":
        (root / "README.md").write_text("nothing here")
    elif there == "an unfinished anchor":
        write_safetensors(directory / "model.safetensors", first_state())
    with pytest.raises(NotFound, match="nothing to verify: the bucket holds no chain") as caught:
        verify(root, level)
    assert caught.value.file == str(root)


def test_no_bucket(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such bucket"):
        verify(tmp_path / "nothing")


def test_requests_that_make_no_sense(root: Path) -> None:
    with pytest.raises(UsageError, match="unknown level"):
        verify(root, "everything")
    with pytest.raises(UsageError, match="--against"):
        verify(root, step=2)
    with pytest.raises(UsageError, match="cannot be rebuilt"):
        verify_delta(root / delta_name(2), level="rebuild")
    with pytest.raises(NotFound):
        verify_delta(root / "nothing")


def test_a_report_without_links_is_not_ok() -> None:
    assert not VerifyReport("data").ok


# One fault each, found by the headers alone.


def missing_middle_delta(root: Path, _: Path) -> None:
    (root / delta_name(4)).unlink()


def missing_first_anchor(root: Path, _: Path) -> None:
    shutil.rmtree(root / anchor_directory(1))


def only_deltas(root: Path, _: Path) -> None:
    shutil.rmtree(root / "anchors")


def swapped_deltas(root: Path, _: Path) -> None:
    a, b = root / delta_name(4), root / delta_name(5)
    a.rename(root / "aside")
    b.rename(a)
    (root / "aside").rename(b)


def of_another_chain(root: Path, other: Path) -> None:
    shutil.copy(other / delta_name(5), root / delta_name(5))


def another_anchor(root: Path, other: Path) -> None:
    shutil.rmtree(root / anchor_directory(6))
    shutil.copytree(other / anchor_directory(6), root / anchor_directory(6))


def another_first_anchor(root: Path, other: Path) -> None:
    shutil.rmtree(root / anchor_directory(1))
    shutil.copytree(other / anchor_directory(1), root / anchor_directory(1))


def renamed_delta(root: Path, _: Path) -> None:
    (root / delta_name(7)).rename(root / delta_name(8))


def renamed_anchor(root: Path, _: Path) -> None:
    (root / anchor_directory(6)).rename(root / anchor_directory(7))


def copied_delta(root: Path, _: Path) -> None:
    shutil.copy(root / delta_name(7), root / delta_name(8))


def two_anchors(root: Path, _: Path) -> None:
    bucket = LocalBucket(root.parent / "single")
    push(write(root.parent / "3.safetensors", STEPS[2], shards=0), bucket, step=3)
    name = f"{anchor_directory(3)}.safetensors"
    shutil.copy(Path(bucket.url, name), root / name)


def a_fork(root: Path, _: Path) -> None:
    """Two who pushed different steps onto one tip at once."""
    fork = root.parent / "fork"
    shutil.copytree(root, fork)
    (fork / delta_name(7)).unlink()
    push(write(root.parent / "8", next_state(STEPS[5], 66)), LocalBucket(fork), step=8)
    shutil.copy(fork / delta_name(8), root / delta_name(8))


def torn_header(root: Path, _: Path) -> None:
    os.truncate(root / delta_name(4), 100)


def empty_object(root: Path, _: Path) -> None:
    os.truncate(root / delta_name(4), 0)


def missing_shard(root: Path, _: Path) -> None:
    (root / anchor_directory(3) / SHARDS[1]).unlink()


def missing_config(root: Path, _: Path) -> None:
    (root / anchor_directory(3) / "config.json").unlink()


def a_directory_in_its_place(root: Path, _: Path) -> None:
    (root / delta_name(4)).unlink()
    (root / delta_name(4)).mkdir()


def an_anchor_in_its_place(root: Path, _: Path) -> None:
    shutil.copy(root / anchor_directory(1) / SHARDS[0], root / delta_name(4))


def stands_on_itself(root: Path, _: Path) -> None:
    def change(header: Header, _: bytearray) -> None:
        header["__metadata__"]["prev_model_version"] = "4"

    rewrite(root / delta_name(4), change)


def table_that_leads_elsewhere(root: Path, _: Path) -> None:
    def change(header: Header, _: bytearray) -> None:
        table = rows(header)
        table[0]["digest"] = "0" * 64
        set_rows(header, table)

    rewrite(root / delta_name(4), change)


def table_that_does_not_fit(root: Path, _: Path) -> None:
    def change(header: Header, _: bytearray) -> None:
        table = rows(header)
        table[0]["shape"] = [800]
        set_rows(header, table)

    rewrite(root / delta_name(4), change)


LINK_FAULTS: dict[Callable[[Path, Path], None], list[tuple[int, str]]] = {
    missing_middle_delta: [(5, delta(5))],
    missing_first_anchor: [(2, delta(2))],
    only_deltas: [(2, delta(2))],
    swapped_deltas: [(4, delta(4)), (5, delta(5)), (6, delta(6))],
    of_another_chain: [(5, delta(5)), (6, delta(6))],
    another_anchor: [(6, f"{anchor_directory(6)}/{INDEX}")],
    another_first_anchor: [(2, delta(2))],
    renamed_delta: [(8, delta(8))],
    renamed_anchor: [(7, f"{anchor_directory(7)}/{INDEX}")],
    copied_delta: [(8, delta(8))],
    two_anchors: [(3, f"{anchor_directory(3)}/{INDEX}")],
    a_fork: [(8, delta(8))],
    torn_header: [(4, delta(4)), (5, delta(5))],
    empty_object: [(4, delta(4)), (5, delta(5))],
    missing_shard: [(3, f"{anchor_directory(3)}/{SHARDS[1]}".removesuffix(".safetensors"))],
    missing_config: [(3, f"{anchor_directory(3)}/config.json")],
    a_directory_in_its_place: [(5, delta(5))],
    an_anchor_in_its_place: [(4, delta(4)), (5, delta(5))],
    stands_on_itself: [(4, delta(4))],
    table_that_leads_elsewhere: [(4, delta(4))],
    table_that_does_not_fit: [(4, delta(4))],
}


@pytest.mark.parametrize("fault", LINK_FAULTS)
def test_a_fault_that_headers_show_is_found_once_and_named(
    root: Path, other: Path, fault: Callable[[Path, Path], None]
) -> None:
    fault(root, other)
    expected = LINK_FAULTS[fault]
    for level in ("links", "data"):
        report = verify(root, level)
        assert not report.ok
        assert named(report) == expected, report.errors
        for row in report.errors:
            assert row.keys() == {"step", "file", "tensor", "what", "expected", "found"}
            assert json.loads(json.dumps(row)) == row
    report = verify(root, "rebuild")
    assert not report.ok
    assert set(expected) <= set(named(report)), "and what stands on it"


def test_what_is_said_of_a_base_that_is_another(root: Path, other: Path) -> None:
    of_another_chain(root, other)
    first = verify(root, "links").errors[0]
    chain, stranger = read_chain(LocalBucket(root)), read_chain(LocalBucket(other))
    assert first["what"] == "the delta's base is not the result of the step before"
    assert first["expected"] == f"step 4 with state {stranger.state_at(4)}"
    assert first["found"] == f"state {chain.state_at(4)}"


def test_what_is_said_of_an_anchor_that_is_another(root: Path, other: Path) -> None:
    another_anchor(root, other)
    (row,) = verify(root, "links").errors
    assert row["what"] == "the anchor is not the state that the deltas before it lead to"
    assert row["expected"] == f"state {read_chain(LocalBucket(root)).deltas[6].result_state}"
    assert row["found"] == f"state {read_chain(LocalBucket(other)).state_at(6)}"


# Faults of the bytes.


PAYLOADS = [
    (delta_name(4), 4),
    (delta_name(7), 7),
    (f"{anchor_directory(1)}/{SHARDS[0]}", 1),
    (f"{anchor_directory(6)}/{SHARDS[1]}", 6),
    (f"{anchor_directory(3)}/config.json", 3),
    (f"{anchor_directory(3)}/tokenizer/vocab.txt", 3),
]


@pytest.mark.parametrize(("name", "step"), PAYLOADS)
def test_a_bit_of_the_payload_is_seen_from_data_on(root: Path, name: str, step: int) -> None:
    flip_bit(root / name, (root / name).stat().st_size - 1)
    assert verify(root, "links").ok
    report = verify(root, "data")
    assert named(report) == [(step, name.removesuffix(".safetensors"))]
    assert report.errors[0]["expected"] != report.errors[0]["found"]
    report = verify(root, "rebuild")
    assert (step, name.removesuffix(".safetensors")) in named(report)


def test_a_tensor_of_an_anchor_is_named(root: Path) -> None:
    shard = root / anchor_directory(3) / SHARDS[0]
    flip_bit(shard, shard.stat().st_size - 1)
    (row,) = verify(root, "data").errors
    header = read_chain(LocalBucket(root)).anchors[3].header
    assert isinstance(header, AnchorHeader)
    digests = {tensor.name: tensor.digest for tensor in header.tensors}
    assert row["expected"] == digests[row["tensor"]]


def lie_about(tensor: str) -> Callable[[Header, bytearray], None]:
    """Change a value that a delta in ``raw`` carries."""

    def change(header: Header, payload: bytearray) -> None:
        start, _ = header[f"{tensor}.val"]["data_offsets"]
        payload[start] ^= 1

    return change


def with_its_sum(tensor: str) -> Callable[[Header, bytearray], None]:
    """The same, and the new touch sum of the row is made that of the value: nothing but a replay
    shows that it is not what the digest says."""

    def change(header: Header, payload: bytearray) -> None:
        lie_about(tensor)(header, payload)
        at, new = (
            np.frombuffer(payload[start:stop], kind)
            for (start, stop), kind in (
                (header[f"{tensor}.idx"]["data_offsets"], "<i4"),
                (header[f"{tensor}.val"]["data_offsets"], "<u2"),
            )
        )
        table = rows(header)
        row = next(row for row in table if row["name"] == tensor)
        row["new"] = touch_sum_of(at, new)
        set_rows(header, table)

    return change


def raw_chain(directory: Path, steps: list[Tensors]) -> Path:
    bucket = LocalBucket(directory / "raw")
    for n, tensors in enumerate(steps, 1):
        push(write(directory / f"raw_{n}", tensors), bucket, encoding="raw", anchor_every=4)
    return Path(bucket.url)


def test_a_delta_that_is_not_what_it_says_is_seen_by_rebuilding(tmp_path: Path) -> None:
    """The wire is right, the state is not: as when its writer had a fault."""
    root = raw_chain(tmp_path, STEPS)
    rewrite(root / delta_name(3), with_its_sum("model.embed"))
    assert verify(root, "data").ok
    report = verify(root, "rebuild")
    assert {(row["step"], row["tensor"]) for row in report.errors} >= {(3, "model.embed")}
    assert named(report)[0] == (3, delta(3))
    assert all(row["step"] <= 4 for row in report.errors), "the anchor at 4 begins anew"
    with pytest.raises(Malformed) as caught:
        pull(LocalBucket(root), tmp_path / "pulled", step=3)
    assert caught.value.tensor == "model.embed"
    assert not (tmp_path / "pulled").exists()


def test_a_delta_that_cannot_be_decoded_is_seen_by_its_bytes(tmp_path: Path) -> None:
    def change(header: Header, payload: bytearray) -> None:
        start, stop = header["model.embed.idx"]["data_offsets"]
        payload[start:stop] = b"\xff\xff\xff\x7f" * ((stop - start) // 4)

    root = raw_chain(tmp_path, STEPS[:3])
    rewrite(root / delta_name(2), change)
    assert verify(root, "links").ok
    for level in ("data", "rebuild"):
        assert named(verify(root, level))[0] == (2, delta(2))
    assert not verify_delta(root / delta_name(2)).ok
    with pytest.raises(Malformed, match=r"rise|range") as caught:
        pull(LocalBucket(root), tmp_path / "pulled", step=2)
    assert caught.value.file is not None
    assert not (tmp_path / "pulled").exists()


# Many faults at once.


def test_it_goes_on_after_the_first_fault_and_counts_all(root: Path, other: Path) -> None:
    config = root / anchor_directory(1) / "config.json"
    flip_bit(config, 0)
    for shard in SHARDS:
        path = root / anchor_directory(3) / shard
        flip_bit(path, path.stat().st_size - 1)
    flip_bit(root / delta_name(2), (root / delta_name(2)).stat().st_size - 1)
    flip_bit(root / delta_name(5), 50)
    of_seven = root / delta_name(7)
    shutil.copy(other / delta_name(7), of_seven)
    flip_bit(of_seven, of_seven.stat().st_size - 1)
    report = verify(root)
    assert [(step, Path(name).name) for step, name in named(report)] == [
        (1, "config.json"),
        (2, "step_000002"),
        (3, "model-00001-of-00002"),
        (3, "model-00002-of-00002"),
        (5, "step_000005"),
        (6, "step_000006"),
        (7, "step_000007"),
        (7, "step_000007"),
    ]
    assert report.links == 9
    rebuilt = verify(root, "rebuild")
    assert len(rebuilt.errors) > len(report.errors), "and what cannot be rebuilt for that"


def test_junk_beside_the_links_is_not_looked_at(root: Path) -> None:
    for name in ("README.md", "deltas/notes", "anchors/step_000001/.hidden", "x/y/z.safetensors"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"junk")
    for level in LEVELS:
        assert verify(root, level).ok


def test_an_anchor_that_nobody_names_is_no_fault_when_it_is_gone(root: Path) -> None:
    """The deltas lead past it."""
    shutil.rmtree(root / anchor_directory(3))
    assert verify(root, "rebuild").ok


# Against a checkpoint.


def with_bit(tensors: Tensors, name: str, element: int, width: int, mask: int) -> Tensors:
    dtype, shape, data = tensors[name]
    at = element * width
    new = int.from_bytes(data[at : at + width], "little") ^ mask
    changed = data[:at] + new.to_bytes(width, "little") + data[at + width :]
    return {**tensors, name: (dtype, shape, changed)}


def bits(tensors: Tensors, name: str, element: int, width: int) -> str:
    data = tensors[name][2][element * width : (element + 1) * width]
    return f"0x{int.from_bytes(data, 'little'):0{2 * width}x}"


@pytest.mark.parametrize("step", [None, 1, 2, 6, 7])
@pytest.mark.parametrize("shards", [0, 1, 3])
def test_against_the_same_bits(root: Path, tmp_path: Path, step: int | None, shards: int) -> None:
    tensors = STEPS[(step or 7) - 1]
    same = write(tmp_path / ("same" if shards else "same.safetensors"), tensors, shards=shards)
    assert verify(root, against=same, step=step).ok


@pytest.mark.parametrize(
    ("name", "element", "width"),
    [
        ("model.embed", 0, 2),
        ("model.embed", 799, 2),
        ("model.norm", 63, 4),
        ("model.scale", 0, 4),
        ("model.packed", 17, 1),
    ],
)
@pytest.mark.parametrize("step", [2, 3, 5])
def test_against_one_bit(
    root: Path, tmp_path: Path, name: str, element: int, width: int, step: int
) -> None:
    tensors = STEPS[step - 1]
    altered = with_bit(tensors, name, element, width, 1 << (8 * width - 1))
    against = write(tmp_path / "other", altered)
    report = verify(root, against=against, step=step)
    assert report.errors == [
        {
            "step": step,
            "file": str(against),
            "tensor": name,
            "what": f"the bits differ, first at element {element}",
            "expected": bits(altered, name, element, width),
            "found": bits(tensors, name, element, width),
        }
    ]


def test_against_minus_zero_and_nan(tmp_path: Path) -> None:
    """-0.0 is not +0.0; a NaN is itself, and no other NaN."""
    tensors: Tensors = {"t": ("F32", (3,), bytes.fromhex("00000000 0000c07f 0100807f"))}
    bucket = make_chain(tmp_path, [tensors])
    same = write(tmp_path / "same", tensors)
    assert verify(Path(bucket.url), against=same).ok
    for element, mask in ((0, 1 << 31), (1, 1), (2, 2)):
        other = write(tmp_path / f"{element}", with_bit(tensors, "t", element, 4, mask))
        (row,) = verify(Path(bucket.url), against=other).errors
        assert row["what"].endswith(f"element {element}")


def test_against_other_tensors(root: Path, tmp_path: Path) -> None:
    tensors = dict(STEPS[6])
    del tensors["model.norm"]
    tensors["model.more"] = random_tensor("U8", (2,), 1)
    tensors["model.embed"] = ("BF16", (20, 40), tensors["model.embed"][2])
    tensors["model.scale"] = ("I32", (), tensors["model.scale"][2])
    report = verify(root, against=write(tmp_path / "other", tensors))
    found = {row["tensor"]: (row["expected"], row["found"]) for row in report.errors}
    assert found == {
        "model.embed": ("BF16 [20, 40]", "BF16 [40, 20]"),
        "model.more": ("U8 [2]", "no such tensor"),
        "model.norm": ("no such tensor", "F32 [64]"),
        "model.scale": ("I32 []", "F32 []"),
    }


def test_against_names_every_tensor_that_differs(root: Path, tmp_path: Path) -> None:
    tensors = with_bit(with_bit(STEPS[6], "model.norm", 5, 4, 1), "model.norm", 9, 4, 1)
    tensors = with_bit(tensors, "model.embed", 3, 2, 1)
    report = verify(root, against=write(tmp_path / "other", tensors))
    assert [(row["tensor"], row["what"][-9:]) for row in report.errors] == [
        ("model.embed", "element 3"),
        ("model.norm", "element 5"),
    ]


def test_against_what_cannot_be_compared(root: Path, tmp_path: Path) -> None:
    same = write(tmp_path / "same", STEPS[6])
    with pytest.raises(NotFound):
        verify(root, against=tmp_path / "nothing")
    with pytest.raises(NotFound, match="no such step"):
        verify(root, against=same, step=99)
    (root / delta_name(7)).unlink()
    (root / delta_name(5)).unlink()
    report = verify(root, against=write(tmp_path / "four", STEPS[3]), step=4)
    assert named(report) == [(6, delta(6))], "of what is compared nothing is wrong"
    report = verify(root, against=same, step=6)
    assert {row["step"] for row in report.errors} == {6}


def test_against_the_tip_is_said_of_the_tip(root: Path, tmp_path: Path) -> None:
    """Also where the way to it is broken, and where there is none at all."""
    same = write(tmp_path / "same", STEPS[6])
    tip = root / delta_name(7)
    flip_bit(tip, tip.stat().st_size - 1)
    rewrite(tip, lambda _, payload: payload.__setitem__(slice(8), b"\xff" * 8))
    rows_of = [row for row in verify(root, "links", against=same).errors if row["step"] != 7]
    assert rows_of == []
    assert not verify(root, "links", against=same).ok
    for name in [p.relative_to(root) for p in root.rglob("*") if p.is_file()]:
        if name.name.startswith(("step_", "model.safetensors.index")):
            (root / name).write_bytes(b"torn")
    report = verify(root, "links", against=same)
    assert report.errors
    assert all(row["step"] in range(1, 8) for row in report.errors)


# A delta by itself.


def test_a_delta_alone(tmp_path: Path) -> None:
    path = make_delta(tmp_path / "d.safetensors", STEPS[0], every_kind(STEPS[0]))
    for level in ("links", "data"):
        report = verify_delta(path, level=level)
        assert (report.ok, report.links, report.errors, report.unproven) == (True, 1, [], [])
    size = path.stat().st_size
    assert verify_delta(path, level="links").bytes_read < size
    assert verify_delta(path).bytes_read == size
    flip_bit(path, size - 1)
    assert verify_delta(path, level="links").ok
    (row,) = verify_delta(path).errors
    assert row["file"] == str(path)
    flip_bit(path, 30)
    assert not verify_delta(path, level="links").ok


def test_a_checkpoint_is_no_delta(tmp_path: Path) -> None:
    report = verify_delta(write(tmp_path / "s.safetensors", first_state(), shards=0))
    assert not report.ok
