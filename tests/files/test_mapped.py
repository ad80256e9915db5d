"""Files that shrink while they are mapped: an error that names them, nothing visible, no crash."""

from __future__ import annotations

import gc
import mmap
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.core.errors import DeltactlError, Malformed
from deltactl.core.progress import Meter
from deltactl.files import mapped
from deltactl.files.atomic import atomic_directory, atomic_file
from deltactl.files.mapped import map_bytes, mapped_fault
from deltactl.files.parallel import map_largest_first
from deltactl.format.delta import open_delta
from deltactl.format.link_names import anchor_file_name, delta_name
from deltactl.ops.apply import apply_delta, write_result
from deltactl.ops.diff import diff
from deltactl.ops.pull import pull
from deltactl.ops.push import push
from deltactl.ops.stats import stats_delta, stats_pair
from deltactl.ops.verify import verify_bucket, verify_delta
from tests.support.chains import content, holds, write_torch
from tests.support.checkpoints import Spec, changed, random_tensor, write_safetensors
from tests.support.tools import need_guard

PAGE = mmap.PAGESIZE
SIZE = 64 * PAGE


@pytest.fixture(autouse=True)
def _needs_the_guard() -> None:
    need_guard()


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"\1" * SIZE)
    return path


# A mapping by itself.


@pytest.mark.parametrize("left", [0, 1, PAGE, 7 * PAGE + 5, SIZE - 1])
def test_what_is_gone_reads_as_zeros_and_is_told(file: Path, left: int) -> None:
    data = map_bytes(file)
    assert mapped_fault() is None
    os.truncate(file, left)
    assert int(data[left:].max(initial=0)) == 0
    assert int(data[:left].sum()) == left
    fault = mapped_fault()
    assert isinstance(fault, Malformed)
    assert (fault.file, fault.expected, fault.found) == (
        str(file),
        f"{SIZE} bytes",
        f"{left} bytes",
    )
    assert "truncated while it was read" in fault.what
    del data
    assert mapped_fault() is None


def test_a_file_that_has_its_size_again_is_told(file: Path) -> None:
    data = map_bytes(file)
    os.truncate(file, PAGE)
    assert data[-1] == 0
    file.write_bytes(b"\1" * SIZE)
    fault = mapped_fault()
    assert fault is not None
    assert "written anew" in fault.what


def test_a_name_that_is_given_to_another_file_says_nothing(file: Path, tmp_path: Path) -> None:
    """As by all who write a file aside and rename it."""
    data = map_bytes(file)
    (tmp_path / "other").write_bytes(b"")
    (tmp_path / "other").replace(file)
    assert int(data.sum()) == SIZE
    assert mapped_fault() is None
    file.unlink()
    assert mapped_fault() is None


def test_many_threads_fault_at_once(file: Path) -> None:
    data = map_bytes(file)
    os.truncate(file, 0)
    with pytest.raises(Malformed, match="truncated"):
        map_largest_first(lambda at: int(data[at]), range(0, SIZE, PAGE), lambda _: 1)


def test_what_was_only_forgotten_stops_nobody(file: Path, tmp_path: Path) -> None:
    """As what an error keeps that somebody keeps: nobody reads it any more, and its owner may write
    to the file."""
    forgotten = map_bytes(file)
    file.write_bytes(b"short")
    with atomic_file(tmp_path / "out") as out:
        out.write(b"of other things")
    assert forgotten[-1] == 0  # but who does read it is told, whatever it ends with
    with pytest.raises(Malformed, match="truncated"), atomic_file(tmp_path / "more"):
        pass
    for _ in range(2):
        with pytest.raises(Malformed, match="truncated"), mapped.sound_sources(forgotten):
            pass


def test_views_keep_the_watch_and_nothing_else_does(file: Path) -> None:
    view = map_bytes(file)[PAGE : 2 * PAGE].view("<u2")[::2]
    os.truncate(file, 0)
    assert not view.any()
    assert mapped_fault() is not None
    del view
    gc.collect()
    assert mapped_fault() is None


def test_ranges_are_used_again(file: Path) -> None:
    for _ in range(70_000):  # more than there can be at once
        map_bytes(file)
    data = map_bytes(file)
    os.truncate(file, 0)
    assert data[0] == 0
    assert mapped_fault() is not None


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


FOREIGN = """
    import mmap, os, pathlib, signal, sys
    from deltactl.files.mapped import map_bytes
    one, other, how = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    if how == "faulthandler":
        import faulthandler
        faulthandler.enable()
    ours = map_bytes(one)
    os.truncate(one, 0)
    assert ours[0] == 0
    if how == "sent":
        os.kill(os.getpid(), signal.SIGBUS)
    with open(other, "r+b") as file:
        theirs = mmap.mmap(file.fileno(), 0)
    os.truncate(other, 0)
    theirs[0]
    print("still here")
"""


@pytest.mark.parametrize("how", ["default", "faulthandler", "sent"])
def test_a_fault_that_is_not_ours_goes_to_who_had_it_before(
    file: Path, tmp_path: Path, how: str
) -> None:
    (tmp_path / "other").write_bytes(b"\1" * SIZE)
    done = run(FOREIGN, file, tmp_path / "other", how)
    assert done.returncode == -signal.SIGBUS
    assert done.stdout == ""
    assert ("Fatal Python error: Bus error" in done.stderr) == (how == "faulthandler")


def test_memory_that_comes_to_lie_where_a_file_was_is_not_ours(file: Path, tmp_path: Path) -> None:
    code = """
        import gc, mmap, os, pathlib, sys
        from deltactl.files.mapped import map_bytes
        ours = map_bytes(pathlib.Path(sys.argv[1]))
        address = ours.ctypes.data
        del ours
        gc.collect()
        with open(sys.argv[1], "r+b") as file:
            theirs = mmap.mmap(file.fileno(), 0)
        import numpy
        assert numpy.frombuffer(theirs, "u1").ctypes.data == address
        os.truncate(sys.argv[1], 0)
        theirs[0]
    """
    assert run(code, file).returncode == -signal.SIGBUS


def test_nothing_is_handled_before_a_file_is_mapped(file: Path) -> None:
    code = """
        import ctypes, pathlib, sys
        def handled():
            action = ctypes.create_string_buffer(256)
            assert ctypes.CDLL(None).sigaction(7, None, action) == 0
            return bool(int.from_bytes(action.raw[:8], "little"))
        import deltactl.checkpoint.checkpoint, deltactl.files.mapped
        print(handled())
        kept = deltactl.files.mapped.map_bytes(pathlib.Path(sys.argv[1]))
        print(handled())
    """
    if sys.platform == "linux":
        assert run(code, file).stdout.split() == ["False", "True"]


def test_a_child_is_guarded_too(file: Path) -> None:
    data = map_bytes(file)
    os.truncate(file, 0)
    child = os.fork()
    if not child:
        os._exit(0 if data[0] == 0 and mapped_fault() is not None else 1)
    assert os.waitpid(child, 0)[1] == 0


# What takes a name.


def test_nothing_takes_a_name_that_was_made_of_a_torn_file(file: Path, tmp_path: Path) -> None:
    data = map_bytes(file)
    mapped.hold(data)
    os.truncate(file, PAGE)
    for _ in range(2):
        with pytest.raises(Malformed, match="truncated"), atomic_file(tmp_path / "out") as out:
            out.write(data)
        with pytest.raises(Malformed, match="truncated"), atomic_directory(tmp_path / "dir"):
            pass
    mapped.let_go(data)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_is_held_though_others_were_mapped_to_its_address_before(file: Path) -> None:
    data = map_bytes(file)
    at, size = data.ctypes.data, data.size
    earlier = [mapped.Watched(file, at, size, size, lambda: size) for _ in range(20)]
    for one in earlier:
        one.release()
    mapped.hold(data)
    os.truncate(file, PAGE)
    for _ in range(2):
        with pytest.raises(Malformed, match="truncated"):
            mapped.check_mapped()
    mapped.let_go(data)
    mapped.check_mapped()


def test_who_tries_again_is_not_told_of_what_was_let_go_of(tmp_path: Path) -> None:
    """Though the error of the first time, and so what it saw, lives on."""
    place = Place(tmp_path)
    errors = []
    for path, victims in ((place.base, [place.base]), (place.delta, [place.delta])):
        was = path.read_bytes()
        with pytest.raises(Malformed, match="truncated") as caught:
            tear_while_applying(place, victims)
        errors.append(caught.value)
        path.write_bytes(was)
        apply_delta(place.delta, place.base, place.out)
        place.out.unlink()
    assert len(errors) == 2


def tear_while_applying(place: Place, victims: list[Path]) -> None:
    held = open_delta(place.delta)
    with open_checkpoint(place.base) as base:
        for path in victims:
            os.truncate(path, 1)
        write_result(base, [held], place.out, in_place=False, expected=None)


# Whatever reads a checkpoint or a link.

BEFORE: dict[str, Spec] = {
    "a": random_tensor("BF16", (500, 100), 1),
    "b": random_tensor("F32", (300, 100), 2),
}
AFTER = {**BEFORE, "a": changed(BEFORE["a"], 0.4, 3), "c": random_tensor("F32", (60_000,), 4)}


class Place:
    """Two checkpoints, a bucket of both, and the delta between them."""

    def __init__(self, root: Path) -> None:
        self.root, self.out = root, root / "out"
        self.base = write_safetensors(root / "base.safetensors", BEFORE)
        self.result = write_safetensors(root / "result.safetensors", AFTER)
        self.bucket = LocalBucket(root / "bucket")
        push(self.base, self.bucket, step=1)
        push(self.result, self.bucket, step=2)
        self.anchor = root / "bucket" / anchor_file_name(1)
        self.delta = root / "bucket" / delta_name(2)


def diff_of(place: Place) -> None:
    with open_checkpoint(place.base) as base, open_checkpoint(place.result) as result:
        diff(base, result, place.out)


def push_of(place: Place) -> None:
    push(place.result, LocalBucket(place.root / "other"), step=1)


def push_delta_of(place: Place) -> None:
    other = LocalBucket(place.root / "other")
    push(place.base, other, step=1)
    push(place.delta, other)


def verify_of(level: str) -> Callable[[Place], None]:
    def look(place: Place) -> None:
        report = verify_bucket(place.bucket, level=level)
        for row in report.errors:
            raise Malformed(**row)

    return look


def verify_delta_of(place: Place) -> None:
    for row in verify_delta(place.delta).errors:
        raise Malformed(**row)


def against_of(place: Place) -> None:
    for row in verify_bucket(place.bucket, level="links", against=place.result).errors:
        raise Malformed(**row)


def stats_of(place: Place) -> None:
    with open_checkpoint(place.base) as base, open_checkpoint(place.result) as result:
        stats_pair(base, result)


RUNS: dict[str, tuple[Callable[[Place], object], tuple[str, ...]]] = {
    "diff": (diff_of, ("base", "result")),
    "push": (push_of, ("result",)),
    "push a delta": (push_delta_of, ("delta",)),
    "apply": (lambda p: apply_delta(p.delta, p.base, p.out), ("base", "delta")),
    "apply in place": (lambda p: apply_delta(p.delta, p.base, None), ("base", "delta")),
    "pull": (lambda p: pull(p.bucket, p.out), ("anchor", "delta")),
    "verify data": (verify_of("data"), ("anchor", "delta")),
    "verify rebuild": (verify_of("rebuild"), ("anchor", "delta")),
    "verify a delta": (verify_delta_of, ("delta",)),
    "verify against": (against_of, ("anchor", "delta", "result")),
    "stats of a pair": (stats_of, ("base", "result")),
    "stats of a delta": (lambda p: stats_delta(open_delta(p.delta)), ("delta",)),
}


class Tearing:
    """Truncates a file at the n-th time, from 0, that anybody maps, or reads a piece of it, once it
    is mapped; ``torn``: whether that time came."""

    def __init__(self, path: Path, moment: int, left: int, patch: pytest.MonkeyPatch) -> None:
        self._path, self._left, self._to_go, self.torn = path, left, moment, False
        add, init = Meter.add, mapped.Watched.__init__

        def mapped_one(watched: mapped.Watched, *given: Any) -> None:
            init(watched, *given)
            self._pass()

        def read_piece(meter: Meter, count: int) -> None:
            self._pass()
            add(meter, count)

        patch.setattr(mapped.Watched, "__init__", mapped_one)
        patch.setattr(Meter, "add", read_piece)

    def _pass(self) -> None:
        live = [watched for watched in list(mapped._live) if not watched.released]
        if self.torn or not any(watched.path.samefile(self._path) for watched in live):
            return
        self._to_go -= 1
        if self._to_go < 0:
            self.torn = True
            os.truncate(self._path, self._left)


@pytest.mark.parametrize(
    ("name", "victim"), [(name, v) for name, (_, victims) in RUNS.items() for v in victims]
)
@pytest.mark.parametrize("moment", range(4))
def test_a_source_that_shrinks_at_any_moment_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, victim: str, moment: int
) -> None:
    """The truth, or nothing: neither a wrong result nor a word of another kind."""
    place = Place(tmp_path)
    path: Path = getattr(place, victim)
    was, act = set(content(tmp_path)), RUNS[name][0]
    with monkeypatch.context() as patch:
        tearing = Tearing(path, moment, moment % 2, patch)
        try:
            act(place)
        except DeltactlError as error:
            failed: DeltactlError | None = error
        else:
            failed = None
    left = {p for p in content(tmp_path) if not p.startswith("other/")}
    if failed is not None:
        assert tearing.torn
        assert isinstance(failed, Malformed)
        assert Path(str(failed.file)).name == path.name or name.startswith("verify")
        opened_again = re.search("is empty|too short|does not begin", failed.what)
        assert opened_again or "truncated" in failed.what or "changed while it" in failed.what
        assert left == was
    else:  # all of it had been read by then
        assert moment > 0, "it was never mapped"
        if place.out.exists() and name in ("apply", "pull"):
            assert holds(place.out, AFTER)


@pytest.mark.parametrize("left", [0, PAGE])
def test_a_torch_file_is_watched_as_well(tmp_path: Path, left: int) -> None:
    pytest.importorskip("torch")
    tensors: dict[str, Spec] = {n: random_tensor("F32", (20_000,), k) for k, n in enumerate("xyz")}
    path = write_torch(tmp_path / "torch", tensors) / "pytorch_model.bin"
    opened = open_checkpoint(path)
    data = [tensor.data for tensor in opened.tensors.values()]
    os.truncate(path, left)
    assert not any(part[-1] for part in data)
    with pytest.raises(Malformed, match="truncated") as caught:
        opened.__exit__(None)
    assert caught.value.file == str(path)
    del data, opened, caught
    gc.collect()
    assert mapped_fault() is None


COMMAND = """
    import os, sys
    from deltactl.core.progress import Meter
    from deltactl.cli.app import main
    victim, add = sys.argv.pop(1), Meter.add
    def torn(self, count):
        os.truncate(victim, 1000)
        add(self, count)
    Meter.add = torn
    main()
"""


def test_the_command_ends_with_3_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path)
    was = sorted(content(tmp_path))
    done = run(COMMAND, place.base, "diff", place.base, place.result, "-o", tmp_path / "out")
    assert done.returncode == 3, done.stderr
    assert "base.safetensors: the file was truncated while it was read" in done.stderr
    assert sorted(content(tmp_path)) == was


def test_a_command_dies_with_a_word_where_nothing_guards_it(tmp_path: Path) -> None:
    """Installed without a C compiler."""
    place = Place(tmp_path)
    code = textwrap.dedent("""
        import deltactl.core.native.guard as guard
        guard.GUARD = None
    """) + textwrap.dedent(COMMAND)
    done = run(code, place.base, "diff", place.base, place.result, "-o", tmp_path / "out")
    if done.returncode == -signal.SIGBUS:
        assert "Bus error" in done.stderr
    else:  # all had been read
        assert done.returncode == 3
        assert "truncated" in done.stderr
    assert not (tmp_path / "out").exists()
