"""Which steps may be put on the end of a chain, and which of them are anchors."""

from __future__ import annotations

from shlex import quote

from deltactl.chain.anchor_policy import AnchorPolicy, Run
from deltactl.chain.chain import Chain
from deltactl.core.errors import Conflict, UsageError
from deltactl.format.delta_header import DeltaHeader
from deltactl.format.header import check_step


class NextStep:
    """Judges steps against a chain; ``policy`` says which are anchors."""

    def __init__(self, chain: Chain, policy: AnchorPolicy) -> None:
        self._chain, self._policy = chain, policy

    def number(self, step: int | None) -> int:
        """The step to write. Raises Conflict if it is not above the tip, or the chain is broken."""
        chain = self._chain
        newest = chain.steps[-1] if chain.steps else None
        if chain.problems or newest != chain.tip or chain.starts != chain.anchors:
            raise Conflict(
                "the chain is damaged, and nothing is put on its end until it is sound",
                file=chain.url,
                step=newest,
                found=chain.problems[0] if chain.problems else None,
                hint=f"deltactl verify {quote(chain.url)}",
            )
        if newest is not None and chain.state_at(newest) is None:
            raise self._no_digests(newest)
        if step is None:
            step = 1 if newest is None else newest + 1
            check_step(step)
            return step
        if newest is not None and step <= newest:
            raise Conflict(
                "the step is not above the tip",
                file=chain.url,
                expected=f"step {newest + 1} or above",
                found=f"step {step}",
                hint=f"deltactl log {quote(chain.url)}",
            )
        return step

    def _no_digests(self, step: int) -> UsageError:
        return UsageError(
            "the chain's links carry no digests that a delta could stand on",
            file=self._chain.url,
            step=step,
            hint="push into a new bucket",
        )

    def anchor_due(self, step: int, delta_bytes: int, changed: int) -> bool:
        """Whether a step, whose delta of so many bytes and changed elements may be in the chain
        already, is to be an anchor."""
        if not self._chain.anchors:
            return True
        newest = max(self._chain.anchors)
        since = [link for at, link in self._chain.deltas.items() if newest < at < step]
        return self._policy.due(
            Run(
                step=step,
                anchor_step=newest,
                anchor_bytes=self._chain.anchors[newest].bytes,
                delta_bytes=delta_bytes + sum(link.bytes for link in since),
                changed=changed + sum(link.changed_elements or 0 for link in since),
            )
        )

    def check_same(self, step: int, state: str) -> None:
        """Raise Conflict if a step that is there has another state than this."""
        links = self._chain.links_at(step)
        if links[0].result_state is None:
            raise self._no_digests(step)
        if links[0].result_state != state:
            raise Conflict(
                "the step is there with other content",
                file=links[0].name,
                step=step,
                expected=f"state {links[0].result_state}",
                found=f"state {state}",
                hint=f"deltactl log {quote(self._chain.url)}",
            )

    def check_base(self, header: DeltaHeader) -> None:
        """Raise Conflict unless a delta stands on the tip."""
        tip = self._chain.tip
        if tip is None:
            hint = "the chain begins with a checkpoint: push the one that the delta stands on first"
            raise Conflict(
                "the chain is empty, and a delta needs a base",
                file=header.file,
                expected=f"state {header.base_state}",
                hint=hint,
            )
        found = self._chain.state_at(tip)
        if found != header.base_state:
            raise Conflict(
                "the delta's base is not the chain's tip",
                file=header.file,
                step=tip,
                expected=f"state {found}",
                found=f"state {header.base_state}",
            )
