"""A chain: the links in a bucket, in order, and the way from an anchor to a step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from shlex import quote

from deltactl.chain.store import Object
from deltactl.core.errors import DeltactlError, Malformed, NotFound
from deltactl.format.anchor import INDEX, AnchorHeader
from deltactl.format.delta_header import DeltaHeader
from deltactl.format.delta_index import DELTA_INDEX
from deltactl.format.link_names import anchor_directory as anchor_directory
from deltactl.format.link_names import anchor_file_name as anchor_file_name
from deltactl.format.link_names import delta_directory as delta_directory
from deltactl.format.link_names import delta_name as delta_name


@dataclass(frozen=True, slots=True)
class Link:
    """An anchor or a delta in a bucket. ``name``: the object with its header; ``bytes``: of all its
    objects. None: not known, in links that TRL wrote."""

    step: int
    kind: str
    name: str
    bytes: int
    header: DeltaHeader | AnchorHeader
    objects: tuple[Object, ...]

    @property
    def directory(self) -> str | None:
        """What the names of its objects begin with, where it is a directory: "anchors/step_N/"."""
        directory, slash, name = self.name.rpartition("/")
        return directory + slash if name in (INDEX, DELTA_INDEX) else None

    @property
    def dialect(self) -> str:
        return self.header.dialect

    @property
    def encoding(self) -> str | None:
        return self.header.encoding if isinstance(self.header, DeltaHeader) else None

    @property
    def base_state(self) -> str | None:
        return self.header.base_state if isinstance(self.header, DeltaHeader) else None

    @property
    def result_state(self) -> str | None:
        return self.header.result_state

    @property
    def total_elements(self) -> int | None:
        return self.header.total_elements

    @property
    def changed_elements(self) -> int | None:
        """Elements whose bits the link changes; None for an anchor."""
        return self.header.changed_elements if isinstance(self.header, DeltaHeader) else None

    @property
    def sparsity(self) -> float | None:
        """Share of elements that keep their bits; None for an anchor, or where it is not known."""
        return self.header.sparsity if isinstance(self.header, DeltaHeader) else None


@dataclass(frozen=True, slots=True)
class Way:
    """Links that lead to a step, in the order in which they are applied: an anchor and deltas, or,
    where ``anchor`` is None, deltas alone, upon a step that is held."""

    anchor: Link | None
    deltas: tuple[Link, ...]

    @property
    def links(self) -> tuple[Link, ...]:
        return self.deltas if self.anchor is None else (self.anchor, *self.deltas)

    @property
    def nbytes(self) -> int:
        return sum(link.bytes for link in self.links)


class Chain:
    """The links of a bucket, in order of step, a step's delta before its anchor.

    ``problems``: objects with a link's name that are none. ``bytes_read``, ``requests``: what it
    took to read the headers; the bucket's listing is one request. ``unnamed``: objects in links'
    directories that no index names, of links that were not finished and of tries before.
    ``all_steps``: the steps that the bucket has objects for, sound or not. ``starts``: the anchors
    that can be rebuilt from, by step; not those that contradict the deltas which lead to them.
    """

    def __init__(
        self,
        links: Iterable[Link],
        problems: Iterable[DeltactlError] = (),
        bytes_read: int = 0,
        url: str = "",
        requests: int = 0,
        unnamed: Iterable[Object] = (),
    ) -> None:
        self.unnamed = tuple(unnamed)
        self.links = tuple(sorted(links, key=lambda link: (link.step, link.kind == "anchor")))
        self.problems = tuple(problems)
        self.bytes_read = bytes_read
        self.requests = requests
        self.url = url
        self.deltas = {link.step: link for link in self.links if link.kind == "delta"}
        self.anchors = {link.step: link for link in self.links if link.kind == "anchor"}
        self.steps = sorted({link.step for link in self.links})
        faulty = {problem.step for problem in self.problems if problem.step is not None}
        self.all_steps = sorted({*self.steps, *faulty})
        self._states: dict[int, str | None] = {}
        for step in self.steps:
            self._states[step] = self._state(self.deltas.get(step), self.anchors.get(step))
        self.starts = {
            step: anchor
            for step, anchor in self.anchors.items()
            if anchor.result_state in (None, self._states[step])
        }

    def _state(self, delta: Link | None, anchor: Link | None) -> str | None:
        """A step's state: where its links contradict each other, the delta's if that stands."""
        if delta is not None and delta.result_state is not None and self.stands(delta):
            return delta.result_state
        return (anchor.result_state if anchor else None) or (delta.result_state if delta else None)

    def links_at(self, step: int) -> list[Link]:
        """The step's delta and anchor, as far as it has them."""
        return [table[step] for table in (self.deltas, self.anchors) if step in table]

    def state_at(self, step: int) -> str | None:
        """The state that a step leads to; None where TRL's links do not say."""
        return self._states.get(step)

    def states(self, last: int | None = None) -> dict[str, int]:
        """The states that are known, and the newest step that each is, by default of all; else of
        those up to ``last``, and where none is, the first above."""
        found: dict[str, int] = {}
        for step in self.steps:
            state = self._states[step]
            if state is not None and (last is None or step <= last or state not in found):
                found[state] = step
        return found

    def newer(self, step: int | None) -> tuple[int, ...]:
        """The steps above one, or above none at all, that the bucket has objects for; those that
        are above the tip cannot be rebuilt."""
        return tuple(n for n in self.all_steps if step is None or n > step)

    def before(self, delta: Link) -> int | None:
        """The step that a delta stands on: the one it names, else the nearest below it."""
        if isinstance(delta.header, DeltaHeader) and delta.header.base_step is not None:
            return delta.header.base_step
        return self.below(delta.step)

    def below(self, step: int) -> int | None:
        """The nearest step below one. Its links may be faulty; then what stands on them stands on
        nothing, and not on the next sound step."""
        at = bisect_left(self.all_steps, step)
        return self.all_steps[at - 1] if at else None

    def stands(self, delta: Link) -> bool:
        """Whether the step below a delta is there and is the state that the delta counts on."""
        before = self.before(delta)
        if before is None or before >= delta.step or not self.links_at(before):
            return False
        return delta.base_state is None or delta.base_state == self.state_at(before)

    @cached_property
    def tip(self) -> int | None:
        """The newest step that can be rebuilt; None where there is none."""
        good: set[int] = set()
        for step in self.steps:
            delta = self.deltas.get(step)
            if step in self.starts or (
                delta is not None and self.stands(delta) and self.before(delta) in good
            ):
                good.add(step)
        return max(good, default=None)

    def numbered(self, step: int | None) -> int | None:
        """The step that a number means: one below 0 counts from the tip back, which is -1; None
        means none. Raises NotFound where that leads past the first step."""
        if step is None or step >= 0:
            return step
        steps = [n for n in self.steps if self.tip is not None and n <= self.tip]
        if -step > len(steps):
            raise NotFound(
                "the chain has fewer steps than that",
                file=self.url,
                expected=f"{-step} steps",
                found=f"{len(steps)} up to its tip",
                hint=f"deltactl log {quote(self.url)}",
            )
        return steps[step]

    def wanted(self, step: int | None) -> int:
        """The step asked for, or the tip. Raises NotFound; Malformed where nothing can be rebuilt.

        Whether the step asked for is there is not looked at; see ``need``.
        """
        if step is not None:
            return step
        if self.tip is not None:
            return self.tip
        if self.problems:
            raise self.problems[0]
        if self.links:
            self.path(self.links[-1].step)
        hint = f"deltactl push CKPT {quote(self.url)}"
        raise NotFound("the bucket holds no chain", file=self.url, hint=hint)

    def need(self, step: int) -> None:
        """Raise NotFound for a step that is not in the chain, or what is wrong with its link."""
        if not self.links_at(step):
            raise self._problem_at(step) or self._no_step(step)

    def way(self, step: int, held: int | None = None) -> Way:
        """The links of the fewest bytes that lead to a step: from an anchor, or from a step that is
        held where that is below. Raises as ``path`` where neither leads there."""
        near: Way | None = None
        if held is not None and held <= step:
            with suppress(DeltactlError):
                near = Way(None, tuple(self.path_from(held, step)))
        try:
            anchor, deltas = self.path(step)
        except DeltactlError:
            if near is None:
                raise
            return near
        whole = Way(anchor, tuple(deltas))
        return near if near is not None and near.nbytes < whole.nbytes else whole

    def start_for(self, step: int) -> Link | None:
        """The newest anchor at or below a step that can be rebuilt from."""
        return self.starts.get(max((s for s in self.starts if s <= step), default=-1))

    def path(self, step: int) -> tuple[Link, list[Link]]:
        """The newest anchor that leads to a step, and the deltas to apply to it in order.

        Raises NotFound for a step that is not in the chain, Malformed where the way is broken.
        """
        deltas = self._deltas_down(step, self.starts)
        start = self.before(deltas[0]) if deltas else step
        assert start is not None
        return self.starts[start], deltas

    def path_from(self, have: int, step: int) -> list[Link]:
        """The deltas from one step to a later one, in order. Raises as ``path``."""
        return self._deltas_down(step, (have,))

    def _deltas_down(self, step: int, ends: Container[int]) -> list[Link]:
        self.need(step)
        deltas: list[Link] = []
        at = step
        while at not in ends:
            delta = self.deltas.get(at)
            if delta is None:
                raise self._problem_at(at) or self._no_way(step, at)
            before = self.before(delta)
            if before is None or not self.stands(delta):
                raise self._problem_at(before) or self._broken(delta)
            deltas.append(delta)
            at = before
        return deltas[::-1]

    def _problem_at(self, step: int | None) -> DeltactlError | None:
        """What is wrong with the step's link, where there is one and it was left out for that."""
        if step is None or self.links_at(step):
            return None
        return next((problem for problem in self.problems if problem.step == step), None)

    def _no_step(self, step: int) -> NotFound:
        have = f"steps {self.steps[0]} to {self.steps[-1]}" if self.steps else "no steps"
        return NotFound(
            "the chain has no such step",
            file=self.url,
            step=step,
            found=have,
            hint=f"deltactl log {quote(self.url)}",
        )

    def _no_way(self, step: int, at: int) -> Malformed:
        what = "no unbroken run of deltas leads to the step"
        return Malformed(what, file=self.url, step=step, found=f"no delta to step {at}")

    def _broken(self, delta: Link) -> Malformed:
        before = self.before(delta)
        present = before is not None and self.links_at(before)
        return Malformed(
            "the chain is broken: what the delta stands on is not there",
            file=delta.name,
            step=delta.step,
            expected=f"step {before} with state {delta.base_state}",
            found=f"state {self.state_at(before)}" if before is not None and present else "no link",
            hint=f"deltactl verify {quote(self.url)} --level links",
        )
