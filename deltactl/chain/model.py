"""Which model a checkpoint is of, and which a chain; what is pushed is let in by that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shlex import quote

from deltactl.chain.admission import (
    Admitted,
    Architecture,
    Model,
    check_first,
    check_same_model,
)
from deltactl.chain.chain import Chain, Link
from deltactl.chain.check.objects import aux_files, object_of
from deltactl.chain.store import Bucket
from deltactl.checkpoint.checkpoint import Checkpoint
from deltactl.checkpoint.hf_directory import shard_of_several
from deltactl.core.errors import DeltactlError, NotFound
from deltactl.files.json_bounds import MODEL_CONFIG
from deltactl.files.untrusted import open_regular, parse_json
from deltactl.format.anchor import AnchorFile, AnchorHeader
from deltactl.format.checker import expected_file, stream_faults
from deltactl.format.delta_header import DeltaHeader
from deltactl.format.tensor_table import Table, after_delta
from deltactl.replay.rebuild import ADAPTER

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"

_MAX_CONFIG = 1 << 24  # bytes; of a model's config some thousand


def admit(checkpoint: Checkpoint, bucket: Bucket, chain: Chain, *, allow: bool) -> Admitted:
    """Whether a checkpoint may follow on the chain's tip, or begin it where there is none.

    Raises Conflict as ``admission`` does, Malformed, and what the bucket raises.
    """
    file, new = checkpoint.path, model_of(checkpoint)
    way = f"if it is meant: deltactl push {quote(str(file))} {quote(chain.url)} --allow-other-model"
    if chain.tip is None:
        return Admitted(False, check_first(new, way=way, file=file, allow=allow))
    tip = chain_model(bucket, chain, chain.tip)
    return check_same_model(tip, new, way=way, file=file, tip=chain.tip, allow=allow)


def admit_delta(header: DeltaHeader, bucket: Bucket, chain: Chain) -> tuple[str, ...]:
    """What a delta that stands on the tip changes of the model, a sentence each.

    Raises Conflict where it makes another of it: that takes a config, which deltas do not carry.
    """
    assert chain.tip is not None
    tip = chain_model(bucket, chain, chain.tip)
    new = replace(tip, tensors=after_delta(tensors_at(chain, chain.tip), header))
    way = "a delta carries no config: if it is meant, push the checkpoint with --allow-other-model"
    return check_same_model(tip, new, way=way, file=header.file, tip=chain.tip).notes


def model_of(checkpoint: Checkpoint) -> Model:
    """The model of an open checkpoint, by its tensors and the config beside them."""
    if not checkpoint.is_directory:
        return Model(checkpoint.tensors, part=shard_of_several(checkpoint.path.name))
    files = [Path(shard.file).stem for shard in checkpoint.shards]
    is_adapter = (checkpoint.path / ADAPTER_CONFIG).is_file() and files == [Path(ADAPTER).stem]
    return Model(checkpoint.tensors, read_architecture(checkpoint.path / CONFIG), is_adapter)


def read_architecture(config: Path) -> Architecture:
    """What a config file says; nothing where there is none, or none that can be read."""
    try:
        with open_regular(config) as file:
            raw = file.read(_MAX_CONFIG)
    except NotFound:
        return Architecture()
    return _architecture(raw, config)


def _architecture(raw: bytes, file: object) -> Architecture:
    try:
        document = parse_json(raw, file, bounds=MODEL_CONFIG)
    except DeltactlError:
        return Architecture()
    model_type, classes = document.get("model_type"), document.get("architectures")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        classes = []
    # FSDP makes a class of its own of a model's, and it is the same model.
    names = tuple(name.removeprefix("FSDP") for name in classes)
    return Architecture(model_type if isinstance(model_type, str) else None, names)


def chain_model(bucket: Bucket, chain: Chain, step: int) -> Model:
    """The model that a step is of: its tensors, and the config of the anchor that leads to it.

    Raises NotFound, Malformed, and what the bucket raises.
    """
    anchor, _ = chain.path(step)
    return Model(tensors_at(chain, step), _anchor_architecture(bucket, anchor))


def tensors_at(chain: Chain, step: int) -> Table:
    """The tensors of a step, by the headers of the links that lead to it.

    Raises NotFound, Malformed.
    """
    anchor, deltas = chain.path(step)
    assert isinstance(anchor.header, AnchorHeader)
    tensors: Table = {tensor.name: tensor for tensor in anchor.header.tensors}
    for delta in deltas:
        assert isinstance(delta.header, DeltaHeader)
        tensors = after_delta(tensors, delta.header)
    return tensors


def _anchor_architecture(bucket: Bucket, anchor: Link) -> Architecture:
    config = next((file for file in aux_files(anchor) if file.name == CONFIG), None)
    if config is None or config.nbytes > _MAX_CONFIG:
        return Architecture()
    return _architecture(_fetched(bucket, anchor, config), anchor.name)


def _fetched(bucket: Bucket, anchor: Link, file: AnchorFile) -> bytes:
    name = object_of(anchor, file)
    raw = bytes(bucket.read(name, 0, file.nbytes))
    for fault in stream_faults(expected_file(file, name, anchor.step), [raw]):
        raise fault
    return raw
