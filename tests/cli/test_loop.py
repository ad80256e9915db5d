"""``deltactl demo --loop``: what it refuses, and how it tells what came of it. The loop itself runs
where there is a vLLM: tests/demo/real."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deltactl.cli.app import app
from deltactl.core.errors import Malformed
from deltactl.demo.loop import run as module
from deltactl.demo.loop.equality import Equality
from deltactl.demo.loop.run import Report, StepRow, Wish
from deltactl.server.audit import Audited

Captured = pytest.CaptureFixture[str]


def run(*args: object, status: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        app(list(map(str, args)))
    assert end.value.code == status


@pytest.mark.parametrize("option", ["--bucket", "--seed", "--vllm", "--plot"])
def test_options_of_the_loop_are_refused_without_it(option: str, capfd: Captured) -> None:
    run("demo", option, 1, status=2)
    assert f"{option} is for --loop" in capfd.readouterr().err


def test_without_vllm_it_says_what_to_install(tmp_path: Path, capfd: Captured) -> None:
    run("demo", "--loop", "--vllm", tmp_path / "vllm", "--json", status=1)
    out, err = capfd.readouterr()
    assert "pip install vllm deltactl" in json.loads(out)["error"]["hint"]
    assert "the loop needs a vLLM server" in err


def test_a_bucket_that_holds_something_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    monkeypatch.setattr(module.vllm_process, "find_vllm", lambda given: Path("vllm"))
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket/theirs").write_text("kept")
    run("demo", "--loop", "--bucket", tmp_path / "bucket", status=11)
    assert "the bucket is not empty" in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "bucket").iterdir()] == ["theirs"]


def row(step: int, reward: float) -> StepRow:
    return StepRow(
        step, 1.5 * step, step - 1, step - 2 if step > 1 else None, reward, 1, 0.1, 0.0, 0.5
    )


AUDIT = Audited("http://127.0.0.1:1", 4, "s", 25)


def made(**other: Any) -> Report:
    """What a loop of four steps may have come to."""
    equality = Equality(4, "s", "s", "s", 312064, (), AUDIT, (), 19)
    link = {"total_elements": 100, "seconds": 0.1, "blocked_seconds": 0.01, "state": "s"}
    links = [{"step": 0, "kind": "anchor", "bytes": 9000, "changed_elements": None} | link]
    links += [
        {"step": n, "kind": "delta", "bytes": 1000, "changed_elements": 10 * n} | link
        for n in range(1, 5)
    ]
    applied = [
        {
            "step": n,
            "deltas": 1,
            "elements": 10 * n,
            "seconds_staging": 0.2,
            "seconds_paused": 0.1 * n if n else None,
        }
        for n in (0, 2, 4)
    ]
    report = Report(
        bucket="b",
        steps=4,
        rows=[row(n, 0.2 * n) for n in range(1, 5)],
        links=links,
        applied=applied,
        rollouts={0: 256, 2: 128},
        sessions={"open": 0, "most": 128, "begun": 384, "done": 384},
        equality=equality,
    )
    return replace(report, **other)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> list[Wish]:
    """The loop's place is taken by one that has come to ``made()`` already."""
    wishes: list[Wish] = []

    def stand_in(wish: Wish, heard: Any, started: Any) -> Report:
        wishes.append(wish)
        started("the loop")
        report = made()
        for line in report.rows:
            heard(line)
        return report

    monkeypatch.setattr(module, "run", stand_in)
    return wishes


def test_steps_are_told_while_it_runs_and_the_outcome_after(
    loop: list[Wish], capfd: Captured
) -> None:
    run("demo", "--loop")
    out, err = capfd.readouterr()
    assert (loop[0].steps, loop[0].seed, loop[0].bucket, loop[0].vllm) == (40, 0, None, None)
    table = [line.split() for line in err.splitlines()]
    assert table[1] == ["time", "step", "published", "served", "staleness", "reward"]
    assert table[2] == ["1.5", "s", "1", "0", "-", "1", "0.200"]
    assert table[5] == ["6.0", "s", "4", "3", "2", "1", "0.800"]
    lines = out.splitlines()
    assert lines[0] == "trained 4 steps from 384 rollouts"
    assert "reward       0.200 at first, 0.800 at last" in lines
    assert "published    5 steps, deltas of 1.00 kB" in lines
    assert "sparsity     60.00% to 90.00%" in lines
    assert "served       3 steps by the server" in lines
    assert lines[-1] == (
        "ok: step 4: trainer, bucket and server hold the same 312,064 elements, bit for bit"
    )


def test_json_has_all_of_it(loop: list[Wish], tmp_path: Path, capfd: Captured) -> None:
    kept = tmp_path / "kept"
    run("demo", kept, "--loop", "--steps", 4, "--seed", 3, "--bucket", "s3://b/p", "--json")
    found = json.loads(capfd.readouterr().out)
    assert (loop[0].steps, loop[0].seed, loop[0].bucket) == (4, 3, "s3://b/p")
    assert loop[0].place == kept
    assert (found["ok"], found["rises"], found["directory"]) == (True, True, str(kept))
    assert found["rollouts"] == [{"step": 0, "count": 256}, {"step": 2, "count": 128}]
    assert found["rows"][0]["served"] is None
    assert found["equality"]["audit"]["differing"] == []
    assert [link["step"] for link in found["links"]] == [0, 1, 2, 3, 4]


def test_quiet_says_nothing(loop: list[Wish], capfd: Captured) -> None:
    run("demo", "--loop", "--quiet")
    assert capfd.readouterr() == ("", "")


WORSE: dict[str, tuple[dict[str, Any], str]] = {
    "server": ({"audit": replace(AUDIT, state="t")}, "the server is not the trainer's weights"),
    "pulled step": ({"pulled": "t"}, "the pulled step is not the trainer's weights"),
    "pulled": ({"unlike_pulled": ("lm_head.weight",)}, "the pulled tensor's bits"),
    "served": ({"unlike_served": ("lm_head.weight",)}, "by vLLM's checksum"),
    "audit": ({"audit": replace(AUDIT, differing=("a.weight",))}, "by the engine's audit"),
    "error": ({"audit": replace(AUDIT, error=Malformed("it is torn"))}, "error: it is torn"),
    "step": ({"audit": replace(AUDIT, step=3)}, "serves another step; expected 4, found 3"),
}


@pytest.mark.parametrize("name", WORSE)
def test_weights_that_differ_are_told_and_the_status_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: Captured, name: str
) -> None:
    change, said = WORSE[name]
    report = made()
    assert report.equality is not None
    report = replace(report, equality=replace(report.equality, **change))
    monkeypatch.setattr(module, "run", lambda *args: report)
    run("demo", "--loop", status=3)
    out, err = capfd.readouterr()
    assert said in err
    assert "ok:" not in out


def test_a_reward_that_did_not_rise_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    report = made(rows=[row(n, 0.3) for n in range(1, 5)])
    monkeypatch.setattr(module, "run", lambda *args: report)
    run("demo", "--loop")
    assert "the mean reward did not rise: 0.300 at first, 0.300 at last" in capfd.readouterr().err


def test_the_picture_is_drawn(loop: list[Wish], tmp_path: Path, capfd: Captured) -> None:
    pytest.importorskip("matplotlib")
    run("demo", "--loop", "--plot", tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert f"drew {tmp_path / 'reward.png'}" in capfd.readouterr().out


def test_a_picture_without_matplotlib_is_refused_at_once(
    loop: list[Wish], monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    monkeypatch.setattr("deltactl.demo.loop.plot.find_spec", lambda name: None)
    run("demo", "--loop", "--plot", "reward.png", status=1)
    assert "pip install 'deltactl[plot]'" in capfd.readouterr().err
    assert loop == []
