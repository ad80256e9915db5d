"""What lies in the directory that a step is pulled into, and what of it may be replaced."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from deltactl.chain.chain import Chain
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.checkpoint.foreign import TRAINER_STATE
from deltactl.checkpoint.hf_directory import find_weights
from deltactl.checkpoint.state import state_of
from deltactl.core.errors import Conflict, DeltactlError, UsageError, listed
from deltactl.core.progress import Progress
from deltactl.files.names import is_plain_path
from deltactl.format.anchor import AnchorFile
from deltactl.format.checker import has_file

MARKER = ".deltactl.json"
"""A file that pull leaves in what it wrote: bucket, step and state, and the digests of the files
beside the weights. Its word is never taken for the weights, which are hashed; it says that the
directory is pull's to replace."""

_OUR_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True, slots=True)
class HeldStep:
    """What a directory holds: its state, the chain's step of that state, if it is one, and the step
    that pull marked it by, if it is unchanged since: the chain may have lost that step."""

    state: str
    step: int | None
    marked: int | None = None


def look(chain: Chain, dest: Path, wanted: int | None, progress: Progress) -> HeldStep | None:
    """What ``dest`` holds, as a step up to ``wanted``; None for nothing.

    Raises Conflict unless it may be replaced.
    """
    if dest.is_file():
        raise UsageError("the destination is a file; pull writes a directory", file=dest)
    if not dest.exists() or not any(dest.iterdir()):
        return None
    marker = read_marker(dest)
    try:
        with open_checkpoint(dest) as checkpoint:
            state = state_of(checkpoint, progress=progress)
    except DeltactlError as error:
        if marker is None:
            raise _not_ours(dest, str(error)) from None
        return HeldStep("", None)
    steps = [link.step for link in chain.links if link.result_state == state]
    if steps:
        return HeldStep(
            state, max((s for s in steps if wanted is None or s <= wanted), default=None)
        )
    if marker is None:
        raise _not_ours(dest, f"state {state}")
    same = marker.get("state") == state and marker.get("bucket") == chain.url
    step = marker.get("step")
    if not same or not isinstance(step, int):
        return HeldStep(state, None)
    if (wanted is not None and step > wanted) or not chain.links_at(step):
        return HeldStep(state, None, step)
    # Only links without digests leave nothing but the marker's word for which step this is.
    return HeldStep(state, step if chain.state_at(step) is None else None)


def read_marker(dest: Path) -> dict[str, object] | None:
    """What pull noted of what it wrote; None for nothing."""
    try:
        marker = json.loads((dest / MARKER).read_bytes())
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None


def _not_ours(dest: Path, found: str) -> Conflict:
    return Conflict(
        "the destination holds something that is not of this chain",
        file=dest,
        expected="no such directory, an empty one, or a step of the chain",
        found=found,
        hint="pull into a new directory",
    )


def check_no_trainer(dest: Path, chain: Chain) -> None:
    """Raise Conflict where a trainer keeps its state in ``dest``, or one level below: it goes with
    the weights that are there."""
    found = _trainer_state(dest)
    if found:
        raise Conflict(
            "a trainer keeps its state in the destination, beside the weights to be replaced",
            file=dest,
            found=listed(found),
            hint="pull into a new directory; to replace the weights there all the same: "
            f"deltactl pull {quote(chain.url)} {quote(str(dest))} --force",
        )


def _trainer_state(dest: Path) -> list[str]:
    found = []
    for path in dest.iterdir():
        if TRAINER_STATE.fullmatch(path.name):
            found.append(path.name)
        elif path.is_dir():
            with contextlib.suppress(PermissionError):  # lost+found, say: nobody trains in it
                names = (below.name for below in path.iterdir())
                found += [f"{path.name}/{n}" for n in names if TRAINER_STATE.fullmatch(n)]
    return sorted(found)


def marker_of(chain: Chain, step: int, state: str, files: Sequence[AnchorFile]) -> str:
    """The text of the marker; ``files``: what lies beside the weights."""
    beside = {file.name: file.digest for file in files}
    marker = {"bucket": chain.url, "step": step, "state": state, "files": beside}
    return json.dumps(marker) + "\n"


def outdated(dest: Path, files: Sequence[AnchorFile]) -> list[str]:
    """The files that pull wrote beside the weights in ``dest``, that nobody has changed since, and
    that are not among ``files``: such as the config of another model."""
    noted = (read_marker(dest) or {}).get("files")
    if not isinstance(noted, dict):
        return []
    names = {file.name for file in files}
    return [
        name
        for name, digest in noted.items()
        if is_plain_path(name)
        and name not in names
        and (dest / name).is_file()
        and has_file(dest / name, AnchorFile(name, (dest / name).stat().st_size, digest, False))
    ]


def weights_of(dest: Path) -> set[str]:
    """The files that a new step replaces, and that would be mistaken for its own if they stayed."""
    names = {path.name for path in dest.iterdir() if _OUR_WEIGHTS.fullmatch(path.name)}
    with contextlib.suppress(DeltactlError):
        files = find_weights(dest).files
        names |= {*files, *(file.split("-")[0] + ".bin.index.json" for file in files)}
    return names
