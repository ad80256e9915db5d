"""man/deltactl-format.5 is enough to write a reader from, and its example is that reader."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import zstandard
from safetensors import safe_open

from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.codec import ENCODINGS as KNOWN
from deltactl.codec.base import BLOCK
from deltactl.codec.classes import MOST_CLASSES, SEGMENT
from deltactl.core.dtypes import DTYPES, FLOATS
from deltactl.files.safetensors import MAX_HEADER
from deltactl.format.header import FORMAT_VERSION
from deltactl.ops.diff import diff
from tests.golden.make import ENCODINGS, GOLDEN, trained, weights
from tests.support import checkpoints, page_reader, trl_reader
from tests.support.checkpoints import (
    BITS,
    Spec,
    changed,
    flip_bit,
    random_tensor,
    read_metadata,
    read_tensors,
    write_safetensors,
)
from tests.support.tools import need
from tests.support.trl_reader import apply_trl

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "man/deltactl-format.5"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
for more in ("expected_classes.json", "expected_parts.json"):
    EXPECTED["chains"] |= json.loads((GOLDEN / more).read_text())["chains"]
BASE = read_tensors(GOLDEN / "base.safetensors")
RESULT = read_tensors(GOLDEN / "result.safetensors")

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A delta between two checkpoints in memory."""

    def write(before: dict[str, Spec], after: dict[str, Spec], encoding: str) -> Path:
        a = write_safetensors(tmp_path / "a.safetensors", before)
        b = write_safetensors(tmp_path / "b.safetensors", after)
        with open_checkpoint(a) as base, open_checkpoint(b) as result:
            diff(base, result, tmp_path / "delta", encoding=encoding)
        return tmp_path / "delta"

    return write


def blocks_of(old: np.ndarray, new: np.ndarray, encoding: str) -> bytes:
    """A part of one block, of BF16."""
    at = np.flatnonzero(old != new)
    (block,) = KNOWN[encoding].encode(old, at, old[at], new[at], "BF16")
    return np.array([at.size, len(block)], "<u4").tobytes() + block


# The page.


def example() -> str:
    """The page's program, without roff's escapes."""
    text = PAGE.read_text().split(".SH EXAMPLES")[1]
    code = text.split("\n.nf\n")[1].split("\n.fi\n")[0]
    return code.replace("\\&", "").replace("\\-", "-").replace("\\e", "\\") + "\n"


def test_the_example_is_the_reader() -> None:
    source = Path(page_reader.__file__).read_text()
    begin, end = "# The page's example begins.\n", "\n\n# The page's example ends.\n"
    assert example() == source.split(begin)[1].split(end)[0]


@pytest.mark.parametrize("module", [page_reader, trl_reader, checkpoints])
def test_the_readers_know_nothing_of_our_code(module: ModuleType) -> None:
    source = Path(str(module.__file__)).read_text()
    assert not re.search(r"^\s*(import|from)\s+deltactl", source, re.MULTILINE)


def test_the_example_runs(write: Write) -> None:
    namespace: dict[str, object] = {}
    exec(example(), namespace)
    apply_delta = namespace["apply_delta"]
    assert callable(apply_delta)
    before = {"w": random_tensor("BF16", (300,), seed=1)}
    after = {"w": changed(before["w"], 0.1, seed=2)}
    assert apply_delta(write(before, after, "ulp"), before) == after


def test_the_page_has_the_codes_constants() -> None:
    text = PAGE.read_text().replace("\\-", "-")
    assert f"blocks of {BLOCK:,} elements" in text
    assert f"at most {MAX_HEADER:,} bytes" in text
    assert f'"deltactl format {FORMAT_VERSION}"' in text
    assert page_reader.BLOCK == BLOCK
    assert {code: row.bits for code, row in DTYPES.items()} == page_reader.BITS
    assert f"is {SEGMENT:,} elements of the block" in text
    assert f"a number, at most {MOST_CLASSES - 1}: the borders" in text
    assert page_reader.MANTISSA.keys() == FLOATS.keys()
    for dtype, (exponent, mantissa, *_) in FLOATS.items():
        assert page_reader.MANTISSA[dtype] == mantissa
        assert re.search(rf"^(.*, )?{dtype}(,.*)? +{exponent} +{mantissa}$", text, re.M)
    for dtype in DTYPES:
        assert re.search(rf"\b{dtype}\b", text)
    for encoding in KNOWN:
        assert re.search(rf"^\.SS Encodings? (.* )?{encoding}\b", text, re.M)


def test_the_page_names_every_key() -> None:
    text = PAGE.read_text()
    for path in GOLDEN.rglob("*"):
        if path.suffix == ".safetensors" and "model-" not in path.name:
            for key in read_metadata(path).keys() - {"deltactl.format"}:
                assert key in text
    for index in GOLDEN.rglob("*.index.json"):
        for key in json.loads(index.read_text())["metadata"]:
            assert key in text


def test_the_pages_numbers_are_right() -> None:
    state = page_reader.state_digest({"w": ("BF16", (2, 3), bytes(12))})
    text = PAGE.read_text()
    assert f"\n{state}\n" in text
    assert page_reader.touch_sum(np.array([0]), np.array([0])) == "0" * 16
    mixed = page_reader.touch_sum(np.array([1]), np.array([16256]))
    assert f"mix64(1, 16256) is {mixed}." in text


def test_the_page_has_no_fault() -> None:
    done = subprocess.run([need("mandoc"), "-T", "lint", PAGE], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


# Its reader, on golden files.


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_reader_decodes_golden_deltas(encoding: str) -> None:
    state = page_reader.apply_delta(GOLDEN / f"{encoding}.safetensors", BASE)
    assert state == RESULT
    assert page_reader.state_digest(state) == EXPECTED["result"]["state"]


def test_the_reader_decodes_the_empty_delta() -> None:
    assert page_reader.apply_delta(GOLDEN / "empty.safetensors", BASE) == BASE


@pytest.mark.parametrize("name", ["chain", "single", "classes", "parts"])
def test_the_reader_replays_golden_chains(name: str) -> None:
    states = page_reader.read_chain(GOLDEN / name)
    assert {str(step): page_reader.state_digest(state) for step, state in states.items()} == {
        step: expected["state"] for step, expected in EXPECTED["chains"][name].items()
    }


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_reader_wants_the_right_base(encoding: str) -> None:
    with pytest.raises(ValueError, match="another base"):
        page_reader.apply_delta(GOLDEN / f"{encoding}.safetensors", RESULT)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_reader_sees_flipped_bits(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "delta"
    good = (GOLDEN / f"{encoding}.safetensors").read_bytes()
    for offset in [*range(0, len(good), 199), len(good) - 1]:
        path.write_bytes(good)
        flip_bit(path, offset, offset % 8)
        with pytest.raises(Exception):  # noqa: B017, PT011 - Python's own stand for malformed input
            page_reader.apply_delta(path, BASE)


@pytest.mark.parametrize("path", sorted(GOLDEN.rglob("*.safetensors")), ids=lambda path: path.stem)
def test_the_library_lists_every_golden_file(path: Path) -> None:
    """Nothing of ours is needed to see what a link holds."""
    with safe_open(path, framework="np") as file:
        assert set(file.keys()) == read_tensors(path).keys()
        assert file.metadata() == read_metadata(path)


# Its reader, on what is made now.


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_reader_finds_changes_in_every_block(encoding: str, write: Write) -> None:
    size = 3 * BLOCK + 7
    old, new = bytearray(size), bytearray(size)
    for at in (0, BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 70_000, 3 * BLOCK - 1, 3 * BLOCK, size - 1):
        new[at] = 0xFF
    before, after = ({"w": ("F8_E4M3", (size,), bytes(data))} for data in (old, new))
    assert page_reader.apply_delta(write(before, after, encoding), before) == after


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("share", [0.001, 0.5, 1.0])
def test_the_reader_agrees_on_every_dtype(encoding: str, share: float, write: Write) -> None:
    before = {dtype: random_tensor(dtype, (640,), seed=n) for n, dtype in enumerate(BITS)}
    after = {name: changed(spec, share, seed=7) for name, spec in before.items()}
    assert page_reader.apply_delta(write(before, after, encoding), before) == after


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("far", [0, 9])
def test_the_reader_decodes_classes(dtype: str, far: int, write: Write) -> None:
    """Also where whole segments are silent, and where a block is full of changes."""
    count = 40 * SEGMENT + 5
    before = {name: weights(dtype, count) for name in ("some", "silent", "most")}
    _, shape, data = before["some"]
    width, some = len(data) // count, trained(before["some"], 1, far)
    begin, end = 2 * SEGMENT * width, 9 * SEGMENT * width
    all_up = np.frombuffer(data, f"<u{width}") + 1
    all_up[::7] -= 1
    after = {
        "some": some,
        "silent": (dtype, shape, data[:begin] + some[2][begin:end] + data[end:]),
        "most": (dtype, shape, all_up.astype(f"<u{width}").tobytes()),
    }
    path = write(before, after, "ulp_ctx")
    assert page_reader.apply_delta(path, before) == after
    forms = {name: data[8] for name, (_, _, data) in read_tensors(path).items()}
    assert (forms["some.ulp_ctx"], forms["silent.ulp_ctx"]) == (1, 2)


@pytest.mark.parametrize("encoding", ["ulp", "ulp_ctx"])
def test_hostile_blocks_are_refused_with_nothing_but_a_value_error(encoding: str) -> None:
    """Every bit of a delta's blocks flipped, as if its digests were made for it."""
    before = {"w": weights("BF16", 3000)}
    data = np.frombuffer(before["w"][2], "<u2")
    row = {"name": "w", "dtype": "BF16"}
    good = blocks_of(data, np.frombuffer(trained(before["w"], 1, 5)[2], "<u2"), encoding)
    for bit in range(64, 8 * len(good)):  # the directory is before these
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        parts = {f"w.{encoding}": ("U8", (len(bad),), bytes(bad))}
        try:
            positions, new = page_reader.ulp(row, parts, data, encoding)
        except (ValueError, zstandard.ZstdError):
            continue
        assert len(positions) == len(new)
        assert np.all((positions >= 0) & (positions < len(data)))


# TRL's readers, on ours.


@pytest.mark.parametrize("encoding", ["raw", "gap_delta"])
@pytest.mark.parametrize("share", [0.001, 0.05, 1.0])
def test_trl_reads_our_deltas(encoding: str, share: float, write: Write) -> None:
    before = {
        "model.embed.weight": random_tensor("BF16", (300, 70), seed=1),
        "model.layer.weight": random_tensor("BF16", (64, 64), seed=2),
        "model.long.weight": random_tensor("BF16", (200_000,), seed=3),
        "model.norm.weight": random_tensor("BF16", (64,), seed=4),
        "model.router.weight": random_tensor("F32", (8, 64), seed=5),
        "scale": random_tensor("F32", (), seed=6),
    }
    after = {name: changed(spec, share, seed=8) for name, spec in before.items()}
    dtype, shape, data = before["model.long.weight"]
    far = data[:-2] + bytes(byte ^ 1 for byte in data[-2:])  # a gap of more than 16 bits
    after["model.long.weight"] = (dtype, shape, far)
    delta = write(before, after, encoding)
    assert apply_trl(delta, before) == after
    assert page_reader.apply_delta(delta, before) == after


@pytest.mark.parametrize("dialect", ["trl-1", "trl-2"])
def test_trl_reads_trl(dialect: str) -> None:
    chain = GOLDEN / dialect
    state = read_tensors(chain / "anchors/step_000001.safetensors")
    for step in (2, 3):
        state = apply_trl(chain / f"deltas/step_{step:06d}.safetensors", state)
        digest = EXPECTED["chains"][dialect][str(step)]["state"]
        assert page_reader.state_digest(state) == digest
