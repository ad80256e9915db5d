"""The step that this machine has as a checkpoint, from which the next anchor is made.

An anchor is made of the one before it and the deltas since, in the background. Training does not
wait for it, as it would if it were written from the mirror.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deltactl.chain.transfer.snapshot import Snapshot, directory_snapshot
from deltactl.checkpoint.checkpoint import Checkpoint, open_checkpoint
from deltactl.core.digest import TensorState
from deltactl.core.errors import Malformed
from deltactl.core.progress import silent
from deltactl.files.atomic import atomic_directory
from deltactl.format.delta import Delta, open_delta
from deltactl.replay.rebuild import check_tensors, write_directory


@dataclass(frozen=True, slots=True)
class Written:
    """An anchor that is ready to be put into a bucket, and its tensors in order of name."""

    snapshot: Snapshot
    tensors: tuple[TensorState, ...]
    nbytes: int


class LocalBase:
    """A Hugging Face directory at ``path``, replaced as a whole by each step that is written.

    ``aux``: the files that travel with every anchor, by relative path.
    """

    def __init__(self, path: Path, aux: Mapping[str, Path]) -> None:
        self.path, self._aux = path, aux

    def write(self, checkpoint: Checkpoint, step: int) -> Written:
        """Write a checkpoint as it is."""
        return self._write(checkpoint, (), step, None)

    def advance(self, deltas: Sequence[Path], step: int, state: str) -> Written:
        """Take the deltas that lead to a step, and check each tensor and the state.

        Raises Malformed, Conflict, OSError; then the directory is as it was.
        """
        with open_checkpoint(self.path) as base:
            return self._write(base, [open_delta(path) for path in deltas], step, state)

    def _write(
        self, base: Checkpoint, deltas: Sequence[Delta], step: int, state: str | None
    ) -> Written:
        with atomic_directory(self.path) as directory:
            written = write_directory(base, deltas, directory, aux=self._aux, progress=silent)
            check_tensors(written, deltas)
            if state is not None and written.state != state:
                what = "the deltas do not lead to the step's state"
                raise Malformed(
                    what, file=self.path, step=step, expected=state, found=written.state
                )
            snapshot = directory_snapshot(written, step, directory, self._aux)
        files = {n: self.path / p.relative_to(directory) for n, p in snapshot.files.items()}
        snapshot = replace(snapshot, path=self.path / snapshot.path.name, files=files)
        paths = [snapshot.path, *files.values()]
        return Written(snapshot, written.tensors, sum(path.stat().st_size for path in paths))
