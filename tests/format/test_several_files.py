"""Deltas of several files: every verb takes one wherever it takes a delta of one file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.cli.app import app
from deltactl.core.errors import Conflict, DeltactlError, Malformed, NotFound, UsageError
from deltactl.files.safetensors import read_header
from deltactl.format.delta import open_delta
from deltactl.format.delta_index import DELTA_INDEX, delta_index, part_name
from deltactl.format.link_names import delta_directory, delta_name
from deltactl.ops.apply import apply_delta
from deltactl.ops.copy import copy_chain
from deltactl.ops.pull import materialize, pull
from deltactl.ops.push import push
from deltactl.ops.stats import stats_bucket, stats_delta
from deltactl.ops.verify import LEVELS, verify_bucket, verify_delta
from tests.support.chains import (
    content,
    every_kind,
    first_state,
    holds,
    make_delta,
    next_state,
    states,
    write,
)
from tests.support.checkpoints import read_tensors, write_safetensors
from tests.support.flips import Damage, every_bit, pull_all, verify_all
from tests.support.lies import Header, rewrite_index, set_table, table_of
from tests.support.page_reader import apply_delta as page_apply
from tests.support.page_reader import read_chain as page_chain
from tests.support.remote import RemoteBucket, flipping
from tests.support.several import make_parts_chain, table, write_parts

STEPS = [*states(3), every_kind(states(3)[-1])]
COUNT = 3


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bucket of STEPS: an anchor, and three deltas of COUNT files each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))
        bucket = make_parts_chain(tmp_path_factory.mktemp("made"), list(STEPS), count=COUNT)
    return Path(bucket.url)


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "bucket"))


def place(root: Path, step: int) -> Path:
    return root / delta_directory(step)


def part(step: int, number: int = 0) -> str:
    return f"{delta_directory(step)}/{part_name(number, COUNT)}"


# Every verb.


@pytest.mark.parametrize("kind", [LocalBucket, RemoteBucket])
@pytest.mark.parametrize("level", LEVELS)
def test_it_is_verified(root: Path, kind: type[LocalBucket], level: str) -> None:
    report = verify_bucket(kind(root), level=level)
    assert (report.errors, report.unproven) == ([], [])
    assert (report.links, report.steps) == (4, 4)


def test_headers_are_read_from_the_index_alone(root: Path) -> None:
    bucket = RemoteBucket(root)
    chain = read_chain(bucket)
    assert {name for name, _, _ in bucket.reads} == {link.name for link in chain.links}
    assert [link.name for link in chain.links[1:]] == [
        f"{delta_directory(step)}/{DELTA_INDEX}" for step in (2, 3, 4)
    ]
    sizes = {item.name: item.size for item in bucket.list()}
    assert {item.name for link in chain.links for item in link.objects} == sizes.keys()
    assert sum(link.bytes for link in chain.links) == sum(sizes.values())
    assert chain.tip == 4


@pytest.mark.parametrize("kind", [LocalBucket, RemoteBucket])
@pytest.mark.parametrize("have", [None, 1, 3])
def test_it_is_pulled(root: Path, tmp_path: Path, kind: type[LocalBucket], have: int) -> None:
    dest = tmp_path / "dest"
    if have:
        pull(kind(root), dest, step=have)
    report = pull(kind(root), dest)
    assert holds(dest, STEPS[3])
    assert (report.step, report.from_step, report.proven) == (4, have, True)


def test_steps_are_pushed_upon_it_and_it_upon_them(root: Path, tmp_path: Path) -> None:
    bucket, fifth = LocalBucket(root), next_state(STEPS[3], 50)
    sixth = next_state(fifth, 51)
    report = push(write(tmp_path / "five", fifth), bucket)
    assert (report.step, report.kind) == (5, "delta")
    write_parts(place(root, 6), fifth, sixth, count=2, step=6)
    assert push(write(tmp_path / "six", sixth), bucket, step=6).written is False
    other = write(tmp_path / "other", next_state(fifth, 52))
    with pytest.raises(Conflict, match="other content"):
        push(other, bucket, step=6)
    assert verify_bucket(bucket, level="rebuild").ok
    assert page_chain(root)[6] == sixth


@pytest.mark.parametrize("here", [LocalBucket, RemoteBucket])
@pytest.mark.parametrize("there", [LocalBucket, RemoteBucket])
def test_it_is_copied(
    root: Path, tmp_path: Path, here: type[LocalBucket], there: type[LocalBucket]
) -> None:
    dest = there(tmp_path / "dest")
    report = copy_chain(here(root), dest)
    assert (report.links, report.copied, report.tip) == (4, 4, 4)
    assert content(tmp_path / "dest") == content(root)
    assert copy_chain(here(root), dest).copied == 0


def test_a_copy_puts_the_index_last(root: Path, tmp_path: Path) -> None:
    dest = RemoteBucket(tmp_path / "dest")
    copy_chain(LocalBucket(root), dest)
    of_step = [name for name in dest.puts if name.startswith(delta_directory(3))]
    assert len(of_step) == COUNT + 1
    assert of_step[-1].endswith(DELTA_INDEX)


def test_a_copy_does_not_mind_what_another_left(root: Path, tmp_path: Path) -> None:
    left = tmp_path / "dest" / delta_directory(2)
    left.mkdir(parents=True)
    (left / part_name(0, 9, "gone")).write_bytes(b"left behind")
    copy_chain(LocalBucket(root), LocalBucket(tmp_path / "dest"))
    assert verify_bucket(LocalBucket(tmp_path / "dest"), level="rebuild").ok
    (left / DELTA_INDEX).unlink()
    (left / part_name(0, COUNT)).write_bytes(b"another's")
    with pytest.raises(Conflict, match="link of other content") as caught:
        copy_chain(LocalBucket(root), LocalBucket(tmp_path / "dest"))
    assert caught.value.file == part(2)


@pytest.mark.parametrize("path", ["", DELTA_INDEX])
def test_it_is_applied(root: Path, tmp_path: Path, path: str) -> None:
    base = write_safetensors(tmp_path / "base.safetensors", STEPS[2])
    report = apply_delta(place(root, 4) / path, base, tmp_path / "out.safetensors")
    assert (report.step, report.written, report.proven) == (4, True, True)
    assert read_tensors(tmp_path / "out.safetensors") == STEPS[3]
    again = apply_delta(place(root, 4) / path, base, tmp_path / "out.safetensors")
    assert not again.written
    assert page_apply(place(root, 4), STEPS[2]) == STEPS[3]


def test_it_says_what_one_of_one_file_says(root: Path, tmp_path: Path) -> None:
    one = open_delta(make_delta(tmp_path / "one", STEPS[2], STEPS[3], step=4)).header
    several = open_delta(place(root, 4)).header
    assert several.records == one.records
    assert several.payload_bytes == one.payload_bytes
    assert several.nbytes == sum(path.stat().st_size for path in place(root, 4).iterdir())
    for key in ("base_state", "result_state", "total_elements", "step", "encoding"):
        assert getattr(several, key) == getattr(one, key)
    for name, value in one.metadata.items():
        if "digest" not in name and name != "deltactl.tensors":
            assert several.metadata[name] == value
    assert [(row.name, row.changed) for row in stats_delta(open_delta(place(root, 4))).tensors] == [
        (row.name, row.changed) for row in one.records.values()
    ]


def test_its_numbers_are_counted(root: Path, tmp_path: Path) -> None:
    """As those of the same chain with deltas of one file."""
    single = LocalBucket(tmp_path / "single")
    for step, state in enumerate(STEPS, 1):
        push(write(tmp_path / f"{step}", state), single, step=step)
    a, b = stats_bucket(LocalBucket(root)), stats_bucket(single)
    assert replace(a, chain=None) == replace(b, chain=None)


@pytest.mark.parametrize("path", ["", DELTA_INDEX])
def test_the_commands_take_its_directory_and_its_index(root: Path, path: str) -> None:
    def run(*args: str) -> Any:
        result = CliRunner().invoke(app, [*args, "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    target = str(place(root, 3) / path)
    shown = run("show", target)["links"][0]
    assert [row["name"] for row in shown["files"]] == [part_name(n, COUNT) for n in range(COUNT)]
    assert run("show", f"{root}@3")["links"][0]["tensors"] == shown["tensors"]
    assert run("verify", target)["ok"]
    assert run("stats", target)["changed_elements"] == shown["changed_elements"]
    log = run("log", str(root))
    assert [link["changed_elements"] for link in log["links"]][2] == shown["changed_elements"]
    result = CliRunner().invoke(app, ["push", target, str(root)])
    assert result.exit_code == 2
    assert "deltactl copy" in result.output


def test_a_delta_alone_is_verified_byte_for_byte(root: Path) -> None:
    path = place(root, 3)
    report = verify_delta(path)
    assert report.ok
    assert report.bytes_read == sum(file.stat().st_size for file in path.iterdir())
    last = path / part_name(0, COUNT)
    last.write_bytes(last.read_bytes()[:-1] + b"\x07")
    assert verify_delta(path, level="links").ok
    assert [row["file"] for row in verify_delta(path).errors] == [str(last)]


# What is not there.


def test_without_its_index_nothing_is_there(root: Path, tmp_path: Path) -> None:
    (place(root, 4) / DELTA_INDEX).unlink()
    chain = read_chain(LocalBucket(root))
    assert (chain.tip, chain.problems) == (3, ())
    assert verify_bucket(LocalBucket(root), level="rebuild").ok
    assert push(write(tmp_path / "four", STEPS[3]), LocalBucket(root)).step == 4


@pytest.mark.parametrize("kind", [LocalBucket, RemoteBucket])
def test_a_stranger_beside_the_parts_is_not_looked_at(
    root: Path, tmp_path: Path, kind: type[LocalBucket]
) -> None:
    (place(root, 3) / part_name(0, 2, "left")).write_bytes(b"torn")
    assert verify_bucket(kind(root), level="rebuild").ok
    pull(kind(root), tmp_path / "dest")
    assert holds(tmp_path / "dest", STEPS[3])


@pytest.mark.parametrize("what", ["missing", "longer"])
def test_a_part_is_missing_or_has_another_size(root: Path, what: str) -> None:
    path = root / part(3, 1)
    path.unlink() if what == "missing" else path.write_bytes(path.read_bytes() + b"\0")
    chain = read_chain(LocalBucket(root))
    assert [(p.step, p.file) for p in chain.problems] == [(3, part(3, 1))]
    assert chain.tip == 2
    with pytest.raises(Malformed) as caught:
        chain.path(4)
    assert caught.value.file == part(3, 1)
    with pytest.raises(Malformed, match=r"missing|bytes after"):
        open_delta(place(root, 3))


def test_a_step_has_no_delta_in_both_forms(root: Path, tmp_path: Path) -> None:
    make_delta(root / delta_name(3), STEPS[1], STEPS[2], step=3)
    report = verify_bucket(LocalBucket(root))
    assert "the step has two deltas" in [row["what"] for row in report.errors]


def test_a_part_read_alone_is_no_step_of_the_chain(root: Path) -> None:
    """It stands on the state of its own tensors, which no reader holds for the whole."""
    path = root / part(2)
    whole = open_delta(place(root, 2)).header
    assert open_delta(path).header.base_state != whole.base_state
    single = root / delta_name(2)
    shutil.copyfile(path, single)
    shutil.rmtree(place(root, 2))
    assert read_chain(LocalBucket(root)).tip == 1
    with pytest.raises(DeltactlError):
        pull(LocalBucket(root), root.parent / "dest", step=2)


# Composing.


def test_parts_that_do_not_belong_together(root: Path, tmp_path: Path) -> None:
    header = {n: read_header(root / part(4, n)) for n in range(COUNT)}
    before = table(STEPS[2])
    with pytest.raises(UsageError, match="two parts"):
        delta_index(before, {"a.safetensors": header[0], "b.safetensors": header[0]}, 4, 3)
    other = read_header(make_delta(tmp_path / "raw", STEPS[2], STEPS[3], encoding="raw"))
    with pytest.raises(UsageError, match="one encoding"):
        delta_index(before, {"a.safetensors": header[0], "b.safetensors": other}, 4, 3)
    with pytest.raises(Malformed, match="does not fit"):
        delta_index({}, {"a.safetensors": header[0]}, 4, 3)
    anchor = read_header(write_safetensors(tmp_path / "plain.safetensors", STEPS[0]))
    with pytest.raises(DeltactlError):
        delta_index(before, {"a.safetensors": anchor}, 4, 3)


def test_the_order_of_parts_does_not_enter(root: Path) -> None:
    names = [part_name(n, COUNT) for n in range(COUNT)]
    parts = {name: read_header(place(root, 4) / name) for name in reversed(names)}
    raw, after = delta_index(table(STEPS[2]), parts, 4, 3)
    assert raw == (place(root, 4) / DELTA_INDEX).read_bytes()
    assert after == table(STEPS[3])


# Damage.

NAMES = [DELTA_INDEX, *(part_name(n, 2) for n in range(2))]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """Two steps, of few tensors, so that every bit can be tried."""
    full, root = first_state(), tmp_path_factory.mktemp("small")
    before = {name: full[name] for name in ("model.packed", "model.scale")}
    after = {
        "model.packed": next_state(full, 3)["model.packed"],
        "model.new": ("U8", (5,), b"abcde"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTACTL_CACHE", str(root / "cache"))
        bucket = LocalBucket(root / "bucket")
        push(write_safetensors(root / "a.safetensors", before), bucket)
    write_parts(place(root / "bucket", 2), before, after, count=2, step=2)
    return root / "bucket", {1: before, 2: after}


def header_size(path: Path) -> int:
    raw = path.read_bytes()
    return len(raw) if path.name == DELTA_INDEX else 8 + int.from_bytes(raw[:8], "little")


@pytest.mark.parametrize("name", NAMES)
def test_every_bit_of_a_header_and_every_length(
    small: tuple[Path, dict[int, Any]], name: str
) -> None:
    bucket, _ = small
    path = place(bucket, 2) / name
    head, size = header_size(path), path.stat().st_size
    damages = [*every_bit(0, head), *(Damage(length) for length in range(size))]
    damages += Random(1).sample(every_bit(head, size), min(200, 8 * (size - head)))
    assert verify_all(bucket, f"{delta_directory(2)}/{name}", damages) == []


@pytest.mark.parametrize("name", NAMES)
def test_what_is_pulled_is_the_truth_or_nothing(
    small: tuple[Path, dict[int, Any]], name: str
) -> None:
    bucket, truth = small
    size = (place(bucket, 2) / name).stat().st_size
    damages = Random(2).sample(every_bit(0, size), min(300, 8 * size))
    damages += [Damage(length) for length in Random(3).sample(range(size), min(40, size))]
    assert pull_all(bucket, f"{delta_directory(2)}/{name}", damages, truth) == []


@pytest.mark.parametrize("name", [DELTA_INDEX, part_name(1, COUNT)])
def test_a_bit_that_turns_on_the_way(root: Path, tmp_path: Path, name: str) -> None:
    """Also of the index, which was read when the chain was."""
    bucket = RemoteBucket(root)
    name = f"{delta_directory(3)}/{name}"
    chain = read_chain(bucket)
    size = next(item.size for item in chain.deltas[3].objects if item.name == name)
    bucket.faults.append(flipping(name, size - 1))
    with pytest.raises(Malformed) as caught:
        materialize(bucket, chain, tmp_path / "dest")
    assert caught.value.file == name
    assert not (tmp_path / "dest").exists()


# Lies: an index that is sealed, and says what is not so.


def files(index: Header, **change: object) -> None:
    rows = table_of(index, "files")
    rows[0] |= change
    set_table(index, "files", rows)


def rows_of(index: Header, change: Callable[[list[dict[str, Any]]], None]) -> None:
    rows = table_of(index, "tensors")
    change(rows)
    set_table(index, "tensors", rows)


def lie_about_bytes(index: Header) -> None:
    rows_of(index, lambda rows: rows[0].update(bytes=rows[0]["bytes"] - 1))


def lie_about_more_bytes_than_there_are(index: Header) -> None:
    rows_of(index, lambda rows: rows[0].update(bytes=1 << 40))


def leave_out_bytes(index: Header) -> None:
    rows_of(index, lambda rows: rows[0].pop("bytes"))


def exchange_homes(index: Header) -> None:
    homes = index["weight_map"]
    names = sorted(homes)
    homes[names[0]], homes[names[1]] = homes[names[1]], homes[names[0]]


def forget_a_home(index: Header) -> None:
    index["weight_map"].popitem()


def make_up_a_home(index: Header) -> None:
    index["weight_map"][next(iter(index["weight_map"]))] = "delta-00009-of-00009.safetensors"


def name_a_file_twice(index: Header) -> None:
    rows = table_of(index, "files")
    set_table(index, "files", [rows[0], *rows])


def exchange_headers(index: Header) -> None:
    rows = table_of(index, "files")
    rows[0]["header"], rows[1]["header"] = rows[1]["header"], rows[0]["header"]
    set_table(index, "files", rows)


def exchange_payloads(index: Header) -> None:
    rows = table_of(index, "files")
    rows[0]["payload"], rows[1]["payload"] = rows[1]["payload"], rows[0]["payload"]
    set_table(index, "files", rows)


def leave_out_a_file(index: Header) -> None:
    set_table(index, "files", table_of(index, "files")[1:])


def empty(index: Header) -> None:
    set_table(index, "files", [])
    set_table(index, "tensors", [])
    index["weight_map"] = {}


LIES = [
    lie_about_bytes,
    lie_about_more_bytes_than_there_are,
    leave_out_bytes,
    exchange_homes,
    forget_a_home,
    make_up_a_home,
    name_a_file_twice,
    exchange_headers,
    exchange_payloads,
    leave_out_a_file,
    empty,
]


@pytest.mark.parametrize("kind", [LocalBucket, RemoteBucket])
@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies(
    root: Path, tmp_path: Path, kind: type[LocalBucket], lie: Callable[[Header], None]
) -> None:
    rewrite_index(place(root, 4) / DELTA_INDEX, lie)
    for level in ("data", "rebuild"):
        report = verify_bucket(kind(root), level=level)
        assert {row["step"] for row in report.errors} == {4}
        assert all(str(row["file"]).startswith(delta_directory(4)) for row in report.errors)
    try:
        report = pull(kind(root), tmp_path / "dest")
    except DeltactlError:
        assert not (tmp_path / "dest").exists()
    else:
        assert (report.step, report.newer) == (3, (4,))
        assert holds(tmp_path / "dest", STEPS[2])
    with pytest.raises(ValueError, match=r"\w"):
        page_apply(place(root, 4), STEPS[2])


@pytest.mark.parametrize(
    "name",
    [
        "../../step_000003/delta-00001-of-00003.safetensors",
        "/etc/delta.safetensors",
        "sub/delta.safetensors",
        "..",
        ".",
        "",
        "..\\delta.safetensors",
        "delta\x00.safetensors",
        "delta\n.safetensors",
        "delta\u202e.safetensors",
        "delta.bin",
        DELTA_INDEX,
        None,
        7,
    ],
)
def test_hostile_names(root: Path, name: object) -> None:
    """Nothing outside of the directory is looked at, also where it would be as the index says."""

    def lie(index: Header) -> None:
        files(index, name=name)
        first = part_name(0, COUNT)
        homes = index["weight_map"]
        index["weight_map"] = {t: name if home == first else home for t, home in homes.items()}

    rewrite_index(place(root, 4) / DELTA_INDEX, lie)
    (problem,) = read_chain(LocalBucket(root)).problems
    assert isinstance(problem, Malformed)
    assert (problem.step, problem.file) == (4, f"{delta_directory(4)}/{DELTA_INDEX}")
    with pytest.raises(Malformed):
        open_delta(place(root, 4))


@pytest.mark.parametrize("size", [-1, True, 1.5, "9", None, 1 << 63, 10**30])
def test_hostile_sizes(root: Path, size: object) -> None:
    rewrite_index(place(root, 4) / DELTA_INDEX, lambda index: files(index, bytes=size))
    (problem,) = read_chain(LocalBucket(root)).problems
    assert isinstance(problem, Malformed)


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b"\xff", b'{"metadata":{},"weight_map":{}}'])
def test_what_is_no_index(root: Path, raw: bytes) -> None:
    (place(root, 4) / DELTA_INDEX).write_bytes(raw)
    (problem,) = read_chain(LocalBucket(root)).problems
    assert isinstance(problem, Malformed)
    assert problem.step == 4


def test_a_part_that_is_a_link_to_elsewhere_is_what_the_index_says_or_nothing(
    root: Path, tmp_path: Path
) -> None:
    path = root / part(3)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert open_delta(place(root, 3)).header.step == 3
    elsewhere.unlink()
    with pytest.raises((Malformed, NotFound)):
        open_delta(place(root, 3))
