"""``deltactl stats`` of two checkpoints, a delta and chains, in each mode; log, show of TRL's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.conftest import Checkpoints, Cli
from tests.support.checkpoints import flip_bit, read_tensors
from tests.support.trl_writer import DIALECTS, write_chain

ELEMENTS = 3 * 32 * 32 + 32
KEYS = [
    "source",
    "encoding",
    "changed_elements",
    "total_elements",
    "sparsity",
    "sizes",
    "ship",
    "ulp_steps",
    "exponents",
    "modules",
    "layers",
    "tensors",
    "chain",
]


def test_pair_json(cli: Cli, checkpoints: Checkpoints) -> None:
    ran = cli("stats", checkpoints.base, checkpoints.result, "--json")
    assert (ran.code, ran.stderr) == (0, "")
    found = ran.json
    assert list(found) == KEYS
    assert (found["source"], found["encoding"], found["chain"]) == ("pair", None, None)
    diff = cli("diff", checkpoints.base, checkpoints.result, "--json").json
    for key in ("changed_elements", "total_elements", "sparsity"):
        assert found[key] == diff[key]
    assert found["sizes"]["dense"] == diff["checkpoint_bytes"]
    assert found["sizes"]["raw"] == 30 * 6
    assert found["sizes"]["ulp"] == sum(row["bytes"] for row in diff["tensors"])
    rates = [row["bits_per_second"] for row in found["ship"]]
    assert rates == [1e8, 1e9, 1e10]
    assert found["ship"][0]["seconds"]["raw"] == 30 * 6 * 8 / 1e8
    assert found["ulp_steps"]["counted"] == 30
    assert sum(row["elements"] for row in found["exponents"]) == ELEMENTS
    assert sum(row["changed"] for row in found["exponents"]) == 30
    assert [row["name"] for row in found["layers"]] == [
        *(f"model.layers.{n}" for n in range(3)),
        "norm",
    ]
    assert [(row["name"], row["tensors"]) for row in found["modules"]] == [
        ("norm", 1),
        ("weight", 3),
    ]
    assert [row["status"] for row in found["tensors"]] == ["changed"] * 3 + ["unchanged"]


def test_pair_human(cli: Cli, checkpoints: Checkpoints) -> None:
    ran = cli("stats", checkpoints.base, checkpoints.result, "--bandwidth", "0.5Mbit")
    assert (ran.code, ran.stderr) == (0, "")
    assert ran.stdout.startswith(f"changed   30 of {ELEMENTS:,} elements\nsparsity  99.03%\n")
    assert re.search(r"^encoding +size +bytes/changed +smaller +0.5 Mbit/s$", ran.stdout, re.M)
    assert re.search(r"^raw +180 B +6.00 +34.8x +2.9 ms$", ran.stdout, re.M)
    assert re.search(r"^length +up +down +share$", ran.stdout, re.M)
    assert re.search(r"^\d+ of them change the sign$", ran.stdout, re.M)
    assert re.search(r"^model.layers.1 +1 +1,024 +10 +99.02%$", ran.stdout, re.M)
    assert re.search(r"^norm +1 +32 +0 +100.00%$", ran.stdout, re.M)
    titles = ("steps in units", "by exponent", "by kind", "by layer", "most changed tensors")
    assert all(re.search(rf"^{title}", ran.stdout, re.M) for title in titles)


def test_of_equal_checkpoints(cli: Cli, checkpoints: Checkpoints) -> None:
    ran = cli("stats", checkpoints.base, checkpoints.base)
    assert "sparsity  100.00%" in ran.stdout
    assert "most changed" not in ran.stdout
    assert cli("stats", checkpoints.base, checkpoints.base, "--json").json["sparsity"] == 1


def test_delta(cli: Cli, delta: Path) -> None:
    found = cli("stats", delta, "--json").json
    assert list(found) == KEYS
    assert (found["source"], found["encoding"]) == ("delta", "ulp")
    assert (found["changed_elements"], found["total_elements"]) == (30, ELEMENTS)
    assert (found["sizes"]["dense"], found["exponents"]) == (None, None)
    assert found["ulp_steps"]["sign_flips"] is None
    human = cli("stats", delta).stdout
    assert "encoding  ulp" in human
    assert "change the sign" not in human
    assert "dense" not in human
    assert cli("stats", "-", stdin=delta.read_bytes()).stdout == human


def test_torn_delta(cli: Cli, delta: Path) -> None:
    flip_bit(delta, delta.stat().st_size - 1)
    ran = cli("stats", delta, "--json")
    assert (ran.code, ran.json["error"]["file"]) == (3, str(delta))


def test_bucket(cli: Cli, bucket: Path) -> None:
    found = cli("stats", bucket, "--json").json
    assert list(found) == KEYS
    assert (found["source"], found["changed_elements"]) == ("bucket", 60)
    log = cli("log", bucket, "--json").json["links"]
    for row, link in zip(found["chain"]["links"], log, strict=True):
        for key in ("step", "kind", "bytes", "changed_elements", "sparsity", "encoding"):
            assert row[key] == link[key]
    human = cli("stats", bucket).stdout
    assert re.match(r"deltas    2, [\d.]+ kB\nanchors   2, [\d.]+ kB\n", human)
    assert "changed   60 in all deltas" in human
    assert "sparsity  99.03% (99.03% to 99.03%)" in human
    assert re.search(r"^ +2 +delta +[\d.]+ kB +30 +99.03% +[\d.]+$", human, re.M)
    assert re.search(r"^model.layers.0.weight +changed +BF16 .* 20 +99.02% +2$", human, re.M)


@pytest.mark.parametrize("mode", ["", "--json", "-q"])
def test_bucket_with_a_torn_link(mode: str, cli: Cli, bucket: Path) -> None:
    torn = bucket / "deltas" / "step_000002.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    ran = cli("stats", bucket, *([mode] if mode else []))
    assert ran.code == 3
    assert ran.stderr.startswith("error: step 2, deltas/step_000002.safetensors: ")
    assert (ran.stdout == "") is (mode == "-q")
    if mode == "--json":
        assert [row["step"] for row in ran.json["chain"]["problems"]] == [2]


def test_quiet(cli: Cli, checkpoints: Checkpoints, delta: Path, bucket: Path) -> None:
    for targets in ((checkpoints.base, checkpoints.result), (delta,), (bucket,)):
        ran = cli("stats", *targets, "-q")
        assert (ran.code, ran.out, ran.err) == (0, b"", b"")


def test_what_is_not_there(cli: Cli, checkpoints: Checkpoints, tmp_path: Path) -> None:
    base = checkpoints.base
    for targets in ((tmp_path / "none",), (base, tmp_path / "none"), (tmp_path / "x.safetensors",)):
        assert cli("stats", *targets, "--json").json["error"]["exit_code"] == 10
    alone = cli("stats", base)
    assert alone.code == 10
    assert "hint: of two checkpoints: deltactl stats A B" in alone.stderr


def test_misuse(cli: Cli, checkpoints: Checkpoints) -> None:
    assert cli("stats", "a", "b", "c").code == 2
    assert cli("stats").code == 2
    base = checkpoints.base
    for rate in ("0", "-5", "fast", "nan", "inf"):
        assert cli("stats", base, base, "--bandwidth", rate).code == 2


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_trl_wrote(dialect: str, cli: Cli, checkpoints: Checkpoints, tmp_path: Path) -> None:
    bucket = tmp_path / "trl"
    write_chain(bucket, [read_tensors(path) for path in checkpoints.steps], dialect, anchor_every=3)
    lines = cli("log", bucket).stdout.splitlines()
    assert re.match(r" +1  anchor +[\d.]+ kB +- +- +- +-$", lines[1])
    assert re.match(r" +2  delta +[\d.]+ k?B +30 +99.03% +- +-$", lines[2])
    assert lines[-2].endswith("; tip: step 3")
    shown = cli("show", f"{bucket}@2").stdout
    assert f"changed   30 of {ELEMENTS:,}" in re.sub(" {3,}", "   ", shown)
    assert re.search(r"^model.layers.0.weight +sparse +BF16 +- +10 +- +\d+ B$", shown, re.M)
    assert re.search(
        r"^model.norm.weight +F32 +\[32\] +-$", cli("show", f"{bucket}@3").stdout, re.M
    )
    counted = cli("stats", bucket).stdout
    assert "changed   30 in all deltas" in counted
    assert re.search(r"^model.layers.0.weight +changed +BF16 +\[32, 32\] +10 ", counted, re.M)
    alone = cli("stats", bucket / "deltas" / "step_000002.safetensors").stdout
    assert re.search(r"^raw +180 B +6.00 ", alone, re.M)
    assert re.search(r"^gap_delta +120 B +4.00 ", alone, re.M)
    assert re.search(r"^model.layers.0.weight +changed +BF16 +- +10 +-$", alone, re.M)
