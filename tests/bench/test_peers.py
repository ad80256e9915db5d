"""Other tools: each gives back what it was given, or it is said why there is nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deltactl.bench.made import WEIGHTS, write_steps
from deltactl.bench.peers import NOT_INSTALLED, PEERS, TRL, Files, MeasuredPeer, Peer
from tests.support.checkpoints import read_tensors
from tests.support.tools import need

PROGRAMS = {"zstd", "xdelta3"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    a, b = write_steps(tmp_path_factory.mktemp("pair"), 1 << 18, 2)
    return Files(a / WEIGHTS, b / WEIGHTS, 2600, is_sample=True)


@pytest.mark.parametrize("peer", [TRL, *PEERS], ids=lambda peer: peer.name)
def test_each_is_measured(peer: Peer, files: Files, tmp_path: Path) -> None:
    if peer.needs in PROGRAMS:
        need(peer.needs)
    measured = MeasuredPeer(peer, files, tmp_path)
    works = measured.works()
    for work in works.values():
        work.run()
    row = measured.row(dict.fromkeys(works, 2.0))
    assert row.problem is None
    assert row.nbytes == files.b.stat().st_size
    assert 0 < (row.coded_bytes or 0) < row.nbytes
    assert row.encode == 2.0
    assert row.decode == (None if peer is TRL else 2.0)


def test_trls_way_holds_what_changed(files: Files, tmp_path: Path) -> None:
    TRL.encode(files.a, files.b, tmp_path / "coded")
    coded, old, new = map(read_tensors, (tmp_path / "coded", files.a, files.b))
    for name, (_, _, after) in new.items():
        dtype, _, index = coded[f"{name}.indices"]
        assert dtype == "I32"
        values, patched = coded[f"{name}.values"][2], bytearray(old[name][2])
        for k in range(len(index) // 4):
            at = int.from_bytes(index[4 * k : 4 * k + 4], "little")
            patched[2 * at : 2 * at + 2] = values[2 * k : 2 * k + 2]
        assert bytes(patched) == after


def test_what_is_not_installed_is_said(files: Files, tmp_path: Path) -> None:
    measured = MeasuredPeer(replace(PEERS[0], needs="no-such-tool-anywhere"), files, tmp_path)
    assert measured.works() == {}
    row = measured.row({})
    assert row.problem == NOT_INSTALLED
    assert (row.coded_bytes, row.encode, row.decode) == (None, None, None)


def test_a_tool_that_fails_does_not_end_the_run(files: Files, tmp_path: Path) -> None:
    def broken(a: Path, b: Path, coded: Path) -> None:
        raise ValueError("out of luck")

    def other(a: Path, coded: Path, back: Path) -> None:
        back.write_bytes(b"something else")

    for peer, problem in (
        (replace(PEERS[-1], encode=broken), "failed: ValueError: out of luck"),
        (replace(PEERS[-1], decode=other), "failed: what it decodes is not what it was given"),
    ):
        measured = MeasuredPeer(peer, files, tmp_path)
        assert measured.works() == {}
        assert measured.row({}).problem == problem


def test_what_a_program_says_when_it_fails_is_kept(tmp_path: Path) -> None:
    need("zstd")
    missing = tmp_path / "missing"
    problem = PEERS[0].trial(missing, missing, tmp_path / "coded", tmp_path / "back")
    assert problem is not None
    assert problem.startswith("failed: zstd: ")
