"""The golden files: every one is read to the bits it was made of, and written as it was.

Where a reader fails here it is the reader that is wrong: the files are out in the world.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from deltactl.bucket import open_bucket
from deltactl.chain.reading import read_chain
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.checkpoint.state import state_of, tensor_states
from deltactl.codec.golomb import read_leb128
from deltactl.codec.integers import Reader
from deltactl.format.delta import open_delta
from deltactl.ops.apply import apply_delta
from deltactl.ops.pull import pull
from deltactl.ops.stats import stats_delta
from deltactl.ops.verify import verify_bucket, verify_delta
from tests.golden.make import (
    ENCODINGS,
    GOLDEN,
    base,
    class_steps,
    make,
    result,
    steps,
    trl_steps,
)
from tests.support.checkpoints import Spec, read_metadata, read_tensors

EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())
for more in ("expected_classes.json", "expected_parts.json"):
    EXPECTED["chains"] |= json.loads((GOLDEN / more).read_text())["chains"]
BASE, RESULT = GOLDEN / "base.safetensors", GOLDEN / "result.safetensors"
CHAINS = {
    (name, int(step)): states
    for name, chain in EXPECTED["chains"].items()
    for step, states in chain.items()
}
OURS = [key for key in CHAINS if not key[0].startswith("trl")]


def delta(name: str) -> Path:
    return GOLDEN / f"{name}.safetensors"


def described(tensors: dict[str, Spec]) -> dict[str, Any]:
    return {
        name: {"dtype": dtype, "shape": list(shape), "digest": blake3(data).hexdigest()}
        for name, (dtype, shape, data) in tensors.items()
    }


# Reading.


@pytest.mark.parametrize("name", ["base", "result"])
def test_checkpoints_have_the_state_they_had(name: str) -> None:
    with open_checkpoint(delta(name)) as checkpoint:
        states = tensor_states(checkpoint)
        assert state_of(checkpoint) == EXPECTED[name]["state"]
    assert {tensor.name: tensor.digest for tensor in states} == {
        tensor: row["digest"] for tensor, row in EXPECTED[name]["tensors"].items()
    }


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_deltas_lead_to_the_bits_they_led_to(encoding: str, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    report = apply_delta(delta(encoding), BASE, out)
    assert report.state == EXPECTED["result"]["state"]
    assert report.proven
    assert read_tensors(out) == read_tensors(RESULT)
    assert described(read_tensors(out)) == EXPECTED["result"]["tensors"]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_deltas_are_known_when_they_were_applied(encoding: str, tmp_path: Path) -> None:
    report = apply_delta(delta(encoding), RESULT, tmp_path / "out.safetensors")
    assert report.state == EXPECTED["result"]["state"]
    assert read_tensors(tmp_path / "out.safetensors") == read_tensors(RESULT)


@pytest.mark.parametrize("name", [*ENCODINGS, "empty"])
def test_deltas_say_what_they_said(name: str) -> None:
    header = open_delta(delta(name)).header
    assert header.dialect == "deltactl"
    assert header.encoding == ("raw" if name == "empty" else name)
    assert header.base_state == EXPECTED["base"]["state"]
    assert header.result_state == EXPECTED["base" if name == "empty" else "result"]["state"]
    assert verify_delta(delta(name)).ok
    kinds = {record.name: record.kind for record in header.records.values()}
    if name == "empty":
        assert kinds == {}
        return
    assert {kinds.pop(name) for name in list(kinds) if name.startswith("dtype.")} == {"sparse"}
    assert kinds == {
        "added": "added",
        "added.empty": "added",
        "added.scalar": "added",
        "all": "dense" if name.startswith("ulp") else "sparse",
        "odd.idx": "sparse",
        "removed": "removed",
        "removed.empty": "removed",
        "reshaped": "dense",
        "retyped": "dense",
        "scalar": "dense" if name.startswith("ulp") else "sparse",
        'überall \u2603 "quoted"\\': "sparse",
    }


def test_the_empty_delta_changes_nothing(tmp_path: Path) -> None:
    report = apply_delta(delta("empty"), BASE, tmp_path / "out.safetensors")
    assert report.state == EXPECTED["base"]["state"]
    assert report.changed_elements == 0


@pytest.mark.parametrize(("chain", "step"), CHAINS)
def test_every_step_is_pulled_as_it_was(chain: str, step: int, tmp_path: Path) -> None:
    expected = CHAINS[chain, step]
    report = pull(open_bucket(str(GOLDEN / chain)), tmp_path / "out", step=step)
    assert report.state == expected["state"]
    assert report.proven == (not chain.startswith("trl"))
    assert described(read_tensors(tmp_path / "out")) == expected["tensors"]
    if chain == "chain":
        assert (tmp_path / "out/tokenizer/vocab.txt").read_bytes() == b"a\nb\n"


@pytest.mark.parametrize("chain", EXPECTED["chains"])
def test_chains_are_whole(chain: str) -> None:
    report = verify_bucket(open_bucket(str(GOLDEN / chain)), level="rebuild")
    assert report.errors == []
    assert report.links == {"chain": 6, "single": 2, "parts": 5}.get(chain, 3)
    assert report.steps == len(EXPECTED["chains"][chain])
    assert len(report.unproven) == (3 if chain.startswith("trl") else 0)


def test_links_are_what_they_were() -> None:
    links = read_chain(open_bucket(str(GOLDEN / "chain"))).links
    assert [(link.step, link.kind, link.encoding) for link in links] == [
        (1, "anchor", None),
        (2, "delta", "gap_delta"),
        (3, "delta", "raw"),
        (4, "delta", "ulp"),
        (4, "anchor", None),
        (5, "delta", "raw"),
    ]
    for name in ("trl-1", "trl-2"):
        deltas = read_chain(open_bucket(str(GOLDEN / name))).links[1:]
        assert {link.dialect for link in deltas} == {name}


def test_blocks_by_classes_are_of_every_form() -> None:
    """Of all that ulp_ctx can say there is something among the files."""
    forms, shares, lengths = set(), [], set()
    for step in (2, 3):
        path = GOLDEN / f"classes/deltas/step_{step:06d}.safetensors"
        for name, (_, _, data) in read_tensors(path).items():
            if name.endswith(".ulp_ctx"):
                forms.add(data[8])
                shares += shares_of_classes(data[8:]) if data[8] == 1 else []
        steps = stats_delta(open_delta(path)).steps
        assert steps is not None
        lengths |= {row["max"] for row in steps.facts()["bins"] if row["up"] and row["down"]}
    assert forms == {0, 1, 2}
    assert min(shares) < 0.2
    assert max(shares) > 0.5
    assert {1, 2, 4} <= lengths


def shares_of_classes(block: bytes) -> list[float]:
    """What share of each class but the last changes, in a block of form 1."""
    reader = Reader(memoryview(block), 1)
    borders = [read_leb128(reader) for _ in range(read_leb128(reader))]
    pairs = [(read_leb128(reader), read_leb128(reader)) for _ in borders]
    return [changes / elements for elements, changes in pairs]


# The files themselves.


def test_expectations_are_of_what_the_files_were_made_of() -> None:
    assert described(base()) == EXPECTED["base"]["tensors"]
    assert described(result()) == EXPECTED["result"]["tensors"]
    chains = {
        "chain": steps(),
        "classes": class_steps(),
        "parts": steps(),
        "trl-1": trl_steps(),
        "trl-2": trl_steps(),
    }
    for name, states in chains.items():
        for step, state in states.items():
            assert described(state) == CHAINS[name, step]["tensors"]


def test_golden_files_are_small() -> None:
    assert sum(path.stat().st_size for path in golden_files(GOLDEN).values()) < 300_000


def test_writers_write_what_they_wrote(tmp_path: Path) -> None:
    make(tmp_path)
    old, new = golden_files(GOLDEN), golden_files(tmp_path)
    assert old.keys() == new.keys()
    for name, path in old.items():
        if path.read_bytes() != new[name].read_bytes():
            # The codec's bytes may be others in another version of it; what they say may not.
            assert read_metadata(path)["encoding"] in ("ulp", "ulp_ctx"), name
            assert without_digests(path) == without_digests(new[name])
    out = tmp_path / "out.safetensors"
    apply_delta(new["ulp.safetensors"], BASE, out)
    assert read_tensors(out) == read_tensors(RESULT)
    for name in ("chain", "classes", "parts"):
        assert verify_bucket(open_bucket(str(tmp_path / name)), level="rebuild").ok


def golden_files(directory: Path) -> dict[str, Path]:
    return {
        path.relative_to(directory).as_posix(): path
        for path in directory.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }


def without_digests(path: Path) -> dict[str, str]:
    digests = ("deltactl.header_digest", "deltactl.payload_digest")
    return {key: value for key, value in read_metadata(path).items() if key not in digests}
