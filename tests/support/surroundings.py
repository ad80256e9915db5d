"""What else may lie in a checkpoint's directory, and whether all of it is still there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.checkpoints import Spec, pack_safetensors, random_tensor, read_tensors


def decorate(base: Path) -> dict[str, Any]:
    """Put all sorts of things into a checkpoint's directory; returns ``others_of`` it."""
    (base / "optimizer.pt").write_bytes(b"moments")
    (base / ".hidden").write_bytes(b"hidden")
    (base / ".git/refs").mkdir(parents=True)
    (base / ".git/refs/head").write_bytes(b"ref")
    (base / "empty").mkdir()
    (base / "private").mkdir(mode=0o700)
    (base / "private/model-00001-of-00002.safetensors").write_bytes(b"not a shard of this one")
    (base / "adapter_model.safetensors").write_bytes(
        pack_safetensors({"lora": random_tensor("F32", (3,), 1)})
    )
    (base / "link").symlink_to("config.json")
    (base / "dangling").symlink_to("nowhere")
    (base / "link-to-directory").symlink_to("tokenizer")
    (base / "run.sh").write_text("#!/bin/sh\n")
    (base / "run.sh").chmod(0o750)
    return others_of(base)


def others_of(base: Path) -> dict[str, Any]:
    """Everything but the weights: links, permissions, contents."""
    found: dict[str, Any] = {}
    for path in sorted(base.rglob("*")):
        name = path.relative_to(base).as_posix()
        if name.startswith("model") and path.parent == base:
            continue
        mode = path.lstat().st_mode
        if path.is_symlink():
            found[name] = (mode, os.readlink(path))
        else:
            found[name] = (mode, path.read_bytes() if path.is_file() else None)
    return found


def holds_weights(base: Path, tensors: Mapping[str, Spec]) -> bool:
    """Whether the shards, by their names, hold exactly these tensors."""
    found: dict[str, Spec] = {}
    for file in sorted(base.glob("model*.safetensors")):
        found |= read_tensors(file)
    return found == dict(tensors)
