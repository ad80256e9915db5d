"""What travels with the weights of a Hugging Face directory. (The weights: test_checkpoint.py.)"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deltactl.checkpoint.hf_directory import aux_files
from deltactl.core.errors import Malformed, NotAllowed

TRAVELS = [
    "LICENSE", "README.md", "config.json", "generation_config.json", "special_tokens_map.json",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja",
    "modeling_custom.py", "merges.txt", "sub/deeper/config.json", "original/params.json",
    "adapter.index.json", "checkpoints.txt", "with space.txt", "名前.txt",
]  # fmt: skip

STAYS = [
    # weights and their indices
    "model.safetensors", "consolidated.safetensors", "stale-00003-of-00003.safetensors",
    "pytorch_model.bin", "weights.pt", "original/consolidated.00.pth", "model.gguf", "tf_model.h5",
    "flax_model.msgpack", "model.onnx", "__0_0.distcp", "model.safetensors.index.json",
    "pytorch_model.bin.index.json", "consolidated.safetensors.index.json",
    # trainer state
    "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin", "trainer_state.json",
    "global_step100/zero.json", "checkpoint-500/config.json", "events.out.tfevents.1.host",
    # hidden files and leftovers
    ".gitattributes", ".git/config", ".cache/huggingface/x.json", "sub/.hidden", "a.json.tmp",
    "b.incomplete", "__pycache__/modeling_custom.cpython-311.pyc",
]  # fmt: skip


def write(directory: Path, names: list[str]) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)


def test_what_travels_and_what_stays(tmp_path: Path) -> None:
    write(tmp_path, TRAVELS + STAYS)
    found = aux_files(tmp_path)
    assert list(found) == sorted(TRAVELS)
    assert {name: path.read_text() for name, path in found.items()} == {n: n for n in TRAVELS}


@pytest.mark.parametrize("name", STAYS)
def test_stays(name: str, tmp_path: Path) -> None:
    write(tmp_path, [name])
    assert aux_files(tmp_path) == {}


def test_links_to_files_are_followed(tmp_path: Path) -> None:
    write(tmp_path, ["blobs/0123", "model/a.json"])
    (tmp_path / "model" / "config.json").symlink_to("../blobs/0123")
    found = aux_files(tmp_path / "model")
    assert found["config.json"].read_text() == "blobs/0123"


def test_links_to_directories_are_not(tmp_path: Path) -> None:
    write(tmp_path, ["elsewhere/a.json", "model/config.json"])
    (tmp_path / "model" / "link").symlink_to("../elsewhere")
    (tmp_path / "model" / "loop").symlink_to(".")
    assert list(aux_files(tmp_path / "model")) == ["config.json"]


def test_a_link_to_nothing_is_an_error(tmp_path: Path) -> None:
    # left out in silence, the pulled model would not load
    (tmp_path / "config.json").symlink_to("gone")
    with pytest.raises(Malformed, match="a link to nothing") as caught:
        aux_files(tmp_path)
    assert caught.value.file == str(tmp_path / "config.json")


def test_pipes_are_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert aux_files(tmp_path) == {}


@pytest.mark.parametrize("name", [b"a\\b", b"a\nb", b"\xff", b"\x1b[2J"], ids=repr)
def test_names_that_could_not_be_written_elsewhere(name: bytes, tmp_path: Path) -> None:
    try:
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name))).touch()
    except OSError:
        pytest.skip("this file system refuses the name itself")
    with pytest.raises(Malformed, match="not every system") as caught:
        aux_files(tmp_path)
    assert str(caught.value).isprintable()


def test_a_closed_directory_is_an_error(tmp_path: Path, unprivileged) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    with unprivileged, pytest.raises(NotAllowed):
        aux_files(tmp_path)
