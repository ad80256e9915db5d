"""Statistics: counts that are known beforehand, and agreement with diff and with real files."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltactl.bucket.local import LocalBucket
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.codec import ENCODINGS
from deltactl.codec.base import BLOCK
from deltactl.core.dtypes import FLOATS
from deltactl.core.errors import Malformed, NotFound, UsageError
from deltactl.format.delta import open_delta
from deltactl.ops.diff import DiffReport, diff
from deltactl.ops.stats import Stats, ship_seconds, stats_bucket, stats_delta, stats_pair
from deltactl.ops.stats.histograms import ExponentCounts, StepCounts
from deltactl.ops.stats.names import layer_of, module_of
from tests.support.chains import every_kind, first_state, make_chain, states
from tests.support.checkpoints import (
    Spec,
    flip_bit,
    random_tensor,
    read_metadata,
    read_tensors,
    write_safetensors,
)
from tests.support.trl_writer import write_anchor, write_delta

Tensors = Mapping[str, Spec]


def bf16(*patterns: int) -> Spec:
    return "BF16", (len(patterns),), struct.pack(f"<{len(patterns)}H", *patterns)


def pair(tmp_path: Path, a: Tensors, b: Tensors) -> Stats:
    """Statistics of two checkpoints, which are left at ``a.safetensors`` and ``b.safetensors``."""
    write_safetensors(tmp_path / "a.safetensors", a)
    write_safetensors(tmp_path / "b.safetensors", b)
    with (
        open_checkpoint(tmp_path / "a.safetensors") as before,
        open_checkpoint(tmp_path / "b.safetensors") as after,
    ):
        return stats_pair(before, after)


def make_delta(tmp_path: Path, encoding: str) -> tuple[Path, DiffReport]:
    """The delta between the two checkpoints that ``pair`` left."""
    out = tmp_path / f"{encoding}.delta"
    with (
        open_checkpoint(tmp_path / "a.safetensors") as before,
        open_checkpoint(tmp_path / "b.safetensors") as after,
    ):
        return out, diff(before, after, out, encoding=encoding)


def row(stats: Stats, name: str) -> dict[str, Any]:
    return {tensor.name: tensor.facts() for tensor in stats.tensors}[name]


# What is known beforehand


ONE = 0x3F80  # 1.0, exponent 127
HALF = 0x3F00  # 0.5, exponent 126


def test_steps_flips_and_exponents(tmp_path: Path) -> None:
    before = bf16(ONE, ONE, ONE, ONE, HALF, HALF, 0x0000, 0x8000, HALF, 0x0001)
    after = bf16(ONE, ONE + 1, ONE - 1, ONE + 2, HALF + 3, HALF - 5, 0x8000, 0x0000, 0xBF00, 0x8001)
    stats = pair(tmp_path, {"w": before}, {"w": after})
    assert stats.steps is not None
    assert stats.exponents is not None
    found = stats.steps.facts()
    across = 2 * 0x3F00 + 1  # from 0.5 to -0.5, over both zeros
    bins = {(b["min"], b["max"]): (b["up"], b["down"]) for b in found["bins"]}
    assert 16385 <= across <= 32768
    assert bins == {
        (1, 1): (2, 2),
        (2, 2): (1, 0),
        (3, 4): (1, 1),  # one of them from the smallest number to its negative, 3 steps
        (5, 8): (0, 1),
        (16385, 32768): (0, 1),
    }
    assert (found["counted"], found["sign_flips"]) == (9, 4)
    assert found["one_share"] == 4 / 9
    assert [
        (e["exponent"], e["power"], e["elements"], e["changed"]) for e in stats.exponents.facts()
    ] == [(0, -126, 3, 3), (126, -1, 3, 3), (127, 0, 4, 3)]


def test_totals_of_every_kind(tmp_path: Path) -> None:
    first = first_state()
    stats = pair(tmp_path, first, every_kind(first))
    statuses = {tensor.name: tensor.status for tensor in stats.tensors}
    assert statuses == {
        "model.embed": "changed",
        "model.new": "added",
        "model.norm": "changed",
        "model.nothing": "removed",
        "model.packed": "changed",
        "model.scale": "replaced",
    }
    assert row(stats, "model.embed")["changed"] == 16
    assert row(stats, "model.packed")["changed"] == 5
    assert row(stats, "model.norm")["changed"] == 64
    assert (row(stats, "model.scale")["changed"], row(stats, "model.new")["changed"]) == (2, 3)
    assert (row(stats, "model.nothing")["changed"], row(stats, "model.nothing")["sparsity"]) == (
        0,
        1.0,
    )
    assert stats.changed_elements == 16 + 5 + 64 + 2 + 3
    assert stats.total_elements == 800 + 256 + 64 + 2 + 3
    assert stats.sparsity == 1 - stats.changed_elements / stats.total_elements
    assert stats.sizes["dense"] == 1600 + 256 + 256 + 4 + 24
    assert stats.steps is not None
    assert stats.steps.counted == 16 + 5 + 64


def test_identical_and_empty(tmp_path: Path) -> None:
    stats = pair(tmp_path, first_state(), first_state())
    assert (stats.changed_elements, stats.sparsity) == (0, 1.0)
    assert {tensor.status for tensor in stats.tensors} == {"unchanged"}
    assert {stats.sizes[name] for name in ENCODINGS} == {0}
    document = stats.facts()
    assert document["ulp_steps"] == {
        "counted": 0,
        "one_share": None,
        "sign_flips": 0,
        "bins": [],
    }
    nothing = pair(tmp_path, {}, {})
    assert (nothing.total_elements, nothing.sparsity, nothing.tensors) == (0, 1.0, ())


def test_integers_have_no_steps_and_no_exponents(tmp_path: Path) -> None:
    a = {"i": random_tensor("I32", (50,), 1), "e": random_tensor("F8_E8M0", (9,), 2)}
    stats = pair(tmp_path, a, {**a, "i": random_tensor("I32", (50,), 3)})
    assert stats.changed_elements == 50
    document = stats.facts()
    assert document["ulp_steps"]["counted"] == 0
    assert document["exponents"] == []


# Agreement with diff and with real files


CASES: dict[str, tuple[Tensors, Tensors]] = {
    "every kind": (first_state(), every_kind(first_state())),
    "few": (states(2)[0], states(2)[1]),
    "equal": (first_state(), first_state()),
}


def _large() -> tuple[Tensors, Tensors]:
    """Two blocks, changes at their edges, and a gap that is wider than 65,535."""
    size = BLOCK + 7
    old = np.frombuffer(random_tensor("F8_E4M3", (size,), 5)[2], np.uint8)
    new = old.copy()
    new[[0, 1, 2, 90_000, BLOCK - 1, BLOCK, size - 1]] ^= 1
    return (
        {"large": ("F8_E4M3", (size,), old.tobytes())},
        {"large": ("F8_E4M3", (size,), new.tobytes())},
    )


@pytest.fixture(params=[*CASES, "large"])
def case(request: pytest.FixtureRequest) -> tuple[Tensors, Tensors]:
    return _large() if request.param == "large" else CASES[request.param]


def test_sizes_are_those_of_real_files(case: tuple[Tensors, Tensors], tmp_path: Path) -> None:
    stats = pair(tmp_path, *case)
    for encoding in ENCODINGS:
        out, report = make_delta(tmp_path, encoding)
        assert stats.sizes[encoding] == open_delta(out).payload_bytes
        assert stats.changed_elements == report.changed_elements
        assert stats.total_elements == report.total_elements
        assert stats.sparsity == report.sparsity
        changed = {r.name: r.changed for r in report.records if r.kind != "removed"}
        assert {t.name: t.changed for t in stats.tensors if t.changed} == changed


def test_a_delta_agrees_with_its_pair(case: tuple[Tensors, Tensors], tmp_path: Path) -> None:
    of_pair = pair(tmp_path, *case)
    for encoding in ENCODINGS:
        out, _ = make_delta(tmp_path, encoding)
        delta = open_delta(out)
        stats = stats_delta(delta)
        assert (stats.source, stats.encoding) == ("delta", encoding)
        assert stats.changed_elements == of_pair.changed_elements
        assert stats.total_elements == of_pair.total_elements
        assert stats.sparsity == of_pair.sparsity
        assert {t.name: t for t in stats.tensors} == {
            t.name: t for t in of_pair.tensors if t.status != "unchanged"
        }
        assert stats.sizes["raw"] == of_pair.sizes["raw"]
        gap_delta = None if encoding == "ulp_ctx" else of_pair.sizes["gap_delta"]
        assert stats.sizes["gap_delta"] in (gap_delta, of_pair.sizes["gap_delta"])
        assert stats.sizes[encoding] == delta.payload_bytes
        assert stats.sizes["dense"] is None
        assert stats.exponents is None
        if encoding not in ("ulp", "ulp_ctx"):
            assert stats.steps is None
            assert stats.sizes["ulp"] in (None, 0)


@pytest.mark.parametrize("encoding", ["ulp", "ulp_ctx"])
def test_steps_of_a_delta_are_those_of_its_pair(tmp_path: Path, encoding: str) -> None:
    of_pair = pair(tmp_path, *CASES["few"])
    out, _ = make_delta(tmp_path, encoding)
    stats = stats_delta(open_delta(out))
    assert of_pair.steps is not None
    assert stats.steps is not None
    assert stats.steps.facts() == {**of_pair.steps.facts(), "sign_flips": None}
    assert stats.steps.counted == 16 + 5


def test_a_torn_delta_is_refused(tmp_path: Path) -> None:
    pair(tmp_path, *CASES["few"])
    out, _ = make_delta(tmp_path, "raw")
    flip_bit(out, out.stat().st_size - 1)
    with pytest.raises(Malformed, match="payload"):
        stats_delta(open_delta(out))


@pytest.mark.parametrize("elements", [None, "900000000000000000"])
def test_a_delta_of_unknown_size_ends_soon(elements: str | None, tmp_path: Path) -> None:
    """TRL's give no shapes; what they say of the whole may be missing, or anything."""
    before, after = ({"w": bf16(*range(n, n + 90))} for n in (0, 1))
    path = write_delta(tmp_path, 2, before, after, "raw")
    metadata = read_metadata(path)
    metadata.pop("total_elements")
    if elements is not None:
        metadata["total_elements"] = elements
    write_safetensors(path, read_tensors(path), metadata)
    stats = stats_delta(open_delta(path))
    assert (stats.changed_elements, stats.sizes["raw"]) == (90, 90 * 6)
    assert stats.sizes["gap_delta"] == 90 * 4
    assert stats.total_elements == (None if elements is None else int(elements))
    assert (stats.tensors[0].elements, stats.tensors[0].sparsity) == (None, None)


# A bucket


def test_a_bucket_adds_up(tmp_path: Path) -> None:
    steps = [*states(4), every_kind(states(4)[-1])]
    bucket = make_chain(tmp_path, steps, anchor_every=3)
    stats = stats_bucket(bucket)
    each = [pair(tmp_path, a, b) for a, b in pairwise(steps)]
    document = stats.facts()
    chain = document["chain"]
    assert [(link["step"], link["kind"]) for link in chain["links"]] == [
        (1, "anchor"),
        (2, "delta"),
        (3, "delta"),
        (3, "anchor"),
        (4, "delta"),
        (5, "delta"),
    ]
    deltas = [link for link in chain["links"] if link["kind"] == "delta"]
    assert [link["changed_elements"] for link in deltas] == [s.changed_elements for s in each]
    assert [link["sparsity"] for link in deltas] == [s.sparsity for s in each]
    for link in deltas:
        assert link["bytes_per_changed_element"] == link["bytes"] / link["changed_elements"]
    kept = [link["sparsity"] for link in deltas]
    spread = chain["sparsity"]
    assert spread["mean"] == pytest.approx(sum(kept) / 4)
    assert (spread["min"], spread["max"]) == (min(kept), max(kept))
    assert chain["deltas"] == {"links": 4, "bytes": sum(link["bytes"] for link in deltas)}
    assert chain["anchors"]["links"] == 2
    assert chain["problems"] == []
    assert stats.changed_elements == sum(s.changed_elements for s in each)
    assert stats.total_elements == each[-1].total_elements
    totals = [s.total_elements or 0 for s in each]
    assert stats.sparsity == pytest.approx(1 - stats.changed_elements / sum(totals))
    for name in ("dense", "raw", "ulp"):
        assert stats.sizes[name] == sum(s.sizes[name] or 0 for s in each)
    assert stats.sizes["gap_delta"] is None
    assert (stats.steps, stats.exponents) == (None, None)
    embed, norm, new = (row(stats, f"model.{name}") for name in ("embed", "norm", "new"))
    assert (embed["changed"], embed["changed_steps"], embed["elements"]) == (64, 4, 800)
    assert embed["sparsity"] == 1 - 64 / (4 * 800)
    assert (norm["changed"], norm["changed_steps"]) == (64, 1)
    assert norm["sparsity"] == 1 - 64 / (4 * 64)
    assert (new["changed"], new["changed_steps"], new["sparsity"]) == (3, 1, 0.0)
    assert row(stats, "model.nothing")["status"] == "removed"


def test_a_bucket_of_trls_names_shapes_by_its_anchor(tmp_path: Path) -> None:
    first, second = ({"w": bf16(*range(n, n + 50)), "v": bf16(*range(9))} for n in (0, 1))
    write_anchor(tmp_path, 1, first, "trl-1")
    write_delta(tmp_path, 2, first, second, "trl-1")
    stats = stats_bucket(LocalBucket(tmp_path))
    assert (row(stats, "w")["elements"], row(stats, "w")["sparsity"]) == (50, 0.0)
    assert (row(stats, "v")["changed_steps"], row(stats, "v")["sparsity"]) == (0, 1.0)
    assert (stats.sizes["raw"], stats.sizes["ulp"]) == (300, None)


def test_a_bucket_with_a_torn_link_is_counted_without_it(tmp_path: Path) -> None:
    bucket = make_chain(tmp_path, states(3))
    torn = tmp_path / "bucket" / "deltas" / "step_000002.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    stats = stats_bucket(bucket)
    assert stats.chain is not None
    (problem,) = stats.chain.problems
    assert problem["step"] == 2
    assert stats.changed_elements == 21


def test_no_chain_is_no_pass(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound):
        stats_bucket(LocalBucket(tmp_path / "empty"))


# The parts


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@given(data=st.data())
def test_step_counts_by_the_definition(width: int, data: st.DataObject) -> None:
    low, high = -(1 << (8 * width - 1)), (1 << (8 * width - 1)) - 1
    near = st.integers(max(low, -70), min(high, 70))
    steps = data.draw(st.lists(st.one_of(near, st.integers(low, high), st.just(low))))
    counts = StepCounts()
    half = len(steps) // 2
    other = StepCounts()
    counts.add(np.array(steps[:half], f"<i{width}"))
    other.add(np.array(steps[half:], f"<i{width}"))
    counts.merge(other)
    expected = Counter(((abs(step) - 1).bit_length(), step > 0) for step in steps if step)
    found = counts.facts()
    assert found["counted"] == sum(expected.values())
    for row in found["bins"]:
        n = (row["max"] - 1).bit_length()
        assert row["max"] == 1 << n
        assert row["min"] == ((1 << n - 1) + 1 if n else 1)
        assert (row["up"], row["down"]) == (expected[n, True], expected[n, False])
        assert row["up"] + row["down"] > 0


FIELDS = {
    "BF16": (8, 7), "F16": (5, 10), "F32": (8, 23), "F64": (11, 52),
    "F8_E4M3": (4, 3), "F8_E4M3FNUZ": (4, 3), "F8_E5M2": (5, 2), "F8_E5M2FNUZ": (5, 2),
}  # fmt: skip


@pytest.mark.parametrize("dtype", FIELDS)
def test_exponents_by_the_definition(dtype: str) -> None:
    width, mantissa = FIELDS[dtype]
    size = (1 + width + mantissa) // 8
    bits = np.frombuffer(np.random.default_rng(1).bytes(512 * size), f"<u{size}")
    counts = ExponentCounts()
    counts.add(bits, bits[:100], dtype)
    elements = Counter((int(value) >> mantissa) % (1 << width) for value in bits)
    changed = Counter((int(value) >> mantissa) % (1 << width) for value in bits[:100])
    found = counts.facts()
    assert {row["exponent"]: row["elements"] for row in found} == elements
    assert {row["exponent"]: row["changed"] for row in found if row["changed"]} == changed
    assert all(row["rate"] == row["changed"] / row["elements"] for row in found)


def test_exponents_are_known_for_every_float() -> None:
    assert FIELDS.keys() == FLOATS.keys()


@pytest.mark.parametrize(
    ("name", "layer", "module"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3", "self_attn.q_proj"),
        ("model.layers.31.mlp.experts.7.up_proj.weight", "model.layers.31", "mlp.experts.up_proj"),
        ("model.layers.0.input_layernorm.weight", "model.layers.0", "input_layernorm"),
        ("transformer.h.11.attn.c_proj.bias", "transformer.h.11", "attn.c_proj"),
        ("h.0.mlp.c_proj.weight", "h.0", "mlp.c_proj"),
        ("visual.blocks.2.norm1.weight", "visual.blocks.2", "norm1"),
        ("model.embed_tokens.weight", "embed_tokens", "embed_tokens"),
        ("model.norm.weight", "norm", "norm"),
        ("lm_head.weight", "lm_head", "lm_head"),
        (
            "model.layers.1.mlp.down_proj.weight_scale",
            "model.layers.1",
            "mlp.down_proj.weight_scale",
        ),
        ("weight", "weight", "weight"),
        ("model.weight", "model", "model"),
        ("a", "a", "a"),
        ("", "", ""),
        ("layers.4", "layers.4", "layers.4"),
        ("x.layers.4.weight", "x.layers.4", "weight"),
    ],
)
def test_names(name: str, layer: str, module: str) -> None:
    assert (layer_of(name), module_of(name)) == (layer, module)


def test_groups(tmp_path: Path) -> None:
    names = [f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 2, 10)] + ["model.norm.weight"]
    a = {name: bf16(*range(10)) for name in names}
    stats = pair(tmp_path, a, {**a, names[2]: bf16(*range(1, 11))})
    layers = [(group.name, group.changed, group.sparsity) for group in stats.layers]
    assert layers == [
        ("model.layers.0", 0, 1.0),
        ("model.layers.2", 0, 1.0),
        ("model.layers.10", 10, 0.0),
        ("norm", 0, 1.0),
    ]
    modules = [
        (group.name, group.tensors, group.elements, group.changed) for group in stats.modules
    ]
    assert modules == [("mlp.up_proj", 3, 30, 10), ("norm", 1, 10, 0)]


def test_ship_seconds() -> None:
    assert ship_seconds(1_250_000, 1e7) == 1.0
    assert ship_seconds(0, 1e9) == 0.0
    for rate in (0, -1, float("nan")):
        with pytest.raises(UsageError):
            ship_seconds(1, rate)


def test_ship_has_a_time_for_each_size(tmp_path: Path) -> None:
    stats = pair(tmp_path, *CASES["few"])
    (shipped,) = stats.facts([1e6])["ship"]
    assert shipped["bits_per_second"] == 1e6
    assert shipped["seconds"] == {
        name: size * 8 / 1e6 for name, size in stats.sizes.items() if size
    }
    out, _ = make_delta(tmp_path, "raw")
    assert stats_delta(open_delta(out)).ship()[0]["seconds"]["ulp"] is None
