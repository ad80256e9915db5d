"""Damage done to one file of a bucket, one bit or one length at a time, and what is said of it.

Runs in processes of its own: there, work that the library gives to threads is done at once, as
starting them costs more than all else on files of a kilobyte.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from deltactl.bucket.local import LocalBucket
from deltactl.core.errors import DeltactlError
from deltactl.core.threads import cores
from deltactl.ops.pull import PullReport, pull
from deltactl.ops.verify import VerifyReport, verify_bucket
from tests.support.checkpoints import Spec, read_tensors


@dataclass(frozen=True)
class Damage:
    """A bit of a file the other way round, or the file cut at ``offset`` where ``bit`` is None."""

    offset: int
    bit: int | None = None


Missed = tuple[Damage, str]
"""Damage that was not dealt with as it should be, and how it was."""


class _AtOnce(Executor):
    def __init__(self, *_: object) -> None:
        pass

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class _ThreadAtOnce:
    def __init__(self, *, target: Callable[[], None], daemon: bool) -> None:
        self.start = target


# Functions, as a Mock notes every call, and there are millions.


def _one() -> int:
    return 1


def _no_sync(descriptor: int) -> None:
    pass


@contextmanager
def done_at_once() -> Iterator[None]:
    """No threads, and no waiting for the disk."""
    with (
        mock.patch("deltactl.core.threads.Thread", _ThreadAtOnce),
        mock.patch("deltactl.files.parallel.ThreadPoolExecutor", _AtOnce),
        mock.patch("deltactl.files.parallel.cores", _one),
        mock.patch("os.fsync", _no_sync),
    ):
        yield


@contextmanager
def damaged(path: Path, damage: Damage) -> Iterator[None]:
    """The file is damaged while the block runs."""
    fd = os.open(path, os.O_RDWR)
    whole = os.pread(fd, os.fstat(fd).st_size, 0)
    try:
        if damage.bit is None:
            os.ftruncate(fd, damage.offset)
        else:
            os.pwrite(fd, bytes([whole[damage.offset] ^ (1 << damage.bit)]), damage.offset)
        yield
    finally:
        os.pwrite(fd, whole, 0)
        os.close(fd)


def every_bit(start: int, stop: int) -> list[Damage]:
    return [Damage(offset, bit) for offset in range(start, stop) for bit in range(8)]


def verify_all(bucket: Path, name: str, damages: Sequence[Damage]) -> list[Missed]:
    """The damage to the object ``name`` that ``verify`` does not find, or does not name."""
    return _on_all_cores(_verify_some, bucket, name, damages, None)


def pull_all(
    bucket: Path, name: str, damages: Sequence[Damage], truth: dict[int, dict[str, Spec]]
) -> list[Missed]:
    """The damage from which ``pull`` makes something that is not in ``truth``, which is by step."""
    return _on_all_cores(_pull_some, bucket, name, damages, truth)


def _on_all_cores(
    work: Callable[..., list[Missed]],
    bucket: Path,
    name: str,
    damages: Sequence[Damage],
    truth: object,
) -> list[Missed]:
    count = cores() if len(damages) > 2000 else 1
    parts = [damages[n::count] for n in range(count)]
    if count == 1:
        return work(bucket, name, damages, truth)
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        found = pool.map(work, repeat(bucket), repeat(name), parts, repeat(truth))
        return list(chain.from_iterable(found))


@contextmanager
def _own_copy(bucket: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=bucket.parent) as scratch, done_at_once():
        yield Path(shutil.copytree(bucket, Path(scratch, "bucket")))


def _verify_some(
    bucket: Path, name: str, damages: Sequence[Damage], _: object = None
) -> list[Missed]:
    missed = []
    with _own_copy(bucket) as copy:
        assert verify_bucket(LocalBucket(copy)).ok
        for damage in damages:
            with damaged(copy / name, damage):
                wrong = _not_found(lambda: verify_bucket(LocalBucket(copy)), name)
            if wrong:
                missed.append((damage, wrong))
        assert verify_bucket(LocalBucket(copy)).ok
    return missed


def _not_found(verify: Callable[[], VerifyReport], name: str) -> str | None:
    try:
        report = verify()
    except BaseException as error:
        return f"raised {error!r}"
    if report.ok:
        return "passed"
    if not any(str(row["file"]).endswith(name) for row in report.errors):
        return f"not named: {report.errors}"
    return None


def _pull_some(
    bucket: Path, name: str, damages: Sequence[Damage], truth: dict[int, dict[str, Spec]]
) -> list[Missed]:
    missed = []
    with _own_copy(bucket) as copy:
        dest = copy.parent / "dest"
        for damage in damages:
            with damaged(copy / name, damage):
                wrong = _wrong_pull(LocalBucket(copy), dest, truth)
            if wrong:
                missed.append((damage, wrong))
            if sorted(path.name for path in dest.parent.iterdir()) != ["bucket"]:
                missed.append((damage, "something is left"))
    return missed


def _wrong_pull(bucket: LocalBucket, dest: Path, truth: dict[int, dict[str, Spec]]) -> str | None:
    try:
        report = pull(bucket, dest)
    except DeltactlError:
        return "failed, and something is there" if dest.exists() else None
    except BaseException as error:
        return f"raised {error!r}"
    try:
        return _wrong_result(report, dest, truth)
    finally:
        shutil.rmtree(dest)


def _wrong_result(report: PullReport, dest: Path, truth: dict[int, dict[str, Spec]]) -> str | None:
    if read_tensors(dest) != truth[report.step]:
        return "other tensors"
    if report.step != max(truth) and max(truth) not in report.newer:
        return "an older step, and nothing said of the newer one"
    return None
