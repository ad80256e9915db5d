"""The tensors that one rank owns, as a file: its shard of the next anchor.

It is made of the one before it and the rank's own parts of the deltas since, in the background.
Its header says what its tensors' digests are, so that who writes the anchor's index needs no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deltactl.checkpoint.checkpoint import Checkpoint, open_checkpoint
from deltactl.core.digest import TensorState
from deltactl.core.errors import Malformed
from deltactl.files.atomic import atomic_file
from deltactl.files.safetensors import Header
from deltactl.format.delta import Delta, open_delta
from deltactl.format.header import (
    HEADER_DIGEST,
    PLACEHOLDER,
    PREFIX,
    check_seal,
    state_from_json,
    state_to_json,
    table_rows,
    table_text,
)
from deltactl.replay.rebuild import check_tensors, write_file


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard that was written, and its tensors in order of name."""

    path: Path
    nbytes: int
    tensors: tuple[TensorState, ...]


class ShardFile:
    """The file at ``path``, replaced as a whole by each step that is written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, checkpoint: Checkpoint) -> Shard:
        """Write what this rank owns as it is."""
        return self._write(checkpoint, ())

    def advance(self, parts: Sequence[Path]) -> Shard:
        """Take this rank's parts of deltas, and check each tensor and where they lead to.

        Raises Malformed, Conflict, OSError; then the file is as it was.
        """
        with open_checkpoint(self.path) as base:
            return self._write(base, [open_delta(path) for path in parts])

    def _write(self, base: Checkpoint, deltas: Sequence[Delta]) -> Shard:
        with atomic_file(self.path) as file:
            written = write_file(base, deltas, file, metadata=_metadata)
            check_tensors(written, deltas)
            if deltas and written.state != deltas[-1].header.result_state:
                what = "the deltas do not lead to the state that the last one names"
                expected = deltas[-1].header.result_state
                raise Malformed(what, file=self.path, expected=expected, found=written.state)
            size = file.tell()
        return Shard(self.path, size, written.tensors)


def _metadata(tensors: tuple[TensorState, ...]) -> dict[str, str]:
    return {
        "format": "pt",
        PREFIX + "tensors": table_text(map(state_to_json, tensors)),
        HEADER_DIGEST: PLACEHOLDER,
    }


def states_in(header: Header, file: str) -> tuple[TensorState, ...]:
    """The tensors of a shard, as its header tells them. Raises Malformed."""
    check_seal(header.raw, header.metadata, file)
    rows = table_rows(header.metadata.get(PREFIX + "tensors", ""), file)
    states = tuple(state_from_json(row, file) for row in rows)
    entries = {(e.name, e.dtype, e.shape) for e in header.entries.values()}
    if {(s.name, s.dtype, s.shape) for s in states} != entries:
        raise Malformed("the shard's table and its tensors differ", file=file)
    return states
