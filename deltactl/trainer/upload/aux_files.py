"""The files that travel with every anchor, so that it can be served: config, tokenizer, others."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from deltactl.checkpoint.hf_directory import aux_files
from deltactl.core.errors import UsageError
from deltactl.files.names import is_plain_path
from deltactl.files.signatures import check_fetched

CONFIGS = ("config", "generation_config")


@runtime_checkable
class Saves(Protocol):
    """What writes files of its own into a directory: a tokenizer, a processor, a config."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write them."""
        ...


Files = str | os.PathLike[str] | Saves


def collect(model: Any, files: Files | None, dtype: str | None, place: Path) -> dict[str, Path]:
    """The files by relative path, at their places or written into the directory ``place``.

    ``files``: a directory, of which all but weights is taken as it is; or a tokenizer, which is
    saved beside the model's own config and generation config; None: those two, as far as the model
    has them. ``dtype``: what the config says of the weights, where they are published otherwise
    than they are held. Raises UsageError, NotFound, Malformed, NotAllowed;
    Unsupported for a file that Git LFS has not fetched.
    """
    if isinstance(files, str | os.PathLike):
        directory = Path(files)
        if not directory.is_dir():
            what = "the files that travel with anchors are given as a directory"
            raise UsageError(what, file=directory, hint="name a directory, or give the tokenizer")
        return _checked(aux_files(directory), directory)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in CONFIGS:
        config = getattr(model, name, None)
        if isinstance(config, Saves):
            _save_config(config, model, dtype, place)
    if files is not None:
        files.save_pretrained(str(place))
    return _checked(aux_files(place), place)


def _save_config(config: Saves, model: Any, dtype: str | None, place: Path) -> None:
    """As ``model.save_pretrained`` does: with the class and the dtype of the weights."""
    own: Any = copy.deepcopy(config)
    if hasattr(own, "architectures"):
        # fully_shard makes a class of its own of the model's, which no server knows.
        own.architectures = [type(model).__name__.removeprefix("FSDP")]
    held = str(getattr(model, "dtype", "")).removeprefix("torch.")
    for key in ("dtype", "torch_dtype"):  # the later name first; the other is its alias, or gone
        if hasattr(own, key) and (dtype or held):
            setattr(own, key, dtype or held)
            break
    own.save_pretrained(str(place))


def _checked(found: dict[str, Path], directory: Path) -> dict[str, Path]:
    for name, path in found.items():
        if not is_plain_path(name):
            what = "the file's name cannot travel with an anchor"
            raise UsageError(what, file=directory, found=name)
        check_fetched(path)
    return found
