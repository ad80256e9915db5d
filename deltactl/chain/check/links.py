"""Whether a chain's links fit each other, by what their headers say."""

from __future__ import annotations

from deltactl.chain.chain import Chain, Link
from deltactl.chain.check import trl
from deltactl.core.digest import state_digest
from deltactl.core.errors import DeltactlError, Malformed, Unproven, difference
from deltactl.format.anchor import AnchorHeader
from deltactl.format.delta_header import DeltaHeader
from deltactl.format.metadata_check import check_total
from deltactl.format.tensor_table import Table, after_delta


def doubts(chain: Chain, link: Link) -> list[DeltactlError]:
    """What nothing is known against, and nothing proves."""
    if link.result_state is not None:
        return []
    found: list[DeltactlError] = [no_digests(link.name, link.step)]
    if isinstance(link.header, DeltaHeader):
        gap = trl.gap(link.step, chain.below(link.step), link.header)
        found += [gap] if gap is not None else []
    return found


def no_digests(file: str, step: int | None) -> Unproven:
    """What is said of a link of TRL's."""
    what = "the link carries no digests: what it holds cannot be proven"
    return Unproven(what, file=file, step=step, expected="deltactl.* in its header")


def link_faults(chain: Chain, link: Link, tables: dict[int, Table]) -> list[DeltactlError]:
    """What is wrong with a link, by the headers alone; the links before it have been looked at.

    Puts into ``tables`` what the tensors are after it, where that is known.
    """
    if isinstance(link.header, AnchorHeader):
        return _anchor_faults(chain, link, link.header, tables)
    return _delta_faults(chain, link, link.header, tables)


def _anchor_faults(
    chain: Chain, link: Link, header: AnchorHeader, tables: dict[int, Table]
) -> list[DeltactlError]:
    """An anchor has to be the state that deltas lead to, where they reach its step."""
    below = chain.below(link.step)
    before = tables.get(below) if below is not None else None
    if link.step in chain.starts:
        tables[link.step] = {tensor.name: tensor for tensor in header.tensors}
    if header.result_state is None:
        return trl.anchor_faults(header, before or {})
    delta = chain.deltas.get(link.step)
    if delta is None or delta.result_state in (None, link.result_state):
        return []
    if link.step in chain.starts:
        return []  # then the delta does not stand, and that is said of it
    what = "the anchor is not the state that the deltas before it lead to"
    return [
        Malformed(
            what,
            file=link.name,
            step=link.step,
            expected=f"state {delta.result_state}",
            found=f"state {link.result_state}",
        )
    ]


def _delta_faults(
    chain: Chain, link: Link, header: DeltaHeader, tables: dict[int, Table]
) -> list[DeltactlError]:
    if link is chain.links[0]:
        what = "the chain begins with a delta, and the anchor that it stands on is missing"
        return [] if is_left_over(chain, link) else [Malformed(what, file=link.name)]
    before = chain.before(link)
    if fault := _base_fault(chain, link, before):
        return [fault]
    table = tables.get(before) if before is not None else None
    if table is None:
        return []
    if header.result_state is None:
        tables[link.step] = table
        return trl.delta_faults(header, table)
    try:
        tables[link.step] = _advance(table, header)
    except DeltactlError as error:
        return [error]
    return []


def is_left_over(chain: Chain, link: Link) -> bool:
    """Whether a link is the delta of the anchor that the chain begins with: what it stands on was
    removed with all before the anchor, and nothing needs it."""
    return link is chain.links[0] and link.kind == "delta" and link.step in chain.starts


def _base_fault(chain: Chain, link: Link, before: int | None) -> DeltactlError | None:
    """What is wrong between a delta and the step below it."""
    below = chain.below(link.step)
    if not chain.stands(link):
        missing = before is None or not chain.links_at(before)
        what = "the link that the delta stands on is missing"
        if not missing:
            what = "the delta's base is not the result of the step before"
        found = "no such link"
        if not missing and before is not None:
            found = f"state {chain.state_at(before)}"
    elif _passes_over(chain, link, before, below):
        what = "the delta passes over the step before: two chains are in one place"
        found = _step_and_state(below, None if below is None else chain.state_at(below))
    else:
        return None
    expected = _step_and_state(before, link.base_state)
    return Malformed(what, file=link.name, step=link.step, expected=expected, found=found)


def _passes_over(chain: Chain, link: Link, before: int | None, below: int | None) -> bool:
    """Whether a delta stands on a lower step than the one right below, which is another state."""
    if below is None or below == before:
        return False
    return link.base_state is None or chain.state_at(below) != link.base_state


def _step_and_state(step: int | None, state: str | None) -> str:
    return f"step {step}" if state is None else f"step {step} with state {state}"


def _advance(table: Table, header: DeltaHeader) -> Table:
    """The tensors after a delta, from those before; their digest has to be the state it names."""
    after = after_delta(table, header)
    what = "the tensor table does not lead to the state that the header names"
    found = state_digest(after.values())
    if fault := difference(what, header.result_state, found, file=header.file):
        raise fault
    check_total(header.metadata, sum(tensor.elements for tensor in after.values()), header.file)
    return after
