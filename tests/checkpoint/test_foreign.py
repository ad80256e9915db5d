"""What is no checkpoint: deltas, pointers, pages and other formats, told by name everywhere."""

from __future__ import annotations

import json
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.checkpoint.foreign import check_zip
from deltactl.core.errors import DeltactlError, Malformed, NotFound, Unsupported
from deltactl.format.delta import open_delta
from deltactl.ops.push import push
from deltactl.ops.verify import verify_bucket
from tests.support.chains import content, first_state, make_chain, next_state, write
from tests.support.checkpoints import random_tensor, write_hf_directory, write_safetensors
from tests.support.foreign import FOREIGN, HTML, LFS, frames


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))


def made(name: str, place: Path) -> tuple[Path, str]:
    make, word = FOREIGN[name]
    place.mkdir(exist_ok=True)
    return make(place), word


@pytest.mark.parametrize("name", FOREIGN)
def test_it_is_no_checkpoint_and_named(name: str, tmp_path: Path) -> None:
    path, word = made(name, tmp_path / "made")
    was = content(tmp_path)
    with pytest.raises((Unsupported, Malformed, NotFound)) as caught:
        open_checkpoint(path)
    assert word in str(caught.value), caught.value
    assert str(path) in str(caught.value)
    assert caught.value.hint, caught.value
    assert len(str(caught.value)) < 600 + 2 * len(str(path))
    json.dumps(caught.value.facts())
    assert content(tmp_path) == was


@pytest.mark.parametrize("name", [name for name in FOREIGN if name != "our delta"])
@pytest.mark.parametrize("begun", [False, True])
def test_it_is_not_pushed(name: str, begun: bool, tmp_path: Path) -> None:
    path, _ = made(name, tmp_path / "made")
    bucket = LocalBucket(tmp_path / "to")
    if begun:
        push(write(tmp_path / "one", first_state()), bucket)
    was = content(tmp_path)
    with pytest.raises(DeltactlError):
        push(path, bucket)
    assert content(tmp_path) == was


@pytest.mark.parametrize("name", FOREIGN)
def test_nothing_stands_on_it(name: str, tmp_path: Path) -> None:
    path, word = made(name, tmp_path / "made")
    (tmp_path / "chain").mkdir()
    states = [first_state(), next_state(first_state(), 5)]
    bucket = make_chain(tmp_path / "chain", states)
    source = write(tmp_path / "three", next_state(states[1], 9))
    with pytest.raises(DeltactlError, match=word.replace("(", ".")):
        push(source, bucket, base=path)
    with pytest.raises(DeltactlError, match=word.replace("(", ".")):
        verify_bucket(bucket, against=path)
    assert read_chain(bucket).tip == 2


@pytest.mark.parametrize("name", ["lfs pointer", "html", "empty", "gguf by a wrong name"])
def test_it_is_told_where_a_delta_is_asked_for(name: str, tmp_path: Path) -> None:
    path, word = made(name, tmp_path / "made")
    with pytest.raises(DeltactlError, match=word):
        open_delta(path)


@pytest.mark.parametrize(("text", "word"), [(LFS, "Git LFS pointer"), (HTML, "web server")])
def test_it_is_told_in_the_place_of_a_link(text: str, word: str, tmp_path: Path) -> None:
    bucket = make_chain(tmp_path, [first_state(), next_state(first_state(), 5)], shards=0)
    for kind, step in (("anchors", 1), ("deltas", 2)):
        path = tmp_path / f"bucket/{kind}/step_{step:06d}.safetensors"
        was = path.read_bytes()
        path.write_text(text)
        (problem,) = read_chain(bucket).problems
        assert word in problem.what
        assert problem.step == step
        path.write_bytes(was)


def test_the_command_that_fetches_what_a_pointer_stands_for(tmp_path: Path) -> None:
    model = write(tmp_path / "model", first_state())
    shard = next(model.glob("*.safetensors"))
    shard.write_text(LFS)
    with pytest.raises(Unsupported) as caught:
        open_checkpoint(model)
    assert caught.value.file == str(shard)
    assert caught.value.hint == f"git -C {model} lfs pull"
    assert caught.value.expected == "4976698672 bytes"


def test_a_pointer_beside_the_weights_does_not_travel(tmp_path: Path) -> None:
    """A tokenizer that was not fetched would be in every anchor."""
    model = write(tmp_path / "model", first_state())
    (model / "tokenizer.json").write_text(LFS)
    for begun in (False, True):
        with pytest.raises(Unsupported, match="Git LFS pointer") as caught:
            push(model, LocalBucket(tmp_path / "bucket"))
        assert caught.value.file == str(model / "tokenizer.json")
        if not begun:
            push(write(tmp_path / "whole", first_state()), LocalBucket(tmp_path / "bucket"))


# What only looks like it.


def test_bytes_of_any_kind_in_1d_are_a_checkpoint(tmp_path: Path) -> None:
    tensors = {f"t{n}": random_tensor("U8", (40,), n) for n in range(3)}
    packed, sums = frames()
    name = next(iter(packed))
    for held, metadata in (
        (tensors, {}),
        (tensors, {"t0": "0123456789abcdef"}),
        (packed | {"t0": tensors["t0"]}, {}),
        (packed | {"t0": tensors["t0"]}, sums),
        ({name: ("U8", (1, len(packed[name][2])), packed[name][2])}, sums),
        (packed | {"empty": ("U8", (0,), b"")}, {}),
    ):
        path = write_safetensors(tmp_path / "x.safetensors", held, metadata)
        with open_checkpoint(path) as found:
            assert found.tensors.keys() == held.keys()


def test_a_full_version_is_a_checkpoint(tmp_path: Path) -> None:
    model = write_hf_directory(tmp_path / "weight_v000010", first_state())
    (model / "manifest.json").write_text('{"tensors": 5}')
    (model / "metadata.json").write_text("{}")
    with open_checkpoint(model) as found:
        assert found.tensors.keys() == first_state().keys()


def test_a_zip_archive_with_a_long_list_of_contents_is_not_read_for_its_name(
    tmp_path: Path,
) -> None:
    """Such a list takes ten times its size in memory."""
    path = tmp_path / "x.bin"
    with zipfile.ZipFile(path, "w") as archive:
        for n in range(50_000):
            archive.writestr(f"{n:050d}", b"")
    tracemalloc.start()
    check_zip(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    with pytest.raises(Malformed, match="not a PyTorch file"):
        open_checkpoint(path)
