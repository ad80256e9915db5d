"""Opening checkpoints: safetensors files and Hugging Face directories of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from deltactl.checkpoint.checkpoint import Checkpoint, open_checkpoint
from deltactl.core.errors import DeltactlError, Malformed, NotAllowed, NotFound, Unsupported
from tests.support.checkpoints import (
    BITS,
    Spec,
    random_tensor,
    write_hf_directory,
    write_index,
    write_safetensors,
)

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
TENSORS: dict[str, Spec] = {
    "model.embed": random_tensor("BF16", (4, 3), 1),
    "lm_head": random_tensor("F32", (3, 2), 2),
    "model.scale": random_tensor("F8_E4M3", (5,), 3),
    "empty": ("F16", (0, 3), b""),
    "scalar": random_tensor("I64", (), 4),
}


def contents(checkpoint: Checkpoint) -> dict[str, Spec]:
    return {t.name: (t.dtype, t.shape, t.data.tobytes()) for t in checkpoint.tensors.values()}


def refusal(path: Path, kind: type[DeltactlError], *, hint: bool = True) -> DeltactlError:
    """The error that opening raises; it is of that kind, and says what to do next."""
    with pytest.raises(DeltactlError) as caught:
        open_checkpoint(path)
    assert type(caught.value) is kind
    assert caught.value.file is not None
    assert not hint or caught.value.hint
    return caught.value


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory of two shards: the first, third and fifth tensor, and the second and fourth."""
    return write_hf_directory(tmp_path / "model", TENSORS, aux={"config.json": "{}"})


def edit_index(model: Path, edit: Callable[[dict], object]) -> None:
    document = json.loads((model / INDEX).read_text())
    edit(document)
    (model / INDEX).write_text(json.dumps(document))


class TestOneFile:
    def test_tensors_and_shard(self, tmp_path: Path) -> None:
        path = write_safetensors(tmp_path / "x.safetensors", TENSORS, {"format": "pt"})
        with open_checkpoint(path) as checkpoint:
            assert contents(checkpoint) == TENSORS
            assert checkpoint.path == path
            (shard,) = checkpoint.shards
            assert (shard.file, shard.metadata) == ("x.safetensors", {"format": "pt"})
            # the empty tensor lies where the next one begins
            assert shard.tensors == tuple(TENSORS)
            assert not checkpoint.is_directory
            assert checkpoint.index_metadata is None
            assert checkpoint.aux == {}

    def test_order_is_of_utf8_bytes(self, tmp_path: Path) -> None:
        names = ["b", "\uffff", "\U0001f600", "a", "Z", ""]
        spec = ("U8", (1,), b"x")
        path = write_safetensors(tmp_path / "x.safetensors", dict.fromkeys(names, spec))
        assert list(open_checkpoint(path).tensors) == ["", "Z", "a", "b", "\uffff", "\U0001f600"]

    @pytest.mark.parametrize("dtype", BITS)
    def test_every_dtype(self, dtype: str, tmp_path: Path) -> None:
        tensors = {"a": random_tensor(dtype, (3, 8)), "e": (dtype, (0,), b"")}
        checkpoint = open_checkpoint(write_safetensors(tmp_path / "x.safetensors", tensors))
        assert contents(checkpoint) == tensors
        # an element is a unit of 1, 2, 4 or 8 bytes; of a dtype below a byte, a byte
        elements = 3 * 8 if BITS[dtype] >= 8 else 3 * BITS[dtype]
        assert checkpoint.total_elements == elements
        assert checkpoint.nbytes == checkpoint.tensors["a"].nbytes == 3 * BITS[dtype]

    def test_no_tensors(self, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(write_safetensors(tmp_path / "x.safetensors", {}))
        assert (checkpoint.tensors, checkpoint.nbytes, checkpoint.total_elements) == ({}, 0, 0)

    def test_data_cannot_be_written(self, tmp_path: Path) -> None:
        path = write_safetensors(tmp_path / "x.safetensors", TENSORS)
        with pytest.raises(ValueError, match="read-only"):
            open_checkpoint(path).tensors["lm_head"].data[0] = 1

    @pytest.mark.parametrize("name", ["blob", "weights.st"])
    def test_kind_is_told_by_content_where_the_name_is_silent(self, name, tmp_path: Path) -> None:
        path = write_safetensors(tmp_path / name, TENSORS)
        assert contents(open_checkpoint(path)) == TENSORS

    def test_other_files_are_unsupported(self, tmp_path: Path) -> None:
        (tmp_path / "model.other").write_bytes(b"\x01\xff" + bytes(100))
        error = refusal(tmp_path / "model.other", Unsupported, hint=False)
        assert "*.safetensors" in str(error.expected)

    def test_malformed_file(self, tmp_path: Path) -> None:
        (tmp_path / "x.safetensors").write_bytes(b"\x01\xff" + bytes(100))
        refusal(tmp_path / "x.safetensors", Malformed, hint=False)

    def test_thousands_of_tensors(self, tmp_path: Path) -> None:
        tensors = {f"layers.{n}.weight": ("BF16", (2,), n.to_bytes(4, "big")) for n in range(5000)}
        assert (
            contents(open_checkpoint(write_safetensors(tmp_path / "x.safetensors", tensors)))
            == tensors
        )


class TestClose:
    def test_views_outlive_it(self, tmp_path: Path) -> None:
        path = write_safetensors(tmp_path / "x.safetensors", TENSORS)
        with open_checkpoint(path) as checkpoint:
            data = checkpoint.tensors["lm_head"].data[4:8]
        assert data.tobytes() == TENSORS["lm_head"][2][4:8]

    def test_twice(self, model: Path) -> None:
        checkpoint = open_checkpoint(model)
        checkpoint.close()
        checkpoint.close()

    def test_unmaps_the_file_and_keeps_the_sums(self, tmp_path: Path) -> None:
        path = write_safetensors(tmp_path / "closed.safetensors", TENSORS)
        checkpoint = open_checkpoint(path)
        sums = checkpoint.nbytes, checkpoint.total_elements
        maps = Path("/proc/self/maps")
        if maps.exists():
            assert str(path) in maps.read_text()
        checkpoint.close()
        if maps.exists():
            assert str(path) not in maps.read_text()
        assert (checkpoint.nbytes, checkpoint.total_elements) == sums


class TestDirectory:
    def test_shards(self, model: Path) -> None:
        with open_checkpoint(model) as checkpoint:
            assert contents(checkpoint) == TENSORS
            assert list(checkpoint.tensors) == sorted(TENSORS)
            assert [shard.file for shard in checkpoint.shards] == list(SHARDS)
            assert checkpoint.shards[1].tensors == ("lm_head", "empty")
            assert checkpoint.shards[0].metadata == {"format": "pt"}
            assert checkpoint.is_directory
            total = sum(len(data) for _, _, data in TENSORS.values())
            assert checkpoint.index_metadata == {"total_size": total}
            assert checkpoint.nbytes == total
            assert checkpoint.aux == {"config.json": model / "config.json"}

    def test_one_file(self, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(write_hf_directory(tmp_path / "m", TENSORS, shards=1))
        assert contents(checkpoint) == TENSORS
        assert checkpoint.is_directory
        assert checkpoint.index_metadata is None
        assert [shard.file for shard in checkpoint.shards] == ["model.safetensors"]

    def test_an_index_of_one_file(self, tmp_path: Path) -> None:
        model = write_hf_directory(tmp_path / "m", TENSORS, shards=1)
        write_index(model, dict.fromkeys(TENSORS, "model.safetensors"))
        assert open_checkpoint(model).index_metadata == {}

    def test_an_index_without_metadata(self, model: Path) -> None:
        edit_index(model, lambda index: index.pop("metadata"))
        assert open_checkpoint(model).index_metadata == {}

    def test_links_into_a_store_of_blobs(self, model: Path) -> None:
        blobs = model.parent / "blobs"
        blobs.mkdir()
        for n, file in enumerate(sorted(model.iterdir())):
            file.rename(blobs / f"{n:064x}")
            file.symlink_to(f"../blobs/{n:064x}")
        checkpoint = open_checkpoint(model)
        assert contents(checkpoint) == TENSORS
        assert [shard.file for shard in checkpoint.shards] == list(SHARDS)
        assert list(checkpoint.aux) == ["config.json"]

    def test_a_link_to_the_directory(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(model)
        assert contents(open_checkpoint(tmp_path / "link")) == TENSORS

    def test_the_only_safetensors_file_of_any_name(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path / "policy.safetensors", TENSORS)
        write_safetensors(tmp_path / ".hidden.safetensors", {})
        checkpoint = open_checkpoint(tmp_path)
        assert contents(checkpoint) == TENSORS
        assert [shard.file for shard in checkpoint.shards] == ["policy.safetensors"]

    def test_the_only_index_of_any_name(self, model: Path) -> None:
        (model / INDEX).rename(model / "diffusion_model.safetensors.index.json")
        write_safetensors(model / "stale.safetensors", {})
        assert contents(open_checkpoint(model)) == TENSORS

    def test_safetensors_before_pytorch(self, model: Path) -> None:
        (model / "pytorch_model.bin").write_bytes(b"never opened")
        (model / "pytorch_model.bin.index.json").write_bytes(b"never opened")
        assert contents(open_checkpoint(model)) == TENSORS

    @pytest.mark.parametrize("shards", [1, 2])
    def test_a_consolidated_copy_is_left_alone(self, shards: int, tmp_path: Path) -> None:
        model = write_hf_directory(tmp_path / "m", TENSORS, shards=shards)
        (model / "consolidated.safetensors").write_bytes(b"never opened")
        (model / "consolidated.safetensors.index.json").write_bytes(b"never opened")
        checkpoint = open_checkpoint(model)
        assert contents(checkpoint) == TENSORS
        assert checkpoint.aux == {}

    def test_a_consolidated_file_alone_is_the_weights(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path / "consolidated.safetensors", TENSORS)
        assert contents(open_checkpoint(tmp_path)) == TENSORS

    def test_stale_shards_that_no_index_names_are_left_alone(self, model: Path) -> None:
        (model / "model-00003-of-00003.safetensors").write_bytes(b"never opened")
        assert contents(open_checkpoint(model)) == TENSORS


class TestNoCheckpoint:
    def test_missing(self, tmp_path: Path) -> None:
        error = refusal(tmp_path / "nothing", NotFound)
        assert error.hint == f"ls {tmp_path}"

    def test_a_name_on_the_hub(self) -> None:
        error = refusal(Path("Qwen/Qwen3-0.6B"), NotFound)
        assert error.hint == "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"

    def test_empty_directory(self, tmp_path: Path) -> None:
        error = refusal(tmp_path, NotFound)
        assert error.found == "an empty directory"
        for name in (INDEX, "model.safetensors", "pytorch_model.bin"):
            assert name in str(error.expected)

    def test_directory_without_weights(self, tmp_path: Path) -> None:
        for name in ("config.json", "d", "b", "a", "e"):
            (tmp_path / name).touch()
        assert refusal(tmp_path, NotFound).found == "a, b, config.json, d and 1 more"

    def test_distributed_checkpoint(self, tmp_path: Path) -> None:
        (tmp_path / "__0_0.distcp").touch()
        assert "dcp_to_torch" in str(refusal(tmp_path, Unsupported).hint)

    def test_several_files_and_no_index(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path / "a.safetensors", {})
        write_safetensors(tmp_path / "b.safetensors", {})
        assert refusal(tmp_path, Malformed).found == "a.safetensors, b.safetensors"

    def test_one_shard_of_several_and_no_index(self, model: Path) -> None:
        (model / INDEX).unlink()
        (model / SHARDS[1]).unlink()
        assert "one shard of 2" in refusal(model, Malformed).what

    def test_one_shard_of_one_needs_no_index(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path / "model-00001-of-00001.safetensors", TENSORS)
        assert contents(open_checkpoint(tmp_path)) == TENSORS

    def test_a_whole_file_and_an_index_that_does_not_name_it(self, model: Path) -> None:
        write_safetensors(model / "model.safetensors", TENSORS)
        assert "both model.safetensors and an index" in refusal(model, Malformed).what

    def test_no_permission(self, tmp_path: Path, unprivileged) -> None:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0)
        with unprivileged:
            for path in (closed, closed / "x.safetensors"):
                refusal(path, NotAllowed, hint=False)

    def test_no_permission_for_a_shard(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.open

        def closed(path: str, flags: int) -> int:
            if str(path).endswith(SHARDS[1]):
                raise PermissionError(13, "Permission denied")
            return real(path, flags)

        monkeypatch.setattr(os, "open", closed)
        assert str(model / SHARDS[1]) == refusal(model, NotAllowed, hint=False).file

    def test_pipe(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        refusal(tmp_path / "pipe", Malformed, hint=False)


BAD_SHARD_NAMES = [
    "../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors", "..", "",
    "x\0.safetensors", "x\n.safetensors", "config.json", "x.bin", 3, None, ["x.safetensors"],
]  # fmt: skip


class TestIndex:
    @pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b'{"a":1,"a":2}', b'{"a":NaN}'])
    def test_no_json(self, text: bytes, model: Path) -> None:
        (model / INDEX).write_bytes(text)
        error = refusal(model, Malformed, hint=False)
        assert error.what == "the index is no JSON object"
        assert error.file == str(model / INDEX)

    @pytest.mark.parametrize("weight_map", [{}, [], None, "x", 1], ids=repr)
    def test_no_weight_map(self, weight_map: object, model: Path) -> None:
        write_index(model, weight_map)
        assert "no weight_map" in refusal(model, Malformed, hint=False).what

    def test_weight_map_missing(self, model: Path) -> None:
        (model / INDEX).write_text('{"metadata": {}}')
        assert "no weight_map" in refusal(model, Malformed, hint=False).what

    @pytest.mark.parametrize("metadata", [[1], "x", 3], ids=repr)
    def test_metadata_is_no_object(self, metadata: object, model: Path) -> None:
        edit_index(model, lambda index: index.update(metadata=metadata))
        assert "metadata" in refusal(model, Malformed, hint=False).what

    @pytest.mark.parametrize("shard", BAD_SHARD_NAMES, ids=ascii)
    def test_a_shard_that_is_no_plain_name_is_never_opened(
        self, shard: object, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_safetensors(model.parent / "x.safetensors", {"a": TENSORS["lm_head"]})
        write_safetensors(model / "sub" / "x.safetensors", {"a": TENSORS["lm_head"]})
        edit_index(model, lambda index: index["weight_map"].update(a=shard))
        opened: list[str] = []
        real = os.open

        def spy(path: str, flags: int) -> int:
            opened.append(os.path.basename(path))
            return real(path, flags)

        monkeypatch.setattr(os, "open", spy)
        error = refusal(model, Malformed, hint=False)
        assert "no plain file name" in error.what
        assert (error.tensor, error.found) == ("a", ascii(shard))
        assert opened == [INDEX]

    def test_a_tensor_named_twice(self, model: Path) -> None:
        (model / INDEX).write_text(
            json.dumps({"weight_map": {"a": SHARDS[0]}}).replace("}}", f', "a": "{SHARDS[1]}"}}}}')
        )
        assert refusal(model, Malformed, hint=False).found == "a key stands twice"

    def test_missing_shard(self, model: Path) -> None:
        (model / SHARDS[1]).unlink()
        error = refusal(model, Malformed)
        assert (error.what, error.file) == ("a shard is missing", str(model / SHARDS[1]))
        assert error.found == "no file"

    def test_shard_that_is_a_link_to_nothing(self, model: Path) -> None:
        (model / SHARDS[1]).unlink()
        (model / SHARDS[1]).symlink_to("../blobs/gone")
        assert refusal(model, Malformed).found == "a link to nothing"

    def test_single_file_that_is_a_link_to_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").symlink_to("gone")
        assert refusal(tmp_path, Malformed).found == "a link to nothing"

    def test_shard_that_is_a_directory(self, model: Path) -> None:
        (model / SHARDS[1]).unlink()
        (model / SHARDS[1]).mkdir()
        assert "a directory" in refusal(model, Malformed, hint=False).what

    def test_malformed_shard(self, model: Path) -> None:
        (model / SHARDS[1]).write_bytes((model / SHARDS[1]).read_bytes()[:-1])
        assert refusal(model, Malformed, hint=False).file == str(model / SHARDS[1])

    def test_tensor_that_its_shard_lacks(self, model: Path) -> None:
        edit_index(model, lambda index: index["weight_map"].update(extra=SHARDS[1]))
        error = refusal(model, Malformed)
        assert (error.file, error.tensor) == (str(model / SHARDS[1]), "extra")
        assert "lacks" in error.what

    def test_tensor_that_the_index_lacks(self, model: Path) -> None:
        edit_index(model, lambda index: index["weight_map"].pop("lm_head"))
        error = refusal(model, Malformed)
        assert (error.file, error.tensor) == (str(model / INDEX), "lm_head")
        assert (error.expected, error.found) == (SHARDS[1], "nothing")

    def test_tensor_that_the_index_puts_elsewhere(self, model: Path) -> None:
        edit_index(model, lambda index: index["weight_map"].update(lm_head=SHARDS[0]))
        error = refusal(model, Malformed)
        assert (error.tensor, error.expected, error.found) == ("lm_head", SHARDS[1], SHARDS[0])

    def test_tensor_in_two_shards(self, model: Path) -> None:
        tensors = {name: TENSORS[name] for name in ("lm_head", "empty", "scalar")}
        write_safetensors(model / SHARDS[1], tensors)
        error = refusal(model, Malformed)
        assert (error.what, error.tensor) == ("the tensor is in two shards", "scalar")
        assert (error.expected, error.found) == (f"only in {SHARDS[0]}", SHARDS[1])


def test_opening_reads_no_payload(tmp_path: Path) -> None:
    # a sparse file of a terabyte opens at once
    path = tmp_path / "x.safetensors"
    header = {"a": {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + (1 << 40))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.nbytes == 1 << 40
