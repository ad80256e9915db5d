"""Chains that TRL wrote, through every command: read, rebuilt, doubted, refused when damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from deltactl.cli.app import app
from tests.support.checkpoints import (
    Spec,
    changed,
    flip_bit,
    random_tensor,
    read_metadata,
    read_tensors,
    write_hf_directory,
    write_safetensors,
)
from tests.support.trl_reader import apply_trl
from tests.support.trl_writer import (
    DIALECTS,
    Tensors,
    anchor_path,
    as_indices,
    delta_path,
    indices_of,
    rewrite,
    write_anchor,
    write_chain,
)

STEPS = 13
ANCHORS = (1, 10)
DELTAS = [step for step in range(1, STEPS + 1) if step not in ANCHORS]
HEAD = "lm_head.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
ELEMENTS = 300 * 256 + 2 * 32 * 32 + 32


def make_states() -> list[Tensors]:
    """All bf16, as TRL casts what it publishes; HEAD's changes lie so far apart: gaps are U32."""
    state: Tensors = {
        HEAD: random_tensor("BF16", (300, 256), 1),
        Q: random_tensor("BF16", (32, 32), 2),
        "model.layers.1.self_attn.q_proj.weight": random_tensor("BF16", (32, 32), 3),
        "model.norm.weight": random_tensor("BF16", (32,), 4),
    }
    states = [state]
    for step in range(2, STEPS + 1):
        state = {name: _next(name, spec, step) for name, spec in state.items()}
        states.append(state)
    return states


def _next(name: str, spec: Spec, step: int) -> Spec:
    if name == HEAD:
        bits = np.frombuffer(spec[2], "<u2").copy()
        bits[[step, 70_000 + step]] ^= 1
        return (*spec[:2], bits.tobytes())
    return spec if "norm" in name else changed(spec, 0.01, step)


STATES = make_states()


def run(*args: object, status: int = 0) -> dict[str, Any]:
    """Run ``deltactl … --json`` in this process; returns its object. Never is there a traceback."""
    result = CliRunner().invoke(app, [*map(str, args), "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code == status, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def content(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A chain of each dialect. Read only."""
    root = tmp_path_factory.mktemp("trl")
    return {dialect: write_chain(root / dialect, STATES, dialect) for dialect in DIALECTS}


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def chain(chains: dict[str, Path], dialect: str) -> Path:
    """The dialect's chain. Read only."""
    return chains[dialect]


@pytest.fixture
def bucket(chain: Path, tmp_path: Path) -> Path:
    """The dialect's chain, to damage."""
    return Path(shutil.copytree(chain, tmp_path / "bucket"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The checkpoint of step 1, a directory of two shards."""
    return write_hf_directory(tmp_path / "base", STATES[0], shards=2)


def test_the_writer_is_read_by_trls_own_rules(chain: Path, dialect: str) -> None:
    for step in DELTAS:
        path = delta_path(chain, step)
        assert apply_trl(path, STATES[step - 2]) == STATES[step - 1]
    for step in ANCHORS:
        assert read_tensors(anchor_path(chain, step)) == STATES[step - 1]
        assert not delta_path(chain, step).exists()
    if dialect == "gap_delta":
        parts = read_tensors(delta_path(chain, 2))
        assert (parts[f"{HEAD}.idx"][0], parts[f"{Q}.idx"][0]) == ("U32", "U16")


# What works


def test_log(chain: Path, dialect: str) -> None:
    found = run("log", chain)
    links = found["links"]
    assert (found["tip"], found["problems"]) == (STEPS, [])
    assert [link["step"] for link in links] == list(range(1, STEPS + 1))
    assert [link["step"] for link in links if link["kind"] == "anchor"] == list(ANCHORS)
    first, second = links[:2]
    assert (first["changed_elements"], first["sparsity"]) == (None, None)
    assert second["changed_elements"] == 2 + 2 * 10
    assert second["sparsity"] == pytest.approx(1 - 22 / ELEMENTS)
    assert second["dialect"] == ("trl-1" if dialect == "trl-1" else "trl-2")
    assert second["encoding"] == ("raw" if dialect == "trl-1" else dialect)
    assert {link["result_state"] for link in links} == {None}


def test_show(chain: Path) -> None:
    (delta,) = run("show", f"{chain}@12")["links"]
    assert (delta["kind"], delta["step"], delta["total_elements"]) == ("delta", 12, ELEMENTS)
    rows = {row["name"]: row for row in delta["tensors"]}
    assert list(rows) == sorted(rows) == sorted(name for name in STATES[0] if "norm" not in name)
    assert (rows[Q]["changed"], rows[Q]["dtype"], rows[Q]["shape"]) == (10, "BF16", None)
    (anchor,) = run("show", f"{chain}@10")["links"]
    assert [row["digest"] for row in anchor["tensors"]] == [None] * 4
    (alone,) = run("show", delta_path(chain, 12))["links"]
    assert alone["tensors"] == delta["tensors"]


def test_stats(chain: Path) -> None:
    found = run("stats", chain)
    assert found["changed_elements"] == 22 * len(DELTAS)
    assert found["total_elements"] == ELEMENTS
    one = run("stats", delta_path(chain, 12))
    assert one["changed_elements"] == 22


@pytest.mark.parametrize("level", ["links", "data", "rebuild"])
def test_verify_is_doubtful_unless_that_is_accepted(level: str, chain: Path) -> None:
    found = run("verify", chain, "--level", level, status=3)
    assert (found["ok"], found["errors"], found["links"]) == (True, [], STEPS)
    assert [row["step"] for row in found["unproven"]] == list(range(1, STEPS + 1))
    assert {row["what"] for row in found["unproven"]} == {
        "the link carries no digests: what it holds cannot be proven"
    }
    assert run("verify", chain, "--level", level, "--accept-unproven") == found


def test_verify_a_delta_alone(chain: Path) -> None:
    found = run("verify", delta_path(chain, 2), status=3)
    assert (found["ok"], len(found["unproven"])) == (True, 1)
    assert run("verify", delta_path(chain, 2), "--accept-unproven") == found


@pytest.mark.parametrize("step", [1, 9, 10, 11, STEPS])
def test_verify_against(step: int, chain: Path, tmp_path: Path) -> None:
    same = write_safetensors(tmp_path / "same.safetensors", STATES[step - 1])
    words = ("verify", chain, "--step", step, "--accept-unproven", "--against")
    assert run(*words, same)["errors"] == []
    other = write_safetensors(tmp_path / "other.safetensors", STATES[step - 2])
    (first, *_) = run(*words, other, status=3)["errors"]
    assert first["step"] == step
    assert first["tensor"] in STATES[0]
    assert first["what"].startswith("the bits differ, first at element ")


@pytest.mark.parametrize("step", [1, 2, 9, 10, 11, STEPS])
def test_pull_afresh(step: int, chain: Path, tmp_path: Path) -> None:
    found = run("pull", chain, tmp_path / "served", "--step", step)
    assert (found["step"], found["from_step"], found["proven"]) == (step, None, False)
    assert found["links"] == 1 + (step - 1 if step < 10 else step - 10)
    assert read_tensors(tmp_path / "served") == STATES[step - 1]


def test_pull_catches_up_in_place(chain: Path, tmp_path: Path) -> None:
    served = tmp_path / "served"
    run("pull", chain, served, "--step", 5)
    found = run("pull", chain, served, "--step", 8)
    assert (found["from_step"], found["links"], found["written"]) == (5, 3, True)
    assert read_tensors(served) == STATES[7]
    again = run("pull", chain, served, "--step", 8)
    assert (again["written"], again["bytes_fetched"], again["proven"]) == (False, 0, False)
    onward = run("pull", chain, served)
    assert (onward["step"], onward["from_step"], onward["links"]) == (STEPS, None, 4)
    assert read_tensors(served) == STATES[-1]
    back = run("pull", chain, served, "--step", 3)
    assert (back["from_step"], back["links"]) == (None, 3)
    assert read_tensors(served) == STATES[2]


def test_pull_trusts_its_marker_only_for_the_weights_that_it_wrote(
    chain: Path, tmp_path: Path
) -> None:
    served = tmp_path / "served"
    run("pull", chain, served, "--step", 5)
    flip_bit(served / "model.safetensors", (served / "model.safetensors").stat().st_size - 1)
    found = run("pull", chain, served, "--step", 8)
    assert (found["from_step"], found["links"]) == (None, 8)
    assert read_tensors(served) == STATES[7]


@pytest.mark.parametrize("shards", [1, 2])
def test_apply(shards: int, chain: Path, tmp_path: Path) -> None:
    place = write_hf_directory(tmp_path / "model", STATES[0], shards=shards)
    for step in range(2, 10):
        out = tmp_path / f"step_{step}"
        found = run("apply", delta_path(chain, step), place, "-o", out)
        assert (found["proven"], found["changed_elements"], found["step"]) == (False, 22, step)
        place = out
    assert read_tensors(place) == STATES[8]
    run("apply", delta_path(chain, 9), place, "--in-place")
    assert read_tensors(place) == STATES[8]


def test_push_onto_it_is_refused(chain: Path, tmp_path: Path) -> None:
    model = write_hf_directory(tmp_path / "model", STATES[0])
    before = content(chain)
    for words in ((), ("--step", STEPS + 1), ("--step", STEPS), ("--dry-run",)):
        error = run("push", model, chain, *words, status=2)["error"]
        assert error["what"] == "the chain's links carry no digests that a delta could stand on"
        assert error["hint"] == "push into a new bucket"
    assert content(chain) == before


def test_push_of_its_delta_is_refused(chain: Path, tmp_path: Path) -> None:
    delta = tmp_path / "delta.safetensors"
    shutil.copy(delta_path(chain, 2), delta)
    for _ in range(2):
        error = run("push", delta, tmp_path / "new", status=2)["error"]
        assert error["what"] == "only deltas that name their base and result can be pushed"
        rewrite(delta, lambda _, metadata: metadata.pop("sparse", ""))  # as some versions wrote it
    assert not (tmp_path / "new").exists()


def test_a_step_without_changes(bucket: Path, dialect: str, tmp_path: Path) -> None:
    """TRL may publish nothing for it. Of a step that is missing nobody knows whether it was one."""
    delta_path(bucket, 5).unlink()
    if dialect == "trl-1":
        (fault,) = verify_faults(bucket, "links")
        assert (fault["step"], fault["expected"], fault["found"]) == (6, "step 5", "no such link")
        assert run("log", bucket)["tip"] == STEPS
        run("pull", bucket, tmp_path / "served", "--step", 8, status=3)
        assert not (tmp_path / "served").exists()
        return
    found = run("verify", bucket, "--level", "rebuild", status=3)
    assert found["errors"] == []
    (gap,) = [row for row in found["unproven"] if row["expected"] == "step 5"]
    assert (gap["step"], gap["found"]) == (6, "step 4")
    assert run("pull", bucket, tmp_path / "served", "--step", 8)["proven"] is False


def test_an_explicit_empty_delta(bucket: Path, dialect: str, tmp_path: Path) -> None:
    path = delta_path(bucket, STEPS + 1)
    metadata = read_metadata(delta_path(bucket, STEPS))
    metadata |= {"model_version": str(STEPS + 1), "num_changed_params": "0"}
    metadata |= {"total_changed_elements": "0", "sparsity": "1.0"}
    if dialect == "trl-1":
        metadata |= {"prev_model_version": str(STEPS), "changed_params": "[]"}
    write_safetensors(path, {}, metadata)
    assert run("verify", bucket, "--level", "rebuild", "--accept-unproven")["errors"] == []
    run("pull", bucket, tmp_path / "served")
    assert read_tensors(tmp_path / "served") == STATES[-1]
    assert run("stats", path)["sparsity"] == 1


# What is damaged


def verify_faults(bucket: Path, level: str) -> list[dict[str, Any]]:
    found = run("verify", bucket, "--level", level, "--accept-unproven", status=3)
    assert found["ok"] is False
    return list(found["errors"])


Edit = Callable[[Tensors, dict[str, str]], object]


def _suffixes(parts: Tensors) -> tuple[str, str]:
    return (".idx", ".val") if f"{Q}.idx" in parts else (".indices", ".values")


def _indices(change: Callable[[list[int]], object]) -> Edit:
    """Change Q's positions, and write them back as what the dialect has for them."""

    def edit(parts: Tensors, metadata: dict[str, str]) -> None:
        key = Q + _suffixes(parts)[0]
        dtype = parts[key][0]
        gaps = metadata.get("encoding") == "gap_delta"
        found = indices_of(parts[key])
        positions = (np.cumsum(found + 1) - 1 if gaps else found).tolist()
        change(positions)
        if gaps:
            wrapped = np.diff(np.array(positions), prepend=-1) - 1
            parts[key] = as_indices(dtype, wrapped % (1 << 16))
        else:
            parts[key] = as_indices(dtype, positions)

    return edit


def _set_last(value: int) -> Edit:
    return _indices(lambda positions: positions.__setitem__(-1, value))


def _twice(parts: Tensors, metadata: dict[str, str]) -> None:
    """A position twice. Gaps cannot say that: there, one that leads out of the tensor."""
    if metadata.get("encoding") == "gap_delta":
        _set_last(1 << 15)(parts, metadata)
    else:
        _indices(lambda positions: positions.__setitem__(1, positions[0]))(parts, metadata)


def _short_values(parts: Tensors, _: dict[str, str]) -> None:
    key = Q + _suffixes(parts)[1]
    dtype, (count,), data = parts[key]
    parts[key] = (dtype, (count - 1,), data[:-2])


def _value_dtype(parts: Tensors, _: dict[str, str]) -> None:
    key = Q + _suffixes(parts)[1]
    _, shape, data = parts[key]
    parts[key] = ("F16", shape, data)


def _value_shape(parts: Tensors, _: dict[str, str]) -> None:
    key = Q + _suffixes(parts)[1]
    dtype, (count,), data = parts[key]
    parts[key] = (dtype, (1, count), data)


def _index_dtype(parts: Tensors, _: dict[str, str]) -> None:
    key = Q + _suffixes(parts)[0]
    _, shape, data = parts[key]
    parts[key] = ("F32" if len(data) == 4 * shape[0] else "F16", shape, data)


def _no_values(parts: Tensors, _: dict[str, str]) -> None:
    del parts[Q + _suffixes(parts)[1]]


def _no_indices(parts: Tensors, _: dict[str, str]) -> None:
    del parts[Q + _suffixes(parts)[0]]


def _no_tensor(parts: Tensors, _: dict[str, str]) -> None:
    for suffix in _suffixes(parts):
        del parts[Q + suffix]


def _stranger(parts: Tensors, _: dict[str, str]) -> None:
    parts[Q] = ("BF16", (1,), bytes(2))


def _renamed(parts: Tensors, metadata: dict[str, str]) -> None:
    for suffix in _suffixes(parts):
        parts["model.layers.7.weight" + suffix] = parts.pop(Q + suffix)
    if "changed_params" in metadata:
        metadata["changed_params"] = metadata["changed_params"].replace(Q, "model.layers.7.weight")


def _set(key: str, value: str) -> Edit:
    return lambda _, metadata: metadata.__setitem__(key, value)


DAMAGE: dict[str, tuple[Edit, str, str, str | None]] = {
    # how: (edit, the level that finds it, what it says, the tensor it names)
    "out of range": (_set_last(32 * 32), "data", "an index is out of range", Q),
    "far out of range": (_set_last(60_000), "data", "an index is out of range", Q),
    "unsorted": (_indices(list.reverse), "data", "", Q),
    "negative": (_indices(lambda p: p.__setitem__(0, -5)), "data", "", Q),
    "twice": (_twice, "data", "", Q),
    "short values": (_short_values, "data", "the values do not fit the indices", Q),
    "shape of values": (_value_shape, "data", "the values do not fit the indices", Q),
    "dtype of values": (_value_dtype, "links", "the delta's values have another dtype", Q),
    "dtype of indices": (_index_dtype, "data", "the indices have a dtype that", Q),
    "no values": (_no_values, "links", "the tensor lacks its indices or its values", Q),
    "no indices": (_no_indices, "links", "the tensor lacks its indices or its values", Q),
    "no tensor": (_no_tensor, "links", "the header's", None),
    "an entry of another kind": (_stranger, "links", "the entry is no part of a sparse", Q),
    "another name": (
        _renamed,
        "links",
        "the delta changes a tensor that the step before lacks",
        "model.layers.7.weight",
    ),
    "another step": (_set("model_version", "7"), "links", "the link's header names another", None),
    "no step": (_set("model_version", "five"), "links", "the header has no sound model", None),
    "another format": (_set("format", "x"), "links", "the file is neither", None),
    "an anchor": (_set("sparse", "False"), "links", "the file is an anchor", None),
    "encoding of GPUs": (
        _set("encoding", "nvcomp_cascaded"),
        "links",
        "the delta's encoding can only be read where it was made",
        None,
    ),
    "count": (_set("total_changed_elements", "21"), "links", "the header's total_changed", None),
    "count of tensors": (_set("num_changed_params", "4"), "links", "the header's num_", None),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_delta_is_found_and_named(
    how: str, bucket: Path, base: Path, tmp_path: Path
) -> None:
    edit, level, what, tensor = DAMAGE[how]
    path = delta_path(bucket, 5)
    rewrite(path, edit)
    name = "deltas/step_000005.safetensors"
    if level == "data":
        assert run("verify", bucket, "--level", "links", "--accept-unproven")["ok"] is True
    for depth in (level, "rebuild"):
        faults = verify_faults(bucket, depth)
        (own,) = [fault for fault in faults if fault["step"] == 5]
        assert own["file"] == name
        assert own["what"].startswith(what)
        assert tensor is None or own["tensor"] == tensor
        assert {fault["step"] for fault in faults} <= {5, 6, 7, 8, 9}
    served = tmp_path / "served"
    before = content(base)
    pulled = CliRunner().invoke(app, ["pull", str(bucket), str(served), "--step", "8", "--json"])
    status = 1 if how == "encoding of GPUs" else 3
    assert (pulled.exit_code, served.exists()) == (status, False), pulled.output
    error = json.loads(pulled.stdout)["error"]
    assert str(error["file"]).endswith(name)
    if how == "another step":
        return  # alone, the delta is sound
    status = 11 if how in ("another name", "dtype of values") else status
    out = tmp_path / "deep" / "out"
    words = [["-o", str(out)], ["--in-place"]]
    for where in words:
        applied = CliRunner().invoke(app, ["apply", str(path), str(base), *where])
        assert applied.exit_code == status, applied.output
        assert isinstance(applied.exception, SystemExit)
    assert not out.exists()
    assert content(base) == before


def test_what_is_served_stays_where_the_way_on_is_damaged(bucket: Path, tmp_path: Path) -> None:
    served = tmp_path / "served"
    run("pull", bucket, served, "--step", 4)
    held = content(served)
    for edit, level, *_ in DAMAGE.values():
        if level == "data":
            whole = delta_path(bucket, 5).read_bytes()
            rewrite(delta_path(bucket, 5), edit)
            run("pull", bucket, served, "--step", 6, status=3)
            assert content(served) == held
            delta_path(bucket, 5).write_bytes(whole)
    run("pull", bucket, served, "--step", 6)
    assert read_tensors(served) == STATES[5]


@pytest.mark.parametrize("step", [5, 10])
def test_a_truncated_link_is_found_and_named(step: int, bucket: Path, tmp_path: Path) -> None:
    path = anchor_path(bucket, step) if step in ANCHORS else delta_path(bucket, step)
    whole = path.read_bytes()
    for size in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        faults = verify_faults(bucket, "data")
        assert (faults[0]["step"], faults[0]["file"]) == (step, str(path.relative_to(bucket)))
        run("pull", bucket, tmp_path / "served", "--step", step + 2, status=3)
        assert not (tmp_path / "served").exists()


def test_what_stands_on_a_torn_link_is_not_put_on_the_one_below(
    bucket: Path, tmp_path: Path
) -> None:
    """The second dialect does not say what a delta stands on: never on what is next but one."""
    path = delta_path(bucket, 5)
    path.write_bytes(path.read_bytes()[:-1])
    assert run("log", bucket, status=3)["tip"] == STEPS
    run("pull", bucket, tmp_path / "served", "--step", 6, status=3)
    assert not (tmp_path / "served").exists()
    anchor_path(bucket, 10).unlink()
    found = run("pull", bucket, tmp_path / "served")
    assert found["step"] == 4
    assert found["newer"] == [5, 6, 7, 8, 9, 11, 12, 13]
    assert read_tensors(tmp_path / "served") == STATES[3]


def test_an_anchor_that_lacks_tensors_is_refused(
    bucket: Path, dialect: str, tmp_path: Path
) -> None:
    state = {name: spec for name, spec in STATES[9].items() if "norm" not in name}
    write_anchor(bucket, 10, state, dialect)
    (own, *others) = verify_faults(bucket, "links")
    assert (own["step"], own["tensor"]) == (10, "model.norm.weight")
    assert own["what"] == "the anchor lacks tensors that the anchor before it has"
    assert [fault["step"] for fault in others] == [11]
    run("pull", bucket, tmp_path / "served", "--step", 12, status=3)
    assert not (tmp_path / "served").exists()
    found = run("pull", bucket, tmp_path / "served")
    assert (found["step"], found["newer"]) == (9, [10, 11, 12, 13])
    assert read_tensors(tmp_path / "served") == STATES[8]


def test_an_anchor_with_a_tensor_of_another_shape_is_reported(bucket: Path, dialect: str) -> None:
    dtype, _, data = STATES[9]["model.norm.weight"]
    state = {**STATES[9], "model.norm.weight": (dtype, (4, 8), data)}
    write_anchor(bucket, 10, state, dialect)
    (own, *_) = verify_faults(bucket, "links")
    assert (own["step"], own["tensor"]) == (10, "model.norm.weight")
    assert (own["expected"], own["found"]) == ("BF16 [32]", "BF16 [4, 8]")


def test_a_fork_is_reported(bucket: Path, dialect: str) -> None:
    """Only the first dialect tells: a delta that stands on another step than the one below it."""
    rewrite(delta_path(bucket, 5), lambda _, metadata: metadata.update(prev_model_version="3"))
    (fault, *_) = verify_faults(bucket, "links")
    assert (fault["step"], fault["expected"], fault["found"]) == (5, "step 3", "step 4")


def test_no_anchor_at_the_beginning(bucket: Path, tmp_path: Path) -> None:
    anchor_path(bucket, 1).unlink()
    assert verify_faults(bucket, "links")[0]["step"] == 2
    run("pull", bucket, tmp_path / "served", "--step", 5, status=3)
    run("pull", bucket, tmp_path / "served")
    assert read_tensors(tmp_path / "served") == STATES[-1]


def test_apply_to_another_checkpoint(chain: Path, tmp_path: Path) -> None:
    other = {name: spec for name, spec in STATES[0].items() if name != Q}
    model = write_hf_directory(tmp_path / "model", other)
    error = run("apply", delta_path(chain, 2), model, "-o", tmp_path / "out", status=11)["error"]
    assert (error["tensor"], error["found"]) == (Q, "no such tensor")
    assert error["expected"] == "a tensor of BF16"
    assert not (tmp_path / "out").exists()
