"""What a server says of itself: each rank's words, checked, and what they amount to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deltactl.core import errors
from deltactl.core.errors import DeltactlError, Malformed, Unsupported
from deltactl.server.model import Spec

PROTOCOL = 2
WRITTEN = "committed"
UNWRITTEN = frozenset({"refused", "failed", "rolled_back"})
"""Phases in which an update has come to its end: its bits are live, or nothing of it is."""

_PHASES = frozenset({"staging", "staged", "ready", "already", WRITTEN, *UNWRITTEN})
_IDENTITIES = ("failed", "unknown", "running", "known")  # of several ranks the first one counts


@dataclass(frozen=True, slots=True)
class UpdateState:
    """An update that the server holds and nobody has acknowledged, over all ranks.

    ``written``: whether any rank has written it; ``elements``: to write, or written; ``seconds``:
    of the slowest rank, by part; ``error``: of the first rank that has one; ``staged_bytes``: what
    it takes in memory; ``worked_bytes``: of all work, which rise while it gets on. ``unasked``:
    whether a model of which tensors were reloaded could not be tried, as the KV cache sleeps.
    """

    id: str
    phase: str
    from_step: int | None = None
    to_step: int | None = None
    full: bool = False
    written: bool = False
    elements: int = 0
    staged_bytes: int = 0
    fetched_bytes: int = 0
    worked_bytes: int = 0
    seconds: Mapping[str, float] | None = None
    reloaded: tuple[str, ...] = ()
    unasked: bool = False
    error: DeltactlError | None = None


@dataclass(frozen=True, slots=True)
class Audit:
    """A comparison of what is live with the chain; phase: running, done or failed."""

    phase: str
    checked: int
    differing: tuple[str, ...]
    unaudited: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineState:
    """What all ranks together say. ``sound``: nothing says that the weights are not what the state
    names; where ``poisoned`` is set, or the ranks hold different things, nobody knows them.
    ``unmapped``, ``refused``: tensors that only vLLM's own loader can load, and those that it
    should not, each with the reason; ``proven``: the layers that it may load, by name. ``server``:
    one word for each engine that was ever made. ``draft``: of a second model, which guesses tokens,
    as vLLM's ``speculative_config``.
    ``doubt``: why the weights are no state that the server knows; then it was not deltactl who
    wrote them. ``asleep``: what of "weights" and "kv_cache" vLLM has given back."""

    world_size: int
    dtype: str
    model: str
    version: str
    backend: bool
    identity: str
    step: int | None
    state: str | None
    poisoned: DeltactlError | None
    error: DeltactlError | None
    update: UpdateState | None
    session: bool
    mapped: int | None
    unmapped: Mapping[str, str]
    ignored: frozenset[str]
    refused: Mapping[str, str]
    proven: tuple[str, ...]
    audit: Audit | None
    server: str | None = None
    draft: Mapping[str, Any] | None = None
    doubt: DeltactlError | None = None
    asleep: frozenset[str] = frozenset()

    @property
    def sound(self) -> bool:
        return self.poisoned is None

    @property
    def tensors(self) -> int | None:
        """How many the checkpoint has, mapped or not; None while there is no map."""
        return None if self.mapped is None else self.mapped + len({*self.unmapped, *self.ignored})


@dataclass(frozen=True, slots=True)
class Seen:
    """A server at a moment. ``certain``: read from it, and not concluded from what it answered."""

    engine: EngineState
    paused: bool
    label: str | None
    certain: bool = True

    @property
    def update(self) -> UpdateState | None:
        return self.engine.update

    def expect(self, **changes: Any) -> Seen:
        """What is to be seen after a request that was answered well."""
        own = {key: value for key, value in changes.items() if key in ("paused", "label")}
        rest = {key: value for key, value in changes.items() if key not in own}
        return replace(self, engine=replace(self.engine, **rest), certain=False, **own)


def of_ranks(replies: Sequence[Any], call: str, url: str) -> EngineState:
    """The ranks' replies to one ``call`` as one. Raises Malformed, Unsupported."""
    expected = [(rank, len(replies), call) for rank in range(len(replies))]
    pairs = zip(replies, expected, strict=True)
    ranks = [_checked(reply, known, url) for reply, known in pairs]
    if not ranks:
        raise Malformed("no rank of the server answered", file=url)
    first = ranks[0]
    # A rank that has none is not through with finding it out.
    states = {str(rank.get("state")) for rank in ranks if rank.get("state") is not None}
    update, torn = _update(ranks, url)
    poisoned = next((error for rank in ranks if (error := error_of(rank.get("poisoned")))), None)
    if poisoned is None and (torn or len(states) > 1):
        held = ", ".join(f"rank {n}: step {rank.get('step')}" for n, rank in enumerate(ranks))
        poisoned = Malformed("the server's ranks hold different weights", file=url, found=held)
    maps = [found for rank in ranks if isinstance(found := rank.get("map"), dict)]
    return EngineState(
        world_size=len(ranks),
        dtype=str(first.get("dtype")),
        model=str(first.get("model")),
        version=str(first.get("deltactl")),
        backend=all(rank.get("backend") is True for rank in ranks),
        identity=_identity(ranks),
        step=_integer(first.get("step")),
        state=first.get("state") if isinstance(first.get("state"), str) else None,
        poisoned=poisoned,
        error=next((error for rank in ranks if (error := error_of(rank.get("error")))), None),
        update=update,
        session=any(rank.get("session") is True for rank in ranks),
        mapped=_integer(maps[0].get("tensors")) if len(maps) == len(ranks) else None,
        unmapped={str(k): str(v) for found in maps for k, v in _mapping(found, "unmapped").items()},
        ignored=frozenset(str(name) for found in maps for name in _list(found, "ignored")),
        refused={str(k): str(v) for found in maps for k, v in _mapping(found, "refused").items()},
        proven=tuple(dict.fromkeys(str(one) for found in maps for one in _list(found, "proven"))),
        audit=_audit(ranks),
        server=first.get("server") if isinstance(first.get("server"), str) else None,
        draft=found if isinstance(found := first.get("draft"), dict) else None,
        doubt=next((error for rank in ranks if (error := error_of(rank.get("doubt")))), None),
        asleep=frozenset(str(tag) for rank in ranks for tag in _list(rank, "asleep")),
    )


def specs_in(reply: Mapping[str, Any]) -> dict[str, Spec]:
    """``tensors`` of a rank's reply; what is no row of theirs is left out."""
    found = {}
    for name, row in _mapping(reply, "tensors").items():
        match row:
            case [str(dtype), [*shape]] if all(type(size) is int for size in shape):
                found[name] = dtype, tuple(shape)
    return found


def error_of(facts: object) -> DeltactlError | None:
    """An error that the server tells, as the class that it was there."""
    if not isinstance(facts, dict):
        return None
    kind = getattr(errors, str(facts.get("kind")), DeltactlError)
    if not (isinstance(kind, type) and issubclass(kind, DeltactlError)):
        kind = DeltactlError
    keys = ("file", "tensor", "expected", "found", "hint")
    known: dict[str, Any] = {k: str(facts[k]) for k in keys if facts.get(k) is not None}
    what = str(facts.get("what", "the server names no reason"))
    return kind(what, step=_integer(facts.get("step")), **known)


def _checked(reply: Any, expected: tuple[int, int, str], url: str) -> dict[str, Any]:
    """After an error in one rank vLLM takes each later reply of the others for that to the call
    before. The ``call`` that a reply gives back shows it."""
    found = None
    if isinstance(reply, dict):
        found = (reply.get("rank"), reply.get("world_size"), reply.get("call"))
    if found != expected:
        raise Malformed(
            "the replies of the server's ranks are out of step",
            file=url,
            expected=f"rank {expected[0]} of {expected[1]}, call {expected[2]}",
            found=str(reply)[:100] if found is None else "rank {} of {}, call {}".format(*found),
            hint="restart the server: an earlier error has left replies in vLLM's queue",
        )
    if reply.get("protocol") != PROTOCOL:
        raise Unsupported(
            "the deltactl in the server is of another version",
            file=url,
            expected=f"protocol {PROTOCOL}",
            found=f"protocol {reply.get('protocol')}, deltactl {reply.get('deltactl')}",
            hint="install the same version on both sides",
        )
    return dict(reply)


def _identity(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Of all ranks: the first of _IDENTITIES that one names."""
    found = [rank.get("identity") for rank in ranks]
    return next((identity for identity in _IDENTITIES if identity in found), "unknown")


def _update(ranks: Sequence[Mapping[str, Any]], url: str) -> tuple[UpdateState | None, bool]:
    """The update over all ranks, and whether some have written it and others have not."""
    rows = [found for rank in ranks if isinstance(found := rank.get("update"), dict)]
    if not rows:
        return None, False
    phases = [str(row.get("phase")) for row in rows]
    whole = len(rows) == len(ranks) and len({str(row.get("id")) for row in rows}) == 1
    unknown = next((phase for phase in phases if phase not in _PHASES), None)
    if unknown is not None:
        raise Malformed("the server names an unknown phase", file=url, found=unknown)
    first = rows[0]
    torn = WRITTEN in phases and (not whole or set(phases) != {WRITTEN})
    error = next((error for row in rows if (error := error_of(row.get("error")))), None)
    timings = [_mapping(row, "seconds") for row in rows]
    parts = {str(part) for timing in timings for part in timing}
    update = UpdateState(
        id=str(first.get("id")),
        phase=_phase(phases) if whole else "failed",
        from_step=_integer(first.get("from_step")),
        to_step=_integer(first.get("to_step")),
        full=first.get("full") is True,
        written=WRITTEN in phases,
        elements=sum(_integer(row.get("elements")) or 0 for row in rows),
        staged_bytes=sum(_integer(row.get("bytes")) or 0 for row in rows),
        fetched_bytes=max(_integer(row.get("fetched_bytes")) or 0 for row in rows),
        worked_bytes=sum(_integer(row.get("worked_bytes")) or 0 for row in rows),
        seconds={part: max(_number(timing.get(part)) for timing in timings) for part in parts},
        reloaded=tuple(sorted({str(name) for row in rows for name in _list(row, "reloaded")})),
        unasked=any(row.get("unasked") is True for row in rows),
        error=error or (None if whole else _unlike(url)),
    )
    return update, torn


def _phase(phases: Sequence[str]) -> str:
    """Of all ranks: what is bad counts first, then who is furthest behind."""
    order = ("staging", "failed", "refused", "rolled_back", "staged", "ready", "already", WRITTEN)
    return next(phase for phase in order if phase in phases)


def _unlike(url: str) -> DeltactlError:
    return Malformed("the server's ranks hold different updates", file=url)


def _audit(ranks: Sequence[Mapping[str, Any]]) -> Audit | None:
    rows = [found for rank in ranks if isinstance(found := rank.get("audit"), dict)]
    if len(rows) != len(ranks):
        return None
    phases = {str(row.get("phase")) for row in rows}
    return Audit(
        phase=next((p for p in ("failed", "running", "done") if p in phases), "failed"),
        checked=max(_integer(row.get("checked")) or 0 for row in rows),
        differing=tuple(sorted({str(n) for row in rows for n in _list(row, "differing")})),
        unaudited=tuple(sorted({str(n) for row in rows for n in _list(row, "unaudited")})),
    )


def _integer(value: object) -> int | None:
    return value if type(value) is int else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _mapping(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = row.get(key)
    return found if isinstance(found, dict) else {}


def _list(row: Mapping[str, Any], key: str) -> list[Any]:
    found = row.get(key)
    return found if isinstance(found, list) else []
