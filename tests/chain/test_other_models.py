"""Another model at the door of a chain: refused, or an anchor with its own config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.core.errors import Conflict, Malformed
from deltactl.ops.copy import copy_chain
from deltactl.ops.destination import MARKER
from deltactl.ops.diff import diff
from deltactl.ops.pull import pull
from deltactl.ops.push import push
from deltactl.ops.verify import verify_bucket
from tests.support.chains import Tensors, content, holds
from tests.support.checkpoints import (
    changed,
    random_weights,
    write_hf_directory,
    write_safetensors,
)

ADAPTER_CONFIG = {"adapter_config.json": '{"peft_type": "LORA"}'}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def bucket(tmp_path: Path) -> LocalBucket:
    return LocalBucket(tmp_path / "bucket")


def tensors(seed: int = 0, width: int = 16, dtype: str = "BF16") -> Tensors:
    return {
        f"model.layers.{n}.{part}.weight": random_weights(dtype, (width, 8), seed + n)
        for n in range(3)
        for part in ("attn", "mlp")
    }


def model(path: Path, state: Mapping[str, object], kind: str = "llama") -> Path:
    config = {"model_type": kind, "architectures": [f"{kind.title()}ForCausalLM"]}
    aux = {"config.json": json.dumps(config), f"{kind}.tokens": kind}
    return write_hf_directory(path, state, shards=2, aux=aux)  # type: ignore[arg-type]


def adapter(path: Path) -> Path:
    state = {
        f"base_model.model.{name.removesuffix('weight')}{side}.weight": spec
        for name, spec in tensors(70).items()
        for side in ("lora_A", "lora_B")
    }
    write_safetensors(path / "adapter_model.safetensors", state)
    for name, text in ADAPTER_CONFIG.items():
        (path / name).write_text(text)
    return path


OTHERS = {
    "architecture": lambda path: model(path, tensors(), "qwen2"),
    "width": lambda path: model(path, tensors(width=24)),
    "dtype": lambda path: model(path, tensors(dtype="F32")),
    "prefix": lambda path: model(path, {f"module.{n}": s for n, s in tensors().items()}),
    "emptied": lambda path: model(path, dict.fromkeys(tensors(), ("BF16", (0,), b""))),
    "adapter": adapter,
    "shard": lambda path: model(path, tensors()) / "model-00002-of-00002.safetensors",
}


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("other", OTHERS)
def test_another_model_is_refused_and_nothing_written(
    tmp_path: Path, bucket: LocalBucket, other: str, dry_run: bool
) -> None:
    one = model(tmp_path / "one", tensors())
    push(one, bucket)
    source = OTHERS[other](tmp_path / "other")
    was = content(tmp_path)
    for step, base in ((None, None), (2, None), (None, one)):
        with pytest.raises(Conflict, match="the chain's tip, step 1: ") as caught:
            push(source, bucket, step=step, base=base, dry_run=dry_run)
        assert caught.value.file == str(source)
        assert caught.value.step is None
        assert f"push {source} {bucket.url} --allow-other-model" in str(caught.value.hint)
    assert content(tmp_path) == was


@pytest.mark.parametrize("other", OTHERS)
def test_where_it_is_meant_it_is_an_anchor_with_its_own_config(
    tmp_path: Path, bucket: LocalBucket, other: str
) -> None:
    dest = tmp_path / "dest"
    push(model(tmp_path / "one", tensors()), bucket)
    pull(bucket, dest)
    source = OTHERS[other](tmp_path / "other")
    said = push(source, bucket, allow_other_model=True, dry_run=True)
    report = push(source, bucket, allow_other_model=True)
    assert (report.step, report.kind, report.written) == (2, "anchor", True)
    assert (said.step, said.kind, said.state) == (report.step, report.kind, report.state)
    assert report.notes == said.notes != ()
    chain = read_chain(bucket)
    assert (sorted(chain.anchors), sorted(chain.deltas), chain.tip) == ([1, 2], [], 2)
    assert verify_bucket(bucket, level="rebuild").ok
    with open_checkpoint(source) as opened:
        after = {n: (t.dtype, t.shape, t.data.tobytes()) for n, t in opened.tensors.items()}
        aux = {name: path.read_bytes() for name, path in opened.aux.items()}
    for place in (dest, tmp_path / "fresh"):  # over the old model, and from nothing
        pull(bucket, place)
        assert holds(place, after)
        weights = {name for name in content(place) if ".safetensors" in name}
        assert content(place).keys() == {*aux, *weights, MARKER}
        assert {name: (place / name).read_bytes() for name in aux} == aux
    assert push(source, bucket).step == 2, "it is the tip now"


def test_the_chain_goes_on_with_the_other_model(tmp_path: Path, bucket: LocalBucket) -> None:
    push(model(tmp_path / "one", tensors()), bucket)
    other = tensors(width=24)
    push(model(tmp_path / "two", other, "qwen2"), bucket, allow_other_model=True)
    later = {name: changed(spec, 0.1, 5) for name, spec in other.items()}
    report = push(model(tmp_path / "three", later, "qwen2"), bucket)
    assert (report.step, report.kind, report.notes) == (3, "delta", ())
    with pytest.raises(Conflict, match="another model"):
        push(tmp_path / "one", bucket)
    assert verify_bucket(bucket, level="rebuild").ok
    pull(bucket, tmp_path / "dest")
    assert holds(tmp_path / "dest", later)
    assert "qwen2" in (tmp_path / "dest/config.json").read_text()


def test_the_flag_changes_nothing_for_the_same_model(tmp_path: Path, bucket: LocalBucket) -> None:
    push(model(tmp_path / "one", tensors()), bucket, allow_other_model=True)
    later = {name: changed(spec, 0.1, 5) for name, spec in tensors().items()}
    report = push(model(tmp_path / "two", later), bucket, allow_other_model=True)
    assert (report.kind, report.notes) == ("delta", ())


@pytest.mark.parametrize("from_step", [None, 1, 2])
def test_a_chain_of_two_models_is_copied(
    tmp_path: Path, bucket: LocalBucket, from_step: int | None
) -> None:
    push(model(tmp_path / "one", tensors()), bucket)
    push(model(tmp_path / "two", tensors(width=24), "qwen2"), bucket, allow_other_model=True)
    dest = LocalBucket(tmp_path / "copy")
    assert copy_chain(bucket, dest, from_step=from_step).tip == 2
    assert verify_bucket(dest, level="rebuild").ok
    pull(dest, tmp_path / "dest")
    assert holds(tmp_path / "dest", tensors(width=24))


def test_a_step_back_before_the_model_changed(tmp_path: Path, bucket: LocalBucket) -> None:
    push(model(tmp_path / "one", tensors()), bucket)
    push(model(tmp_path / "two", tensors(width=24), "qwen2"), bucket, allow_other_model=True)
    names = {}
    for step in (1, 2, 1, 2):
        pull(bucket, tmp_path / "dest", step=step)
        found = content(tmp_path / "dest").keys()
        assert names.setdefault(step, found) == found
    assert {"llama.tokens"} < names[1]
    assert {"qwen2.tokens"} < names[2]
    assert "llama.tokens" not in names[2]
    assert "qwen2.tokens" not in names[1]


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        (lambda t: t.update(score=random_weights("F32", (2, 8))), "1 tensor is new: score"),
        (lambda t: t.pop("model.layers.0.mlp.weight"), "1 tensor is gone: model.layers.0.mlp"),
        (lambda t: t.update({"model.layers.0.mlp.weight": random_weights("BF16", (4, 8))}),
         "1 tensor is of another shape: model.layers.0.mlp"),
        (lambda t: t.update({"model.layers.0.mlp.weight": random_weights("F32", (16, 8))}),
         "1 tensor is of another dtype: model.layers.0.mlp"),
    ],
)  # fmt: skip
def test_smaller_changes_are_pushed_and_said(
    tmp_path: Path, bucket: LocalBucket, edit: object, word: str
) -> None:
    push(model(tmp_path / "one", tensors()), bucket)
    state = tensors()
    edit(state)  # type: ignore[operator]
    report = push(model(tmp_path / "two", state), bucket)
    assert (report.kind, len(report.notes)) == ("delta", 1)
    assert word in report.notes[0]
    with open_checkpoint(tmp_path / "one") as a, open_checkpoint(tmp_path / "two") as b:
        diff(a, b, tmp_path / "delta")
    elsewhere = LocalBucket(tmp_path / "elsewhere")
    push(tmp_path / "one", elsewhere)
    assert push(tmp_path / "delta", elsewhere, step=2).notes == report.notes


@pytest.mark.parametrize("other", ["width", "dtype", "prefix", "emptied"])
def test_a_delta_to_another_model_is_refused(
    tmp_path: Path, bucket: LocalBucket, other: str
) -> None:
    one, two = model(tmp_path / "one", tensors()), OTHERS[other](tmp_path / "two")
    push(one, bucket)
    with open_checkpoint(one) as a, open_checkpoint(two) as b:
        diff(a, b, tmp_path / "delta")
    was = content(tmp_path)
    with pytest.raises(Conflict, match="another model") as caught:
        push(tmp_path / "delta", bucket, step=2, allow_other_model=True)
    assert "a delta carries no config" in str(caught.value.hint)
    assert content(tmp_path) == was


def test_a_damaged_config_in_the_bucket_is_not_believed(
    tmp_path: Path, bucket: LocalBucket
) -> None:
    push(model(tmp_path / "one", tensors()), bucket)
    config = tmp_path / "bucket/anchors/step_000001/config.json"
    config.write_bytes(config.read_bytes().replace(b"llama", b"qwens"))
    with pytest.raises(Malformed, match="digest"):
        push(model(tmp_path / "two", tensors(1)), bucket)


# The first step.


@pytest.mark.parametrize("other", ["adapter", "emptied", "shard"])
def test_what_is_no_whole_model_does_not_begin_a_chain(
    tmp_path: Path, bucket: LocalBucket, other: str
) -> None:
    source = OTHERS[other](tmp_path / "source")
    with pytest.raises(Conflict, match="no whole model"):
        push(source, bucket)
    assert not (tmp_path / "bucket").exists()
    report = push(source, bucket, allow_other_model=True)
    assert report.kind == "anchor"
    assert len(report.notes) == 1


def test_an_adapter_comes_back_under_the_name_that_loaders_look_for(
    tmp_path: Path, bucket: LocalBucket
) -> None:
    source = adapter(tmp_path / "source")
    push(source, bucket, allow_other_model=True)
    names = {"adapter_config.json", "adapter_model.safetensors", MARKER}
    pull(bucket, tmp_path / "dest")
    assert content(tmp_path / "dest").keys() == names
    push(source, bucket, step=2)
    pull(bucket, tmp_path / "dest")
    assert content(tmp_path / "dest").keys() == names
    assert verify_bucket(bucket, level="rebuild").ok


def test_a_wrappers_names_are_said_at_the_first_step(tmp_path: Path, bucket: LocalBucket) -> None:
    source = model(tmp_path / "one", {f"module.{n}": s for n, s in tensors().items()})
    (note,) = push(source, bucket).notes
    assert "DistributedDataParallel" in note
