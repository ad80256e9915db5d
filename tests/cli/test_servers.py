"""``apply``, ``verify`` and ``doctor`` with ``--server``, in each mode."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deltactl.cli.interface import exits
from deltactl.cli.interface.manual import Manual
from tests.cli.conftest import COMMAND, Checkpoints, Cli
from tests.cli.test_help import VERBS
from tests.support.checkpoints import flip_bit
from tests.support.vllm_standin import StandIn

Start = Callable[..., StandIn]
SECRET = "sk-hunter2Zq"


@pytest.fixture
def start(tmp_path: Path, checkpoints: Checkpoints) -> Iterator[Start]:
    """Start a stand-in on the first step."""
    with ExitStack() as stack:
        count = iter(range(100))

        def started(**options: Any) -> StandIn:
            scratch = tmp_path / f"server_{next(count)}"
            scratch.mkdir()
            return stack.enter_context(StandIn(checkpoints.base, scratch, **options))

        yield started


def keys_of(verb: str, key: str) -> set[str]:
    """The words of a key's line in a manual, among them the names of what is in it."""
    manual: Manual = VERBS[verb].manual
    return set(manual.keys[key].replace(",", " ").replace("(", " ").replace(")", " ").split())


def test_apply_json(cli: Cli, bucket: Path, start: Start) -> None:
    server = start()
    ran = cli("apply", f"{bucket}@3", "--server", server.url, "--json")
    assert (ran.code, ran.stderr) == (0, "")
    document = ran.json
    (row,) = document.pop("replicas")
    assert document == {"step": 3, "state": server.live, "newer": [], "dry_run": False}
    for key in ("seconds_staging", "seconds_paused"):
        assert row.pop(key) > 0
    assert row.pop("bytes_fetched") > 0
    assert row == {
        "url": server.url, "ok": True, "step_before": 1, "step_after": 3, "state": server.live,
        "how": "deltas", "deltas": 2, "elements": 60, "reloaded": [], "paused": False,
        "notes": [], "error": None,
    }  # fmt: skip
    assert row.keys() <= keys_of("apply", "replicas")


def test_apply_human_and_the_second_time(cli: Cli, bucket: Path, start: Start) -> None:
    server = start()
    ran = cli("apply", f"{bucket}@3", "--server", server.url)
    assert (ran.code, ran.stderr) == (0, "")
    assert ran.stdout.startswith(f"{server.url}  step 1 to 3: 2 deltas, 60 elements, staged in ")
    assert ", paused " in ran.stdout
    ran = cli("apply", f"{bucket}@3", "--server", server.url)
    assert ran.stdout == f"{server.url}  on step 3 already: nothing to do\n"
    ran = cli("apply", f"{bucket}@2", "--server", server.url)
    assert ran.stdout.startswith(f"{server.url}  step 3 to 2: every tensor, 3,104 elements")


def test_apply_quiet(cli: Cli, bucket: Path, start: Start) -> None:
    ran = cli("apply", f"{bucket}@3", "--server", start().url, "-q")
    assert (ran.code, ran.out, ran.err) == (0, b"", b"")


def test_apply_to_the_tip(cli: Cli, bucket: Path, start: Start) -> None:
    server = start()
    assert cli("apply", bucket, "--server", server.url, "--json").json["step"] == 3


def test_a_damaged_tip_is_told_and_takes_nobody_back(
    cli: Cli, checkpoints: Checkpoints, start: Start, tmp_path: Path
) -> None:
    bucket, server = tmp_path / "chain", start()
    for checkpoint in checkpoints.steps:
        assert cli("push", checkpoint, bucket, "--anchor-every", 0).code == 0
    assert cli("apply", f"{bucket}@3", "--server", server.url).code == 0
    flip_bit(bucket / "deltas/step_000003.safetensors", 60)
    ran = cli("apply", bucket, "--server", server.url)
    assert ran.code == exits.CONFLICT
    assert "newer steps cannot be rebuilt: 3" in ran.stderr
    assert "newer step than the chain can give" in ran.stderr
    assert cli("apply", f"{bucket}@2", "--server", server.url).code == 0
    ran = cli("apply", bucket, "--server", server.url, "--json")
    assert (ran.code, ran.json["newer"]) == (0, [3])


def test_apply_a_delta(cli: Cli, delta: Path, start: Start) -> None:
    server = start()
    ran = cli("apply", delta, "--server", server.url, "--json")
    assert (ran.code, ran.json["replicas"][0]["step_after"]) == (0, 2)


@pytest.mark.parametrize("flag", ["-n", "--dry-run"])
def test_apply_dry(flag: str, cli: Cli, bucket: Path, start: Start) -> None:
    server = start()
    before = server.live
    ran = cli("apply", f"{bucket}@3", "--server", server.url, flag)
    assert ran.code == 0
    assert ran.stdout.startswith(f"{server.url}  step 1 to 3: would load 2 deltas, ")
    document = cli("apply", f"{bucket}@3", "--server", server.url, flag, "--json").json
    assert document["dry_run"] is True
    assert document["replicas"][0]["how"] == "deltas"
    assert (server.live, server.vllm.label) == (before, "default")
    changing = {"/pause", "/resume", "rpc:deltactl_stage", "/update_weight_version"}
    assert not changing & set(server.requests)
    cli("apply", f"{bucket}@3", "--server", server.url)
    ran = cli("apply", f"{bucket}@3", "--server", server.url, flag)
    assert "nothing to do" in ran.stdout


@pytest.mark.parametrize("mode", ["human", "json", "quiet"])
def test_some_fail(mode: str, cli: Cli, bucket: Path, start: Start) -> None:
    servers = [start(), start(), start()]
    servers[1].kill()
    urls = [word for server in servers for word in ("--server", server.url)]
    flags = {"human": [], "json": ["--json"], "quiet": ["-q"]}[mode]
    ran = cli("apply", f"{bucket}@3", *urls, *flags)
    assert ran.code == 5
    assert f"error: {servers[1].url}: no connection to the server" in ran.stderr
    assert f"hint: deltactl doctor --server {servers[1].url}" in ran.stderr
    if mode == "human":
        assert len(ran.stdout.splitlines()) == 3
        assert f"{servers[1].url}  failed" in ran.stdout
    elif mode == "json":
        rows = ran.json["replicas"]
        assert [row["ok"] for row in rows] == [True, False, True]
        assert rows[1]["error"]["exit_code"] == 5
        assert rows[1]["step_after"] is None
    else:
        assert ran.stdout == ""


def test_exit_codes(cli: Cli, bucket: Path, delta: Path, start: Start) -> None:
    """Theirs where all that failed did so in the same way; else 1."""
    dead, other, sound = start(), start(), start()
    dead.kill()
    assert cli("apply", f"{bucket}@3", "--server", other.url).code == 0
    assert cli("apply", delta, "--server", other.url).code == 11
    words = ("--server", dead.url, "--server", other.url, "--server", sound.url)
    ran = cli("apply", delta, *words, "--json")
    assert ran.code == 1
    codes = [row["error"] and row["error"]["exit_code"] for row in ran.json["replicas"]]
    assert codes == [5, 11, None]
    assert cli("apply", f"{bucket}@9", "--server", sound.url).code == 10


def test_a_failure_says_which_step_is_served(cli: Cli, bucket: Path, start: Start) -> None:
    server = start()
    server.vllm.workers.write_fails = True
    ran = cli("apply", f"{bucket}@3", "--server", server.url)
    assert ran.code == 1
    assert ran.stdout == f"{server.url}  failed, on step 1, serving\n"


def test_reload(cli: Cli, bucket: Path, start: Start, tmp_path: Path) -> None:
    server = start(plugin=False)
    refused = cli("apply", f"{bucket}@3", "--server", server.url)
    assert refused.code == 1
    assert "--via reload" in refused.stderr
    words = ("--via", "reload", "--reload-dir", tmp_path / "served")
    ran = cli("apply", f"{bucket}@3", "--server", server.url, *words)
    assert (ran.code, ran.stderr) == (0, "")
    assert ran.stdout.startswith(f"{server.url}  unknown weights to 3: a reload, paused ")
    ran = cli("apply", f"{bucket}@2", "--server", server.url, *words, "--json")
    assert (ran.json["replicas"][0]["how"], ran.json["step"]) == ("reload", 2)


NONSENSE = [
    ("apply", "b@3", "base", "--server", "http://a"),
    ("apply", "b@3", "--server", "http://a", "-o", "out"),
    ("apply", "b@3", "--server", "http://a", "--in-place"),
    ("apply", "b@3", "--server", "a:8000"),
    ("apply", "b@3", "--server", "http://a", "--server", "http://a/"),
    ("apply", "b@3", "--server", "http://a", "--via", "reload"),
    ("apply", "b@3", "--server", "http://a", "--reload-dir", "d"),
    ("apply", "b@3", "--server", "http://a", "--via", "reload", "--reload-dir", "d", "-n"),
    ("apply", "b@3", "--server", "http://a", "--pause", "never"),
    ("apply", "b@3", "--server", "http://a", "--timeout", "0"),
    ("apply", "-", "--server", "http://a"),
    ("apply", "d.safetensors", "--server", "http://a", "--via", "reload", "--reload-dir", "d"),
    ("apply", "d", "b", "-o", "out", "--dry-run"),
    ("apply", "d", "b", "-o", "out", "--repair"),
    ("apply", "d", "-o", "out"),
    ("verify", "b", "--server", "http://a", "--against", "c"),
    ("verify", "d.safetensors", "--server", "http://a"),
    ("verify", "b@3", "--step", "2", "--server", "http://a"),
    ("doctor",),
    ("doctor", "--server", "a"),
]


@pytest.mark.parametrize("flag", [(), ("--json",), ("-q",)], ids=["human", "json", "quiet"])
@pytest.mark.parametrize("words", NONSENSE, ids=" ".join)
def test_what_makes_no_sense(words: tuple[str, ...], flag: tuple[str, ...], cli: Cli) -> None:
    ran = cli(*words, *flag)
    assert ran.code == 2
    assert ran.stderr.startswith("error: ")
    assert "hint: " in ran.stderr


# Ctrl-C.


def interrupt(server: StandIn, *args: object, again: bool = False) -> tuple[int, str, str]:
    """Run a command, press Ctrl-C where the server meets its fault, let it go on."""
    child = subprocess.Popen(
        [*COMMAND, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stderr is not None
    try:
        while not server.stopped.wait(0.01):
            assert child.poll() is None
        child.send_signal(signal.SIGINT)
        first = child.stderr.readline()
        if again:
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=60)
        else:
            server.release()
            out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert "Traceback" not in err
    return child.returncode, out, first + err


HALF_WAY = [
    "rpc:deltactl_identify", "rpc:deltactl_stage", "rpc:deltactl_seal", "/pause",
    "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume",
]  # fmt: skip


@pytest.mark.parametrize("route", HALF_WAY)
@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_brings_the_server_to_rest(
    route: str, when: str, bucket: Path, start: Start, cli: Cli
) -> None:
    server = start()
    old = server.live
    server.fail(route, when=when, how="late")
    code, out, err = interrupt(server, "apply", f"{bucket}@3", "--server", server.url)
    assert code == 130
    assert "bringing the servers to rest" in err
    vllm = server.vllm
    assert (vllm.paused, vllm.session, vllm.workers.update) == (False, False, None)
    written = route in HALF_WAY[5:]
    assert (server.live != old) is written
    assert ("interrupted before the weights were written" in err) is not written
    assert out.startswith(f"{server.url}  {'step 1 to 3' if written else 'failed'}")
    assert ", serving\n" in out or written
    assert cli("apply", f"{bucket}@3", "--server", server.url).code == 0


def test_a_second_ctrl_c_leaves_at_once(bucket: Path, start: Start, cli: Cli) -> None:
    server = start()
    server.fail("/start_weight_update", how="late")
    code, _, err = interrupt(server, "apply", f"{bucket}@3", "--server", server.url, again=True)
    assert code == 130
    assert "perhaps with some of them paused" in err
    assert server.vllm.paused
    server.release()
    assert cli("apply", f"{bucket}@3", "--server", server.url).code == 0
    assert not server.vllm.paused


# verify and doctor.


@pytest.mark.parametrize("mode", ["human", "json", "quiet"])
def test_verify(mode: str, cli: Cli, bucket: Path, start: Start) -> None:
    sound, wrong = start(), start()
    flags = {"human": [], "json": ["--json"], "quiet": ["-q"]}[mode]
    ran = cli("verify", bucket, "--server", sound.url, *flags)
    assert (ran.code, ran.stderr) == (0, "")
    if mode == "human":
        assert ran.stdout == f"{sound.url}  step 1: OK, 4 tensors compared\n"
    if mode == "quiet":
        assert ran.stdout == ""
    if mode == "json":
        (row,) = ran.json["replicas"]
        assert (ran.json["ok"], row["checked"], row["differing"]) == (True, 4, [])
        assert row.keys() <= keys_of("verify", "replicas")
    wrong.vllm.workers.tensors["model.norm.weight"].bits[3] ^= 1
    ran = cli("verify", f"{bucket}@1", "--server", sound.url, "--server", wrong.url, *flags)
    assert ran.code == 3
    assert "tensor 'model.norm.weight': the live weights are not what step 1 has" in ran.stderr
    assert f"hint: deltactl apply {bucket}@1 --server {wrong.url}\n" in ran.stderr
    assert cli("verify", bucket, "--step", 2, "--server", sound.url, *flags).code == 11


def test_verify_tells_of_a_damaged_tip(
    cli: Cli, checkpoints: Checkpoints, start: Start, tmp_path: Path
) -> None:
    bucket, server = tmp_path / "chain", start()
    for checkpoint in checkpoints.steps:
        assert cli("push", checkpoint, bucket, "--anchor-every", 0).code == 0
    assert cli("apply", f"{bucket}@2", "--server", server.url).code == 0
    assert cli("verify", bucket, "--server", server.url, "--json").json["newer"] == []
    flip_bit(bucket / "deltas/step_000003.safetensors", 60)
    warning = f"warning: newer steps cannot be rebuilt: 3; see deltactl verify {bucket}\n"
    ran = cli("verify", bucket, "--server", server.url)
    assert (ran.code, ran.stderr) == (0, warning)
    ran = cli("verify", bucket, "--server", server.url, "--json")
    assert (ran.code, ran.json["ok"], ran.json["newer"]) == (0, True, [3])
    ran = cli("verify", f"{bucket}@2", "--server", server.url)
    assert (ran.code, ran.stderr) == (0, "")


def test_verify_takes_no_server_back_from_a_damaged_tip(
    cli: Cli, checkpoints: Checkpoints, start: Start, tmp_path: Path
) -> None:
    bucket, server = tmp_path / "chain", start()
    for checkpoint in checkpoints.steps:
        assert cli("push", checkpoint, bucket, "--anchor-every", 0).code == 0
    assert cli("apply", f"{bucket}@3", "--server", server.url).code == 0
    flip_bit(bucket / "deltas/step_000003.safetensors", 60)
    ran = cli("verify", bucket, "--server", server.url)
    assert ran.code == exits.CONFLICT
    assert "newer steps cannot be rebuilt: 3" in ran.stderr
    assert f"hint: deltactl verify {bucket}\n" in ran.stderr
    assert "deltactl apply" not in ran.stderr


def test_verify_says_what_it_could_not_look_at(cli: Cli, bucket: Path, start: Start) -> None:
    server = start()
    server.vllm.workers.unaudited = ["model.norm.weight"]
    ran = cli("verify", bucket, "--server", server.url)
    assert ran.code == 3
    some = "OK, 3 of 4 tensors compared, 1 not checked"
    assert ran.stdout == f"{server.url}  step 1: {some}\n"
    name = "'model.norm.weight'"
    what = f"{server.url}: 1 of 4 tensors could not be checked: {name}"
    assert ran.stderr == f"warning: unproven: {what}\n"
    (row,) = cli("verify", bucket, "--server", server.url, "--json").json["replicas"]
    assert (row["tensors"], row["checked"], row["unaudited"]) == (4, 3, ["model.norm.weight"])
    assert cli("verify", bucket, "--server", server.url, "--accept-unproven").code == 0


def test_verify_says_that_a_server_is_paused(cli: Cli, bucket: Path, start: Start) -> None:
    server = start()
    server.vllm.paused = True
    ran = cli("verify", bucket, "--server", server.url)
    assert (ran.code, ran.stderr) == (0, "")
    assert ran.stdout.endswith("OK, 4 tensors compared; paused\n")
    assert cli("verify", bucket, "--server", server.url, "--json").json["replicas"][0]["paused"]


@pytest.mark.parametrize("mode", ["human", "json", "quiet"])
def test_doctor(mode: str, cli: Cli, start: Start) -> None:
    sound, bare = start(), start(dev=False)
    flags = {"human": [], "json": ["--json"], "quiet": ["-q"]}[mode]
    ran = cli("doctor", "--server", sound.url, *flags)
    assert (ran.code, ran.stderr) == (0, "")
    if mode == "human":
        assert ran.stdout.startswith(f"{sound.url}\n  ok     answers, vLLM 0.32.0\n")
        assert "  warn   whoever reaches this port can pause the server" in ran.stdout
    if mode == "quiet":
        assert ran.stdout == ""
    ran = cli("doctor", "--server", sound.url, "--server", bare.url, *flags)
    assert ran.code == 1
    if mode == "json":
        assert [row["ok"] for row in ran.json["servers"]] == [True, False]
        finding = ran.json["servers"][1]["findings"][-1]
        assert (finding["level"], finding["check"]) == ("error", "routes")
        assert finding.keys() <= keys_of("doctor", "servers[].findings")


@pytest.mark.parametrize("mode", ["human", "json", "quiet"])
def test_doctor_for_a_step(mode: str, cli: Cli, bucket: Path, start: Start) -> None:
    sound, other = start(), start()
    other.vllm.workers.dtype = "float32"
    flags = {"human": [], "json": ["--json"], "quiet": ["-q"]}[mode]
    ran = cli("doctor", f"{bucket}@2", "--server", sound.url, *flags)
    assert (ran.code, ran.stderr) == (0, "")
    if mode == "human":
        assert "  ok     step 2 can be loaded from step 1: 1 delta\n" in ran.stdout
    ran = cli("doctor", bucket, "--server", sound.url, "--server", other.url, *flags)
    assert ran.code == 1
    if mode == "json":
        assert (ran.json["ok"], ran.json["step"], ran.json["newer"]) == (False, 3, [])
        assert [row["ok"] for row in ran.json["servers"]] == [True, False]
        findings = ran.json["servers"][1]["findings"]
        (error,) = [finding for finding in findings if finding["level"] == "error"]
        assert (error["check"], error["hint"]) == ("step", "start vLLM with --dtype bfloat16")
    assert cli("doctor", f"{bucket}@9", "--server", sound.url, *flags).code == 10
    assert cli("doctor", "none", "--server", sound.url, *flags).code == 10
    assert cli("doctor", "d.safetensors", "--server", sound.url, *flags).code == 2


def test_doctor_tells_of_a_damaged_tip(
    cli: Cli, checkpoints: Checkpoints, start: Start, tmp_path: Path
) -> None:
    bucket, server = tmp_path / "chain", start()
    for checkpoint in checkpoints.steps:
        assert cli("push", checkpoint, bucket, "--anchor-every", 0).code == 0
    flip_bit(bucket / "deltas/step_000003.safetensors", 60)
    ran = cli("doctor", bucket, "--server", server.url)
    assert (ran.code, "newer steps cannot be rebuilt: 3" in ran.stderr) == (0, True)
    assert cli("doctor", bucket, "--server", server.url, "--json").json["newer"] == [3]


# Secrets.


@pytest.mark.parametrize("verb", ["apply", "verify", "doctor"])
@pytest.mark.parametrize("mode", [(), ("--json",)])
def test_the_key_is_never_printed(
    verb: str, mode: tuple[str, ...], cli: Cli, bucket: Path, start: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    server = start()
    target = () if verb == "doctor" else (bucket,)
    for status in (None, 401, 500):
        if status is not None:
            server.fail("/version", status=status)
        ran = cli(verb, *target, "--server", server.url, *mode)
        assert SECRET not in ran.stdout + ran.stderr
        assert server.headers["Authorization"] == f"Bearer {SECRET}"
    assert os.environ["VLLM_API_KEY"] == SECRET
