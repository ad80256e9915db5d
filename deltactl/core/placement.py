"""Which steps may be put on the end of a chain, and which of them are anchors."""

from __future__ import annotations

from deltactl.core.chain import Chain
from deltactl.core.delta import DeltaHeader
from deltactl.core.errors import Conflict, UsageError
from deltactl.core.header import check_step


class Placement:
    """Judges steps against a chain; ``anchor_every``: the cadence, 0 for the first anchor alone."""

    def __init__(self, chain: Chain, anchor_every: int) -> None:
        self._chain, self._anchor_every = chain, anchor_every

    def next_step(self, step: int | None) -> int:
        """The step to write. Raises Conflict if it is not above the tip, or the chain is broken."""
        chain = self._chain
        newest = chain.steps[-1] if chain.steps else None
        if chain.problems or newest != chain.tip or chain.starts != chain.anchors:
            raise Conflict(
                "the chain is damaged, and nothing is put on its end until it is sound",
                file=chain.url,
                step=newest,
                found=chain.problems[0] if chain.problems else None,
                hint=f"deltactl verify {chain.url}",
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
                hint=f"deltactl log {chain.url}",
            )
        return step

    def _no_digests(self, step: int) -> UsageError:
        return UsageError(
            "the chain's links carry no digests that a delta could stand on",
            file=self._chain.url,
            step=step,
            hint="push into a new bucket",
        )

    def anchor_due(self, step: int) -> bool:
        """TRL's rule, step % N == 0, also where steps are skipped: a multiple of N was reached."""
        if not self._chain.anchors:
            return True
        if not self._anchor_every:
            return False
        return step // self._anchor_every > max(self._chain.anchors) // self._anchor_every

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
                hint=f"deltactl log {self._chain.url}",
            )

    def check_on_tip(self, header: DeltaHeader) -> None:
        """Raise Conflict unless a delta stands on the tip."""
        tip = self._chain.tip
        if tip is None:
            raise Conflict(
                "the chain is empty, and a delta needs a base",
                file=header.file,
                expected=f"state {header.base_state}",
                hint=f"deltactl push CKPT {self._chain.url}",
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
