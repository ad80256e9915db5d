"""Files and directories that appear whole or not at all, and what dead processes left of them."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from deltactl.core.errors import UsageError
from deltactl.files import atomic, temporary
from deltactl.files.atomic import (
    atomic_directory,
    atomic_file,
    copy_file,
    recover,
    rename_new,
    temporary_directory,
    temporary_file,
    write_at,
)
from deltactl.files.temporary import NEW, OLD, aside


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with atomic_file(path) as file:
        file.write(b"content")
        assert not path.exists()
    assert path.read_bytes() == b"content"
    assert names(path.parent) == ["file"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def interrupted() -> None:
        with atomic_file(path) as file:
            file.write(b"new")
            file.flush()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interrupted()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]
    with atomic_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("there", ["directory", "pipe", "link to a device"])
def test_only_files_are_replaced_by_files(tmp_path: Path, there: str) -> None:
    path = tmp_path / "there"
    if there == "directory":
        path.mkdir()
    elif there == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(os.devnull)
    with pytest.raises(UsageError, match="no regular file"), atomic_file(path):
        pytest.fail("opened")
    assert names(tmp_path) == ["there"]


def test_new_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        with atomic_file(tmp_path / "file"), atomic_directory(tmp_path / "directory"):
            pass
    finally:
        os.umask(mask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "directory").stat().st_mode & 0o777 == 0o750


@pytest.fixture(params=["exchange", "two renames"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "two renames":
        monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)


@pytest.mark.usefixtures("_both_ways")
def test_a_directory_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "directory"
    for content in ("one", "two"):
        with atomic_directory(path) as new:
            (new / content).write_text(content)
        assert names(path) == [content]

    def interrupted() -> None:
        with atomic_directory(path) as new:
            (new / "three").write_text("three")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interrupted()
    assert names(path) == ["two"]
    assert names(tmp_path) == ["directory"]


def test_the_old_directory_is_back_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)
    path = tmp_path / "directory"
    path.mkdir()
    (path / "old").touch()
    rename = os.rename

    def failing(a: Path, b: Path) -> None:
        if a.name.endswith(f".{NEW}.tmp"):
            raise OSError(errno.EIO, "Input/output error")
        rename(a, b)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="Input/output"), atomic_directory(path):
        pass
    assert names(path) == ["old"]
    assert names(tmp_path) == ["directory"]


def test_an_exchange_that_fails_is_not_taken_for_one_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        atomic._exchange(tmp_path / "a", tmp_path / "b")


def test_rename_new(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"a")
    if not rename_new(a, b):
        pytest.skip("the file system has no such call")
    assert b.read_bytes() == b"a"
    a.write_bytes(b"other")
    with pytest.raises(FileExistsError):
        rename_new(a, b)
    assert b.read_bytes() == b"a"


def test_temporaries_vanish(tmp_path: Path) -> None:
    with temporary_file(tmp_path / "x") as (file, name), temporary_directory(tmp_path / "x") as new:
        file.write(b"1")
        (new / "sub").mkdir()
        assert len(names(tmp_path)) == 2
        assert name.parent == new.parent == tmp_path
    assert names(tmp_path) == []


def test_copy_file_by_either_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * 9000)
    for refuse in (False, True):
        if refuse:
            monkeypatch.setattr(os, "copy_file_range", _refused)
        with open(target, "wb") as file:
            file.write(b"before")
            copy_file(source, file)
            file.write(b"after")
        assert target.read_bytes() == b"before" + source.read_bytes() + b"after"


def _refused(*_: object) -> int:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


# What dead processes left.


def left_over(path: Path, what: str = NEW) -> Path:
    name = aside(path, what)
    name.mkdir()
    (name / "part").write_text("half")
    return name


@contextlib.contextmanager
def another_process_holding(path: Path) -> Iterator[subprocess.Popen[str]]:
    """One that is in the middle of writing a directory beside ``path``."""
    code = (
        "import sys, pathlib\n"
        "from deltactl.files.atomic import temporary_directory\n"
        "with temporary_directory(pathlib.Path(sys.argv[1])) as new:\n"
        "    (new / 'part').write_text('half')\n"
        "    print(new, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


def test_what_a_killed_process_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    path = tmp_path / "target"
    with another_process_holding(path) as process:
        assert process.stdout is not None
        name = Path(process.stdout.readline().strip())
        with atomic_directory(path):
            pass
        assert (name / "part").exists(), "its maker lives"
        process.kill()
        process.wait()
        assert name.exists(), "nobody could clean up"
        with atomic_file(tmp_path / "other"):
            pass
        assert name.exists(), "of another target"
        with atomic_directory(path):
            pass
        assert names(tmp_path) == ["other", "target"]


def test_left_overs_are_removed_by_the_next_writer_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    aside(path, NEW).write_bytes(b"half")
    left_over(path)
    with atomic_file(path):
        pass
    assert names(tmp_path) == ["file"]


def test_what_only_looks_like_a_left_over_stays(tmp_path: Path) -> None:
    path = tmp_path / "a"
    mine = aside(path, NEW).name
    host = mine.split(".")[2]
    others = [
        mine.replace(host, "00000000"),  # of another host, where its maker may be alive
        mine.replace(".a.", ".a.b."),  # of a target called a.b
        mine.replace(".new.", ".other."),
        mine + ".bak",
        "a.tmp",
        ".a.tmp",
    ]
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / mine).symlink_to("a.tmp")
    recover(path)
    assert names(tmp_path) == sorted([*others, mine])


def test_the_only_copy_gets_its_name_back(tmp_path: Path) -> None:
    path = tmp_path / "target"
    left_over(path, OLD)
    left_over(path, NEW)
    recover(path)
    assert names(tmp_path) == ["target"]
    assert names(path) == ["part"]
    left_over(path, OLD)
    recover(path)
    assert names(tmp_path) == ["target"]


def test_a_name_that_is_nearly_too_long(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 120 + ".safetensors")
    left_over(path)
    with atomic_file(path) as file:
        file.write(b"content")
    assert names(tmp_path) == [path.name]


def test_where_there_are_no_locks_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(temporary.fcntl, "flock", unsupported)
    name = left_over(tmp_path / "target")
    with atomic_directory(tmp_path / "target"):
        pass
    assert names(tmp_path) == [name.name, "target"]


def test_one_that_is_taken_for_a_left_over_at_birth_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its making and its lock another process may come along and remove it."""
    make, made = atomic._make_directory, []

    def robbed(name: Path) -> int:
        fd = make(name)
        if len(made) < 2:
            name.rmdir()
        made.append(name)
        return fd

    monkeypatch.setattr(atomic, "_make_directory", robbed)
    with temporary_directory(tmp_path / "target") as new:
        assert new.is_dir()
    assert len(made) == 3
    assert names(tmp_path) == []


def test_all_is_written_at_its_place_however_little_the_system_takes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, pwrite = [], os.pwrite

    def a_part(fd: int, data: memoryview, offset: int) -> int:
        sizes.append(len(data))
        return pwrite(fd, data[: 1 + len(data) * 2 // 3], offset)

    monkeypatch.setattr(os, "pwrite", a_part)
    data = Random(3).randbytes(3 << 20)
    with open(tmp_path / "file", "xb") as file:
        write_at(file.fileno(), memoryview(data), 5)
        write_at(file.fileno(), b"", 0)
        write_at(file.fileno(), b"begin", 0)
    assert (tmp_path / "file").read_bytes() == b"begin" + data
    assert max(sizes) < 1 << 21, "Linux takes huge pages for as much at once"


def test_a_directory_is_removed_though_a_thread_puts_a_last_file_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "place").mkdir()
    remove_tree, late = temporary.shutil.rmtree, [tmp_path / "place" / "last"]

    def rmtree(path: Path, **options: Any) -> None:
        if late:
            late.pop().write_bytes(b"")
            return  # as it ends where the directory is not empty any more
        remove_tree(path, **options)

    monkeypatch.setattr(temporary.shutil, "rmtree", rmtree)
    temporary.remove(tmp_path / "place")
    assert names(tmp_path) == []
