"""Files and directories of other systems, as those write them, for what is no checkpoint.

``FOREIGN`` maps a name to what makes one below a directory, and a word of the error that it gets.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import zstandard

from tests.support import trl_writer
from tests.support.chains import make_chain, make_delta, next_state, states, write
from tests.support.checkpoints import Spec, write_index, write_safetensors
from tests.support.several import write_parts

LFS = (
    "version https://git-lfs.github.com/spec/v1\n"
    f"oid sha256:{hashlib.sha256(b'x').hexdigest()}\n"
    "size 4976698672\n"
)
HTML = "<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head></html>\n"
XML = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code></Error>\n'
SHARD = "model-00000-of-00001.safetensors"
INDEX = "model.safetensors.index.json"

BEFORE, AFTER = states(2)


def frames(overwrite: bool = False) -> tuple[dict[str, Spec], dict[str, str]]:
    """What changed, each tensor a zstd frame, 1-D U8, and the checksums of the new bytes."""
    tensors: dict[str, Spec] = {}
    sums = {}
    for name, (_, _, old) in BEFORE.items():
        new = AFTER[name][2]
        if new == old:
            continue
        change = bytes(a ^ b for a, b in zip(old, new, strict=True))
        if overwrite:
            at = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
            change = np.array([len(at), *at], "<u4").tobytes() + bytes(new[i] for i in at)
        packed = zstandard.ZstdCompressor(level=1).compress(change)
        tensors[name] = ("U8", (len(packed),), packed)
        sums[name] = hashlib.blake2b(new, digest_size=16).hexdigest()
    return tensors, sums


def slime(place: Path, encoding: str = "xor", *, nothing: bool = False) -> Path:
    """A delta version of slime, miles, SGLang, ModelExpress; with ``nothing``, without changes."""
    directory = place / "weight_v000012"
    tensors, sums = frames(encoding == "overwrite")
    directory.mkdir(parents=True)
    if not nothing:
        write_safetensors(directory / SHARD, tensors, sums)
    metadata = {
        "version": "000012", "base_version": "000011", "delta_encoding": encoding,
        "compression_format": "zstd", "checksum_format": "xxh3-128",
    }  # fmt: skip
    write_index(directory, {} if nothing else dict.fromkeys(tensors, SHARD), metadata)
    return directory


def skyrl(place: Path) -> Path:
    """A delta of SkyRL."""
    directory = place / "delta-00000012"
    tensors, sums = frames()
    file = "delta-rank00000-file000000.safetensors"
    write_safetensors(directory / file, tensors)
    rows = [
        {"name": n, "dtype": "bfloat16", "shape": [1], "payload_file": file, "payload_key": n,
         "checksum": sums[n], "checksum_algorithm": "xxh3-128"}
        for n in tensors
    ]  # fmt: skip
    manifest = {"version": 12, "base_version": 11, "tensors": rows, "payload_files": [file]}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def grail(place: Path) -> Path:
    """A window of grail that has a delta and no full checkpoint."""
    directory = place / "checkpoint-12"
    (directory / "DELTA").mkdir(parents=True)
    (directory / "READY-13").touch()
    (directory / "DELTA/metadata.json").write_text('{"prev_window": 11}')
    (directory / "DELTA/delta_metadata.json").write_text('{"format": "sparse_codec_v3.1"}')
    (directory / "DELTA/delta_sparse.bin.zst").write_bytes(zstandard.compress(b"x" * 99))
    return directory


def ours(place: Path) -> Path:
    return make_delta(place / "step_2.safetensors", BEFORE, AFTER)


def ours_of_several_files(place: Path) -> Path:
    return write_parts(place / "delta", BEFORE, AFTER, count=2, step=2)


def trl(place: Path, dialect: str) -> Path:
    return trl_writer.write_delta(place, 2, BEFORE, next_state(BEFORE, 1), dialect)


def text(name: str, content: str | bytes) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return make


def tar(place: Path) -> Path:
    with tarfile.open(place / "model.tar", "w") as archive:
        archive.add(write(place / "model", BEFORE), "model")
    return place / "model.tar"


def zipped(name: str) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        with zipfile.ZipFile(place / name, "w") as archive:
            archive.write(write(place / "model", BEFORE) / INDEX, "model/index.json")
        return place / name

    return make


def npz(place: Path) -> Path:
    np.savez(place / "weights.npz", a=np.zeros(3))
    return place / "weights.npz"


def npy(place: Path) -> Path:
    np.save(place / "weights.npy", np.zeros(3))
    return place / "weights.npy"


def saved(name: str, document: object) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(document, place / name)
        return place / name

    return make


def holding(*makers: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """A directory with what these make, and a config."""

    def make(place: Path) -> Path:
        directory = place / "directory"
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        for maker in makers:
            maker(directory)
        return directory

    return make


def inside(maker: Callable[[Path], Path], name: str) -> Callable[[Path], Path]:
    return lambda place: maker(place) / name


def index_alone(place: Path) -> Path:
    model = write(place / "model", BEFORE)
    for shard in model.glob("*.safetensors"):
        shard.unlink()
    return model


OPTIMIZER = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"params": [0]}]}

FOREIGN: Mapping[str, tuple[Callable[[Path], Path], str]] = {
    "xor directory": (slime, "slime"),
    "overwrite directory": (lambda p: slime(p, "overwrite"), "slime"),
    "xor directory without changes": (lambda p: slime(p, nothing=True), "slime"),
    "xor shard": (inside(slime, SHARD), "slime"),
    "overwrite shard": (inside(lambda p: slime(p, "overwrite"), SHARD), "slime"),
    "directory of versions": (lambda p: slime(p).parent, "weight_v000012"),
    "skyrl directory": (skyrl, "SkyRL"),
    "skyrl file": (inside(skyrl, "delta-rank00000-file000000.safetensors"), "SkyRL"),
    "grail window": (grail, "grail"),
    "grail delta": (inside(grail, "DELTA"), "grail"),
    "our delta": (ours, "a delta, and no checkpoint"),
    "our delta of several files": (ours_of_several_files, "a delta, and no checkpoint"),
    "a part of our delta": (
        inside(ours_of_several_files, "delta-00001-of-00002.safetensors"),
        "a delta, and no checkpoint",
    ),
    "trl-1 delta": (lambda p: trl(p, "trl-1"), "a delta, and no checkpoint"),
    "trl-2 delta": (lambda p: trl(p, "gap_delta"), "a delta, and no checkpoint"),
    "a bucket": (lambda p: Path(make_chain(p, [BEFORE, AFTER]).url), "a bucket with a chain"),
    "lfs pointer": (text("model.safetensors", LFS), "a Git LFS pointer"),
    "lfs pointer to a torch file": (text("pytorch_model.bin", LFS), "a Git LFS pointer"),
    "lfs pointer of any name": (text("weights", LFS), "a Git LFS pointer"),
    "directory with lfs pointers": (
        holding(text("model.safetensors", LFS)), "a Git LFS pointer",
    ),
    "html": (text("model.safetensors", HTML), "a page of a web server"),
    "html for a torch file": (text("model.bin", HTML), "a page of a web server"),
    "xml": (text("model.safetensors", XML), "a page of a web server"),
    "text": (text("model.safetensors", "Entry not found"), "a text file"),
    "json": (text("model.safetensors", '{"error": "Repository not found"}'), "a JSON file"),
    "config": (text("config.json", '{\n  "model_type": "llama"\n}'), "a JSON file"),
    "empty": (text("model.safetensors", ""), "the file is empty"),
    "empty torch file": (text("model.bin", ""), "the file is empty"),
    "empty of any name": (text("weights", ""), "the file is empty"),
    "gguf": (text("model.gguf", b"GGUF\x03\0\0\0" + bytes(99)), "GGUF"),
    "gguf by a wrong name": (text("m.safetensors", b"GGUF\x03\0\0\0" + bytes(99)), "GGUF"),
    "directory with gguf": (holding(text("q4.gguf", b"GGUF")), "q4.gguf"),
    "npz": (npz, "NumPy"),
    "npy": (npy, "NumPy"),
    "hdf5": (text("tf_model.h5", b"\x89HDF\r\n\x1a\n" + bytes(99)), "HDF5"),
    "flax": (text("flax_model.msgpack", b"\x81\xa6params\x80" + bytes(9)), "Flax"),
    "onnx": (text("model.onnx", b"\x08\x07\x12\x07pytorch"), "ONNX"),
    "gzip": (text("model.tar.gz", gzip.compress(b"x" * 99)), "gzip"),
    "zstd": (text("model.safetensors.zst", zstandard.compress(b"x" * 99)), "zstd"),
    "tar": (tar, "tar archive"),
    "zip": (zipped("model.zip"), "zip archive"),
    "zip by a wrong name": (zipped("model.bin"), "zip archive"),
    "index": (inside(lambda p: write(p / "model", BEFORE), INDEX), "an index"),
    "index without shards": (index_alone, "a shard is missing"),
    "optimizer": (saved("optimizer.pt", OPTIMIZER), "a trainer's own state"),
    "optimizer by another name": (saved("opt-5.pt", OPTIMIZER), "an optimizer's state"),
    "scheduler": (saved("scheduler.pt", {"last_epoch": 3}), "a trainer's own state"),
    "training_args.bin": (saved("training_args.bin", {}), "a trainer's own state"),
    "deepspeed file": (
        saved("global_step5/mp_rank_00_model_states.pt", {"module": {}}), "a trainer's own state",
    ),
    "deepspeed directory": (
        holding(text("zero_to_fp32.py", "#"), text("latest", "global_step5")), "DeepSpeed",
    ),
    "distributed checkpoint": (
        holding(text(".metadata", b"\x80\x02"), text("__0_0.distcp", b"PK")), "a distributed",
    ),
    "distcp file": (text("__0_0.distcp", b"\x80\x02}"), "a part of a distributed checkpoint"),
    "hub cache": (
        holding(text("snapshots/0/x", "x"), text("blobs/x", "x")), "no weights in this directory",
    ),
}  # fmt: skip
