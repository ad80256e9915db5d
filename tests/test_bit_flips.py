"""Every single bit of a link's headers and every way to cut one short, and many bits of payloads.

All damage has to be found by ``verify`` at the level ``data``, which names the file, raises nothing
and lets nothing pass; and ``pull`` has to give the true state or an error, never something between.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from deltactl.bucket.local import LocalBucket
from deltactl.cli.app import app
from deltactl.ops.push import push
from tests.support.chains import AUX
from tests.support.checkpoints import (
    Spec,
    changed,
    random_tensor,
    write_hf_directory,
    write_safetensors,
)
from tests.support.flips import Damage, damaged, every_bit, pull_all, verify_all

ENCODINGS = ("raw", "gap_delta", "ulp")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "anchors/step_000001/model.safetensors.index.json"
SINGLE = "anchors/step_000001.safetensors"
DELTA = "deltas/step_000002.safetensors"


@dataclass(frozen=True)
class Made:
    """A bucket, and the states of its steps."""

    bucket: Path
    truth: dict[int, dict[str, Spec]]

    def header_size(self, name: str) -> int:
        """All of an index; of a safetensors file what is before the tensors."""
        raw = (self.bucket / name).read_bytes()
        return len(raw) if name == INDEX else 8 + int.from_bytes(raw[:8], "little")

    def size(self, name: str) -> int:
        return (self.bucket / name).stat().st_size


def before() -> dict[str, Spec]:
    return {
        "w": random_tensor("BF16", (32, 24), 1),
        "s": random_tensor("F32", (4,), 2),
        "gone": random_tensor("U8", (3,), 3),
    }


def after(state: dict[str, Spec]) -> dict[str, Spec]:
    """By a sparse tensor, one carried whole, one added and one removed."""
    return {
        "w": changed(state["w"], 0.05, 5),
        "s": random_tensor("BF16", (4,), 6),
        "new": random_tensor("U8", (5,), 7),
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    """An anchor with shards and aux files; for each encoding an anchor of one file and a delta."""
    root = tmp_path_factory.mktemp("flips")
    state = before()
    found = {"directory": Made(root / "directory/bucket", {1: state})}
    aux = {**AUX, "config.json": b"{}"}
    push(
        write_hf_directory(root / "directory/a", state, shards=2, aux=aux),
        LocalBucket(root / "directory/bucket"),
    )
    for encoding in ENCODINGS:
        place = root / encoding
        bucket = LocalBucket(place / "bucket")
        push(write_safetensors(place / "a.safetensors", state), bucket)
        report = push(
            write_safetensors(place / "b.safetensors", after(state)), bucket, encoding=encoding
        )
        assert report.kind == "delta"
        found[encoding] = Made(place / "bucket", {1: state, 2: after(state)})
    return found


def test_the_delta_has_every_kind_of_record(made: dict[str, Made]) -> None:
    for encoding in ENCODINGS:
        raw = (made[encoding].bucket / DELTA).read_bytes()
        header = json.loads(raw[8 : made[encoding].header_size(DELTA)])
        rows = json.loads(header["__metadata__"]["deltactl.tensors"])
        assert {row["kind"] for row in rows} == {"sparse", "dense", "added", "removed"}


HEADERS = [
    *((encoding, DELTA) for encoding in ENCODINGS),
    ("raw", SINGLE),
    ("directory", INDEX),
    *(("directory", f"anchors/step_000001/{shard}") for shard in SHARDS),
]


@pytest.mark.parametrize(("where", "name"), HEADERS)
def test_every_bit_of_a_header(made: dict[str, Made], where: str, name: str) -> None:
    chain = made[where]
    assert verify_all(chain.bucket, name, every_bit(0, chain.header_size(name))) == []


@pytest.mark.parametrize(("where", "name"), HEADERS)
def test_every_length_of_a_header_and_some_of_the_payload(
    made: dict[str, Made], where: str, name: str
) -> None:
    chain = made[where]
    head, size = chain.header_size(name), chain.size(name)
    beyond = Random(1).sample(range(head, size), min(300, size - head))
    lengths = [*range(head), *beyond]
    assert verify_all(chain.bucket, name, [Damage(length) for length in lengths]) == []


@pytest.mark.parametrize(("where", "name"), [row for row in HEADERS if row[1] != INDEX])
def test_bits_of_payloads(made: dict[str, Made], where: str, name: str) -> None:
    chain = made[where]
    bits = every_bit(chain.header_size(name), chain.size(name))
    chosen = Random(2).sample(bits, min(400, len(bits)))
    assert verify_all(chain.bucket, name, chosen) == []


@pytest.mark.parametrize("name", ["config.json", "tokenizer/vocab.txt"])
def test_files_beside_the_weights(made: dict[str, Made], name: str) -> None:
    chain = made["directory"]
    name = f"anchors/step_000001/{name}"
    size = chain.size(name)
    damages = every_bit(0, size) + [Damage(length) for length in range(size)]
    assert verify_all(chain.bucket, name, damages) == []


@pytest.mark.parametrize(
    ("where", "name"),
    [
        *HEADERS,
        ("directory", "anchors/step_000001/config.json"),
        ("directory", "anchors/step_000001/tokenizer/vocab.txt"),
    ],
)
def test_what_is_pulled_is_the_truth_or_nothing(
    made: dict[str, Made], where: str, name: str
) -> None:
    chain = made[where]
    size = chain.size(name)
    bits = Random(3).sample(every_bit(0, size), min(350, 8 * size))
    lengths = [Damage(length) for length in Random(4).sample(range(size), min(50, size))]
    assert pull_all(chain.bucket, name, bits + lengths, chain.truth) == []


@pytest.mark.parametrize("shard", SHARDS)
def test_pull_takes_no_shard_whose_header_is_another(made: dict[str, Made], shard: str) -> None:
    """A shard's metadata says how to load it, and is no part of the state."""
    chain = made["directory"]
    name = f"anchors/step_000001/{shard}"
    truth: dict[int, dict[str, Spec]] = {1: {}}  # no result is right
    assert pull_all(chain.bucket, name, every_bit(0, chain.header_size(name)), truth) == []


@pytest.mark.parametrize(("where", "name"), HEADERS)
def test_the_command_ends_with_3_and_names_the_file(
    made: dict[str, Made], where: str, name: str
) -> None:
    chain = made[where]
    size = chain.size(name)
    bits = Random(5).sample(every_bit(0, size), 6)
    sample = [*bits, Damage(0), Damage(7), Damage(size - 1)]
    for damage in sample:
        with damaged(chain.bucket / name, damage):
            result = CliRunner().invoke(app, ["verify", str(chain.bucket), "--json"])
        assert result.exit_code == 3, (damage, result.output)
        report = json.loads(result.stdout)
        assert not report["ok"]
        assert any(str(row["file"]).endswith(name) for row in report["errors"])
        assert "Traceback" not in result.output
