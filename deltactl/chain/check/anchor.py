"""The bytes of an anchor against what its header says of them: its files, and its tensors."""

from __future__ import annotations

from pathlib import Path

from deltactl.chain.chain import Link
from deltactl.checkpoint.checkpoint import Checkpoint
from deltactl.checkpoint.state import header_digest, tensor_states
from deltactl.codec.bits import elements, touch_sum_of_all
from deltactl.core.digest import TensorState, hasher
from deltactl.core.errors import DeltactlError, Malformed
from deltactl.files.untrusted import open_regular
from deltactl.format.anchor import INDEX, AnchorFile, AnchorHeader
from deltactl.format.header import touch_sum_text, utf8


def anchor_files(anchor: Link) -> tuple[AnchorFile, ...]:
    """The files that an anchor's index names; none where the anchor is one file."""
    header = anchor.header
    assert isinstance(header, AnchorHeader)
    return header.files


def aux_files(anchor: Link) -> tuple[AnchorFile, ...]:
    """Those of them that are no shards."""
    return tuple(file for file in anchor_files(anchor) if not file.is_shard)


def has_file(path: Path, file: AnchorFile) -> bool:
    """Whether ``path`` is a file with the anchor's bytes; not for shards."""
    return path.is_file() and path.stat().st_size == file.nbytes and _digest(path) == file.digest


def _digest(path: Path) -> str:
    digest = hasher()
    with open_regular(path) as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    found: str = digest.hexdigest()
    return found


def check_file(path: Path, file: AnchorFile, anchor: Link) -> None:
    """Compare a file of an anchor, of a shard its header, with the digest that the index names.

    Raises Malformed, with the object's name for the file.
    """
    name = anchor.name.removesuffix(INDEX) + file.name
    try:
        found = header_digest(path) if file.is_shard else _digest(path)
    except DeltactlError as error:
        error.file, error.step = name, anchor.step
        raise
    fault = digest_fault(anchor, file, found)
    if fault is not None:
        raise fault


def digest_fault(anchor: Link, file: AnchorFile, found: str) -> Malformed | None:
    """The error for a file of an anchor, of a shard its header, if it has another digest."""
    if found == file.digest:
        return None
    whose = "shard's header" if file.is_shard else "file"
    return Malformed(
        f"the {whose} does not have the digest that the anchor's index names",
        file=anchor.name.removesuffix(INDEX) + file.name,
        step=anchor.step,
        expected=file.digest,
        found=found,
    )


def tensor_faults(checkpoint: Checkpoint, anchor: Link) -> list[DeltactlError]:
    """The tensors of an anchor, opened as a checkpoint, that are not those that its header names.

    Reads every byte. Each error names the object that holds the tensor.
    """
    header = anchor.header
    if not isinstance(header, AnchorHeader) or header.result_state is None:
        return []
    expected = {tensor.name: tensor for tensor in header.tensors}
    found = {tensor.name: tensor for tensor in tensor_states(checkpoint)}
    return [
        tensor_fault(
            anchor,
            _home(checkpoint, name, anchor.name),
            name,
            expected.get(name),
            found.get(name),
        )
        for name in sorted(expected.keys() | found.keys(), key=utf8)
        if expected.get(name) != found.get(name)
    ]


def tensor_fault(
    anchor: Link, file: str, tensor: str, expected: TensorState | None, found: TensorState | None
) -> Malformed:
    """The error for a tensor, in an anchor's object ``file``, that is not what it should be."""
    return Malformed(
        "the tensor does not have the digest that the anchor names",
        file=file,
        tensor=tensor,
        step=anchor.step,
        expected=_describe(expected),
        found=_describe(found),
    )


def sum_faults(checkpoint: Checkpoint, anchor: Link) -> list[DeltactlError]:
    """The tensors whose elements have another touch sum than the anchor's rows give them."""
    header = anchor.header
    assert isinstance(header, AnchorHeader)
    faults: list[DeltactlError] = []
    for name, expected in header.sums.items():
        tensor = checkpoint.tensors.get(name)
        if tensor is None:
            continue  # and that is said of it
        found = touch_sum_of_all(elements(tensor.data, tensor.dtype))
        if found != expected:
            fault = Malformed(
                "the tensor does not have the touch sum that the anchor names",
                file=_home(checkpoint, name, anchor.name),
                tensor=name,
                expected=touch_sum_text(expected),
                found=touch_sum_text(found),
            )
            faults.append(fault)
    return faults


def _home(checkpoint: Checkpoint, tensor: str, anchor: str) -> str:
    """The object that holds a tensor of an anchor whose header is in the object ``anchor``."""
    if not anchor.endswith(INDEX):
        return anchor
    files = [shard.file for shard in checkpoint.shards if tensor in shard.tensors]
    return anchor.removesuffix(INDEX) + files[0] if files else anchor


def _describe(tensor: TensorState | None) -> str:
    return "no such tensor" if tensor is None else tensor.digest
