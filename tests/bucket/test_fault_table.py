"""What goes wrong between a verb and a store: the exit status, the advice, and what is left.

Each row is a fault at a real S3 server or at the Hub's stand-in, met by ``push`` and by ``pull`` of
a small chain. Whatever the outcome nothing half-done is visible, nothing that was there is lost,
and once the fault is gone the same command succeeds.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deltactl.bucket import open_bucket, retrying
from deltactl.bucket.cloud import stores
from deltactl.bucket.hub import calls
from deltactl.bucket.timeouts import Timeouts
from deltactl.cli.app import app
from deltactl.ops.push import push
from deltactl.ops.verify import verify_bucket
from tests.support import fault_proxy as faults
from tests.support.checkpoints import (
    changed,
    random_tensor,
    read_tensors,
    write_hf_directory,
)
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.hub import HubStandIn
from tests.support.s3_server import S3Server, use_s3

DONE, OTHER, FAULTY, FORBIDDEN, TRANSIENT, ABSENT = 0, 1, 3, 4, 5, 10


@dataclass(frozen=True)
class Store:
    """A store with a chain of two steps, and the checkpoints of three."""

    url: str
    steps: list[Path]
    hurt: Callable[[str, str], None]
    """``hurt(fault, verb)``: from now on that verb meets the fault."""
    mend: Callable[[], None]


@dataclass(frozen=True)
class Row:
    """A fault, by its name in both stores' tables, and how a verb that meets it ends."""

    fault: str
    push: int
    pull: int
    says: str = ""


TABLE = [
    Row("500 once", DONE, DONE),
    Row("503 thrice", DONE, DONE),
    Row("500 for ever", TRANSIENT, TRANSIENT, "tried"),
    Row("503 for ever", TRANSIENT, TRANSIENT, "tried"),
    Row("429 once, come back in a second", DONE, DONE),
    Row("401", FORBIDDEN, FORBIDDEN),
    Row("403", FORBIDDEN, FORBIDDEN),
    Row("404", ABSENT, ABSENT),
    Row("409 for ever", TRANSIENT, TRANSIENT, "tried"),
    Row("dropped once", DONE, DONE),
    Row("dropped for ever", TRANSIENT, TRANSIENT, "tried"),
    Row("cut short once", DONE, DONE),
    # What a push is told is a few bytes, or none: that they are cut does no harm.
    Row("cut short for ever", DONE, TRANSIENT),
    Row("trickle", DONE, DONE),
    Row("hung for ever", TRANSIENT, TRANSIENT, "tried"),
    Row("flipped for ever", DONE, FAULTY),
]
S3: dict[str, tuple[Fault, int | None]] = {
    "500 once": (faults.status(500), 1),
    "503 thrice": (faults.status(503), 3),
    "500 for ever": (faults.status(500), None),
    "503 for ever": (faults.status(503), None),
    "429 once, come back in a second": (faults.status(429, headers={"Retry-After": "1"}), 1),
    "401": (faults.status(401), None),
    "403": (faults.status(403), None),
    "404": (faults.status(404), None),
    "409 for ever": (faults.status(409), None),
    "dropped once": (faults.drop(1000), 1),
    "dropped for ever": (faults.drop(1000), None),
    "cut short once": (faults.truncate(1000), 1),
    "cut short for ever": (faults.truncate(1000), None),
    "trickle": (faults.trickle(0.001, 512), 4),
    "hung for ever": (faults.hang(), None),
    "flipped for ever": (faults.flip(-1), None),
}
HUB: dict[str, dict[str, Any]] = {
    "500 once": {"status": 500, "times": 1},
    "503 thrice": {"status": 503, "times": 3},
    "500 for ever": {"status": 500},
    "503 for ever": {"status": 503},
    "429 once, come back in a second": {
        "status": 429,
        "times": 1,
        "headers": {"Retry-After": "1"},
    },
    "401": {"status": 401},
    "403": {"status": 403},
    "404": {"status": 404},
    "409 for ever": {"status": 409},
    "dropped once": {"drop": True, "times": 1},
    "dropped for ever": {"drop": True},
    "cut short once": {"cut": True, "times": 1},
    "cut short for ever": {"cut": True},
    "trickle": {"trickle": True, "times": 4},
    "hung for ever": {"hang": True},
    "flipped for ever": {"flip": True},
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short timeouts, and hardly a pause between tries: their length is tested elsewhere."""
    monkeypatch.setattr(retrying, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(calls, "TIMEOUT", 1.0)
    short = Timeouts(connect=1.0, read=1.0, whole=10.0)
    monkeypatch.setattr(stores.open_objects, "__defaults__", (None, None, short))


def checkpoints(directory: Path) -> list[Path]:
    tensors = {
        "a": random_tensor("BF16", (300, 100), 1),
        "b": random_tensor("BF16", (90, 100), 2),
    }
    paths = []
    for step in range(1, 4):
        paths.append(directory / f"step_{step}")
        write_hf_directory(paths[-1], tensors)
        tensors = {name: changed(spec, seed=step) for name, spec in tensors.items()}
    return paths


@pytest.fixture(params=["s3", "hub"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))
    steps = checkpoints(tmp_path)
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        proxy = request.getfixturevalue("proxy")
        use_s3(monkeypatch, proxy.url)
        url, mend = server.new_url(), proxy.clear

        def hurt(fault: str, verb: str) -> None:
            act, times = S3[fault]
            if verb == "push" and fault.startswith("dropped"):
                act = faults.lose_reply()
            method = {"push": "PUT", "pull": "GET"}[verb]
            proxy.inject(act, times=times, method=method, path="step_")
    else:
        hub: HubStandIn = request.getfixturevalue("hub")
        url, mend = f"hf://buckets/{hub.new_bucket()}/chain", hub.mend

        def hurt(fault: str, verb: str) -> None:
            in_body = fault.startswith(("cut", "flipped")) and verb == "pull"
            route = "xorb-get" if in_body else {"push": "batch", "pull": "resolve"}[verb]
            hub.fail(route, **HUB[fault])

    for step in steps[:2]:
        push(step, open_bucket(url))
    yield Store(url, steps, hurt, mend)
    mend()


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.endpoint) as proxy:
        yield proxy


def run(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stderr


@pytest.mark.parametrize("row", TABLE, ids=[row.fault for row in TABLE])
def test_push(store: Store, row: Row) -> None:
    store.hurt(row.fault, "push")
    code, said = run("push", store.steps[2], store.url, "--base", store.steps[1])
    assert code == row.push, said
    assert row.says in said
    assert bool(said) is bool(code)
    store.mend()
    report = verify_bucket(open_bucket(store.url), level="rebuild")
    assert report.ok, report.errors
    assert report.links in ((2, 3) if code else (3,))
    assert run("push", store.steps[2], store.url, "--step", 3) == (DONE, "")
    assert verify_bucket(open_bucket(store.url), level="rebuild", against=store.steps[2]).ok


@pytest.mark.parametrize("row", TABLE, ids=[row.fault for row in TABLE])
def test_pull(store: Store, row: Row, tmp_path: Path) -> None:
    out = tmp_path / "out"
    store.hurt(row.fault, "pull")
    code, said = run("pull", store.url, out)
    assert code == row.pull, said
    assert row.says in said
    assert bool(said) is bool(code)
    assert out.exists() is (code == DONE)
    store.mend()
    assert run("pull", store.url, out) == (DONE, "")
    assert read_tensors(out) == read_tensors(store.steps[1])
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert left == [], "nothing is left beside what was pulled"


def test_a_full_disk(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whoever pulls: the error is told, and nothing looks like a checkpoint."""
    write = os.pwrite

    def full(descriptor: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    code, said = run("pull", store.url, tmp_path / "out")
    assert code == OTHER
    assert "no space left on device" in said
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(os, "pwrite", write)
    assert run("pull", store.url, tmp_path / "out") == (DONE, "")
