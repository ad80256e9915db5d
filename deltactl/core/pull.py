"""A step of a chain, rebuilt bit for bit into a directory that can be served."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deltactl.core.anchor import INDEX, AnchorFile, AnchorHeader
from deltactl.core.apply import carry_over, prove
from deltactl.core.chain import Chain, Link, read_chain
from deltactl.core.checkpoint import Checkpoint, open_checkpoint
from deltactl.core.delta import Delta, open_delta
from deltactl.core.digest import hasher
from deltactl.core.errors import Conflict, DeltactlError, Malformed, NotFound, UsageError
from deltactl.core.files import atomic_directory
from deltactl.core.identity import state_of
from deltactl.core.parallel import Meter
from deltactl.core.progress import Progress, silent
from deltactl.core.rebuild import write_directory
from deltactl.core.store import Bucket

MARKER = ".deltactl.json"
"""A file that pull leaves in what it wrote: bucket, step and state. Its word is never taken for the
weights, which are hashed; it says that the directory is pull's to replace."""


@dataclass(frozen=True, slots=True)
class PullReport:
    """What ``pull`` did. ``bytes_fetched``: of links, headers read on the way not counted;
    ``from_step``: the step that the directory held and that was built on; ``written``: False where it
    held the wanted one; ``proven``: False where no digest says what the result should be (TRL's);
    ``newer``: steps above that are in the bucket and cannot be rebuilt."""

    step: int
    state: str
    bytes_fetched: int
    links: int
    from_step: int | None
    written: bool
    proven: bool
    newer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Held:
    """What a directory holds: its state, and the chain's step of that state, if it is one."""

    state: str
    step: int | None


def pull(
    bucket: Bucket, dest: Path, *, step: int | None = None, progress: Progress = silent
) -> PullReport:
    """Make ``dest`` a Hugging Face directory of a step, the tip by default.

    If ``dest`` holds an earlier step of the chain only the deltas between are fetched, unless an anchor
    is the shorter way. Nothing is visible before it is proven. Raises NotFound, Malformed, and Conflict
    where ``dest`` holds something that is not of this chain.
    """
    chain = read_chain(bucket)
    return materialize(bucket, chain, dest, step=step, progress=progress)


def materialize(
    bucket: Bucket,
    chain: Chain,
    dest: Path,
    *,
    step: int | None = None,
    progress: Progress = silent,
) -> PullReport:
    """``pull`` of a chain whose headers have been read."""
    wanted = wanted_step(chain, step)
    newer = tuple(s for s in chain.steps if s > wanted) if step is None else ()
    held = _look(chain, dest, wanted, progress)
    if held is not None and held.step == wanted:
        proven = chain.state_at(wanted) is not None
        return PullReport(wanted, held.state, 0, 0, wanted, False, proven, newer)
    anchor, deltas = _shortest(chain, held.step if held else None, wanted)
    links = [*([anchor] if anchor else []), *deltas]
    expected = chain.state_at(wanted)
    with fetched(bucket, links, dest, progress) as places, contextlib.ExitStack() as stack:
        opened = [_open_checked(places[link.name]) for link in deltas]
        base = stack.enter_context(open_checkpoint(_base_place(anchor, places, dest)))
        state = _write(chain, base, anchor, opened, dest, wanted, expected, progress)
    return PullReport(
        step=wanted,
        state=state,
        bytes_fetched=sum(link.bytes for link in links),
        links=len(links),
        from_step=None if anchor or held is None else held.step,
        written=True,
        proven=expected is not None,
        newer=newer,
    )


def wanted_step(chain: Chain, step: int | None) -> int:
    """The step asked for, or the tip. Raises NotFound; Malformed where nothing can be rebuilt."""
    if step is not None:
        return step
    if chain.tip is not None:
        return chain.tip
    if chain.problems:
        raise chain.problems[0]
    if chain.links:
        chain.path(chain.links[-1].step)
    raise NotFound(
        "the bucket holds no chain", file=chain.url, hint=f"deltactl push CKPT {chain.url}"
    )


def _look(chain: Chain, dest: Path, wanted: int, progress: Progress) -> _Held | None:
    """What ``dest`` holds; None for nothing. Raises Conflict unless it may be replaced."""
    if dest.is_file():
        raise UsageError("the destination is a file; pull writes a directory", file=dest)
    if not dest.exists() or not any(dest.iterdir()):
        return None
    marker = _read_marker(dest)
    try:
        with open_checkpoint(dest) as checkpoint:
            state = state_of(checkpoint, progress=progress)
    except DeltactlError as error:
        if marker is None:
            raise _not_ours(dest, str(error)) from None
        return _Held("", None)
    steps = [link.step for link in chain.links if link.result_state == state]
    if steps:
        return _Held(state, max((s for s in steps if s <= wanted), default=None))
    if marker is None:
        raise _not_ours(dest, f"state {state}")
    same = marker.get("state") == state and marker.get("bucket") == chain.url
    step = marker.get("step")
    if not same or not isinstance(step, int) or step > wanted or not chain.links_at(step):
        return _Held(state, None)
    # Only links without digests leave nothing but the marker's word for which step this is.
    return _Held(state, step if chain.state_at(step) is None else None)


def _read_marker(dest: Path) -> dict[str, object] | None:
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


def _shortest(chain: Chain, held: int | None, wanted: int) -> tuple[Link | None, list[Link]]:
    """The links to fetch, fewest bytes: deltas on the step at hand, or an anchor and its deltas."""
    near: list[Link] | None = None
    if held is not None and held < wanted:
        with contextlib.suppress(DeltactlError):
            near = chain.path_from(held, wanted)
    try:
        anchor, deltas = chain.path(wanted)
    except DeltactlError:
        if near is None:
            raise
        return None, near
    if near is not None and sum(d.bytes for d in near) < sum(
        link.bytes for link in (anchor, *deltas)
    ):
        return None, near
    return anchor, deltas


@contextlib.contextmanager
def fetched(
    bucket: Bucket, links: Sequence[Link], near: Path, progress: Progress
) -> Iterator[dict[str, Path]]:
    """Where each link's file, or its directory, is while the block runs, by the link's name.

    Where the bucket's objects can be mapped nothing is copied; otherwise they are fetched into a
    directory beside ``near``, which is on the disk that the result goes to.
    """
    with contextlib.ExitStack() as stack:
        places: dict[str, Path] = {}
        meter = Meter(progress, "fetching", sum(link.bytes for link in links))
        for link in links:
            path = bucket.path(link.name)
            if path is None:
                near.parent.mkdir(parents=True, exist_ok=True)
                fresh = stack.enter_context(
                    tempfile.TemporaryDirectory(prefix=f".{near.name}.", dir=near.parent)
                )
                path = _fetch(bucket, link, Path(fresh), meter)
            else:
                meter.add(link.bytes)
            places[link.name] = path.parent if link.name.endswith(INDEX) else path
        yield places


def _fetch(bucket: Bucket, link: Link, directory: Path, meter: Meter) -> Path:
    """Fetch a link's objects; returns where the one that names the link is."""
    prefix = link.name.rsplit("/", 1)[0] + "/"
    for item in link.objects:
        target = directory / item.name.removeprefix(prefix)
        target.parent.mkdir(parents=True, exist_ok=True)
        bucket.fetch(item.name, target)
        meter.add(item.size)
    return directory / link.name.removeprefix(prefix)


def _open_checked(path: Path) -> Delta:
    delta = open_delta(path)
    if delta.header.payload_digest is not None:
        delta.check_payload()
    return delta


def _base_place(anchor: Link | None, places: Mapping[str, Path], dest: Path) -> Path:
    return places[anchor.name] if anchor is not None else dest


def _write(
    chain: Chain,
    base: Checkpoint,
    anchor: Link | None,
    deltas: Sequence[Delta],
    dest: Path,
    step: int,
    expected: str | None,
    progress: Progress,
) -> str:
    """Write the step into ``dest``, prove it, give it its name; returns its state."""
    replaces = dest.exists()
    aux = {} if anchor is None else _anchor_aux(anchor, base)
    with atomic_directory(dest) as directory:
        written = write_directory(base, deltas, directory, aux=aux, progress=progress)
        if anchor is not None:
            _check_aux(anchor, directory)
            _prove_anchor(anchor, base, written.state, expected)
        prove(base, deltas, written, expected)
        if replaces:
            carry_over(dest, directory, _weights_of(dest))
        marker = {"bucket": chain.url, "step": step, "state": written.state}
        (directory / MARKER).unlink(missing_ok=True)
        (directory / MARKER).write_text(json.dumps(marker) + "\n")
    return written.state


def _weights_of(dest: Path) -> set[str]:
    return {path.name for path in dest.glob("*.safetensors")}


def _anchor_files(anchor: Link) -> list[AnchorFile]:
    header = anchor.header
    assert isinstance(header, AnchorHeader)
    return [file for file in header.files if not file.is_shard]


def _anchor_aux(anchor: Link, base: Checkpoint) -> dict[str, Path]:
    """The files that travel with an anchor, as its index names them."""
    return {file.name: base.path / file.name for file in _anchor_files(anchor)}


def _check_aux(anchor: Link, directory: Path) -> None:
    for file in _anchor_files(anchor):
        name = anchor.name.removesuffix(INDEX) + file.name
        check_file(directory / file.name, file.digest, name, anchor.step)


def check_file(path: Path, expected: str, name: str, step: int) -> None:
    """Compare a whole file with its digest; ``name`` is the object's. Raises Malformed."""
    digest = hasher()
    with open(path, "rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != expected:
        raise Malformed(
            "the file does not have the digest that the anchor's index names",
            file=name,
            step=step,
            expected=expected,
            found=digest.hexdigest(),
        )


def _prove_anchor(anchor: Link, base: Checkpoint, state: str, expected: str | None) -> None:
    """If the result is wrong, see whether the anchor's own bytes are to blame. Raises Malformed."""
    if expected is None or state == expected:
        return
    found = state_of(base)
    if found != anchor.result_state:
        raise Malformed(
            "the anchor's tensors do not have the state that it names",
            file=anchor.name,
            step=anchor.step,
            expected=anchor.result_state,
            found=found,
        )
