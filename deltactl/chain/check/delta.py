"""What a delta's payload says of itself: all that its rows name and that needs no base to be seen.

Content that is carried whole has its digest; changes can be decoded, are as many as the row says,
lie in order within the tensor; and where an encoding gives the new bits as they are, these have the
new touch sum. That they are the changes from the base to the result only a replay shows.
"""

from __future__ import annotations

from functools import partial

from deltactl.codec.absolute import NewBits
from deltactl.codec.base import BLOCK, unseen
from deltactl.codec.bits import touch_sum
from deltactl.codec.room import room_for
from deltactl.codec.ulp import UlpDecoder
from deltactl.codec.ulp_ctx import UlpCtxDecoder
from deltactl.core.digest import digest_of
from deltactl.core.errors import DeltactlError, Malformed, difference
from deltactl.files.parallel import map_largest_first
from deltactl.format.delta import Delta, parse_delta
from deltactl.format.header import Record, touch_sum_text


def content_faults(delta: Delta) -> list[DeltactlError]:
    """What is wrong with the tensors and the parts of a delta with digests, whose payload has been
    compared with its own. Reads and decodes all of it."""
    records = [record for record in delta.records.values() if record.kind != "removed"]

    def check(record: Record) -> DeltactlError | None:
        try:
            return _fault(delta, record)
        except DeltactlError as error:
            return error

    found = map_largest_first(check, records, lambda record: record.nbytes)
    return _part_faults(delta) + [fault for fault in found if fault is not None]


def _fault(delta: Delta, record: Record) -> DeltactlError | None:
    differs = partial(difference, file=delta.path, tensor=record.name)
    if record.whole:
        what = "the tensor that is carried whole does not have the digest that its row names"
        return differs(what, record.digest, digest_of(delta.whole(record.name)))
    found = _new_sum(delta, record)
    if found is None:
        return None
    what = "the new touch sum is not that of the bits that the delta carries"
    assert record.new_sum is not None
    return differs(what, touch_sum_text(record.new_sum), touch_sum_text(found))


def _new_sum(delta: Delta, record: Record) -> int | None:
    """Decode all of a sparse tensor; the sum of its new bits where the delta gives them as they
    are. Raises Malformed."""
    assert record.dtype is not None and record.elements is not None
    decoder = delta.decoder(record.name, record.dtype, record.elements)
    total, known = 0, False
    for number in decoder.numbers():
        length = min(BLOCK, record.elements - number * BLOCK)
        with room_for(decoder.count_in(number)):
            if isinstance(decoder, UlpDecoder | UlpCtxDecoder):
                decoder.steps(number, length)
                continue
            changes = decoder.block(number, unseen(record.dtype, length))
            if isinstance(changes, NewBits):
                known = True
                total += touch_sum(changes.positions, changes.bits, number * BLOCK)
            del changes
    return total % (1 << 64) if known else None


def _part_faults(delta: Delta) -> list[DeltactlError]:
    """Where a part is no delta by itself, or is one of other tensors than the index says."""
    faults: list[DeltactlError] = []
    homes, missing = delta.header.homes, dict(delta.records)
    for path, header in delta.parts():
        try:
            part = parse_delta(header, path)
            if part.encoding != delta.header.encoding:
                what = "the part has another encoding than the delta's index says"
                raise Malformed(what, file=path, found=part.encoding)
            for name, record in part.records.items():
                if missing.pop(name, None) != record or homes.get(name, path.name) != path.name:
                    what = "the part's own row is not the one that the delta's index has"
                    raise Malformed(what, file=path, tensor=name)
        except DeltactlError as error:
            faults.append(error)
    if missing and delta.header.files and not faults:
        what = "no part has the row that the delta's index has"
        faults.append(Malformed(what, file=delta.header.file, tensor=min(missing)))
    return faults
