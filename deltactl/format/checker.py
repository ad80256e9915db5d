"""What a link's header says of the bytes of its objects, and the one way to hold them against it.

``expected_of`` tells what an object has to be. A ``Checker`` is fed its bytes in order, once, and
finds a wrong one as soon as all that share its digest are there, wherever they come from;
``mapped_faults`` goes by the same for files, on all cores. TRL's links say nothing of their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from deltactl.codec.bits import Bytes
from deltactl.core.digest import TensorState, digest_of, hasher
from deltactl.core.errors import DeltactlError, Malformed, difference
from deltactl.files.mapped import sound_sources
from deltactl.files.parallel import hash_threads, map_largest_first
from deltactl.files.safetensors import Entry, header_length, parse_header
from deltactl.files.signatures import SAMPLE
from deltactl.files.untrusted import open_regular
from deltactl.format.anchor import INDEX, AnchorFile, AnchorHeader
from deltactl.format.delta_header import DeltaHeader, PartFile
from deltactl.format.delta_index import DELTA_INDEX
from deltactl.format.header import check_seal, is_ours

_PIECE = 1 << 20


class Span(NamedTuple):
    """Bytes of an object that have one digest; ``fault``: what is to be said of them where that is
    the one that was found, None if it is the right one."""

    start: int
    stop: int
    fault: Callable[[str], Malformed | None]


@dataclass(frozen=True, slots=True)
class Expected:
    """What an object of a link has to be; ``file``: its name for errors; ``size``: in bytes.

    ``header_bytes``: how long its header is, of an index all of it; 0 for an object without one,
    None where only its first 8 bytes say it. ``spans``: compares the header that it is given with
    its digest, and returns what follows, in order. Raises Malformed, Unsupported.
    """

    file: object
    step: int | None
    size: int
    header_bytes: int | None
    spans: Callable[[bytes], Sequence[Span]]

    def header_end(self, start: bytes) -> int:
        """Where the header ends, by an object's first bytes. Raises Malformed, Unsupported."""
        if self.header_bytes is not None and self.header_bytes in (0, self.size):
            return self.header_bytes
        length = header_length(start, self.file)
        if length > self.size or length != (self.header_bytes or length):
            what = "the object is another than the one whose header was read"
            expected = f"a header of {self.header_bytes or f'<= {self.size}'} bytes"
            raise Malformed(what, file=self.file, expected=expected, found=f"{length} bytes")
        return length

    def wrong_size(self, found: int) -> Malformed:
        """The error for an object of another size."""
        what = "the object does not have the size that it was listed with"
        return Malformed(
            what, file=self.file, expected=f"{self.size} bytes", found=f"{found} bytes"
        )


class Checker:
    """Checks one object. ``faults``: what is wrong with what has come so far."""

    def __init__(self, expected: Expected) -> None:
        self.faults: list[DeltactlError] = []
        self._expected = expected
        self._raw = bytearray()
        self._spans: Iterator[Span] | None = None  # not known before the header is whole
        self._span: Span | None = None
        self._digest: Any = None
        self._at = 0
        self._left = 0  # bytes of the span that have not come
        self._lost = False  # nothing can be said of what comes after a wrong header

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self._take(data, last=False)

    def finish(self) -> None:
        """All bytes have come."""
        self._take(b"", last=True)

    def _take(self, data: bytes, last: bool) -> None:
        self._at += len(data)
        if self._lost:
            return
        try:
            if last and self._at != self._expected.size:
                raise self._expected.wrong_size(self._at)
            self._compare(memoryview(data) if self._spans else self._after_header(data, last))
        except DeltactlError as error:
            error.step = self._expected.step
            self.faults.append(error)
            self._lost = True

    def _after_header(self, data: bytes, last: bool) -> memoryview:
        """Take what belongs to the header, and return the rest."""
        self._raw += data
        if len(self._raw) < 8 and not last:
            return memoryview(b"")
        end = self._expected.header_end(bytes(self._raw[:SAMPLE]))
        if len(self._raw) < end:
            return memoryview(b"")
        raw, self._raw = bytes(self._raw), bytearray()
        self._spans = iter(self._expected.spans(raw[:end]))
        self._next()
        return memoryview(raw)[end:]

    def _next(self) -> None:
        assert self._spans is not None
        self._span, self._digest = next(self._spans, None), hasher()
        self._left = 0 if self._span is None else self._span.stop - self._span.start

    def _compare(self, data: memoryview) -> None:
        while self._span is not None:
            piece = data[: self._left]
            self._digest.update(piece)
            self._left -= len(piece)
            if self._left:
                return
            data = data[len(piece) :]
            fault = self._span.fault(self._digest.hexdigest())
            self.faults += [fault] if fault is not None else []
            self._next()


def stream_faults(expected: Expected, pieces: Iterable[bytes]) -> list[DeltactlError]:
    """What is wrong with an object whose bytes come in these pieces."""
    checker = Checker(expected)
    for piece in pieces:
        checker.feed(piece)
    checker.finish()
    return checker.faults


def pieces_of(path: Path) -> Iterator[bytes]:
    """The bytes of a file. Raises NotFound, NotAllowed, Malformed."""
    with open_regular(path) as file:
        while piece := file.read(_PIECE):
            yield piece


def mapped_faults(objects: Sequence[tuple[Expected, Bytes]]) -> list[DeltactlError]:
    """What is wrong with objects that are mapped, each whole: faults of headers first.

    Raises Malformed where a file is not any more what was mapped.
    """
    faults: list[DeltactlError] = []
    spans: list[tuple[Span, Bytes]] = []
    with sound_sources(*(data for _, data in objects)):
        for expected, data in objects:
            try:
                if data.size != expected.size:
                    raise expected.wrong_size(data.size)
                end = expected.header_end(data[:SAMPLE].tobytes())
                found = expected.spans(data[:end].tobytes())
                spans += [(span, data[span.start : span.stop]) for span in found]
            except DeltactlError as error:
                error.step = expected.step
                faults.append(error)
        total = sum(data.size for _, data in spans)

        def check(item: tuple[Span, Bytes]) -> Malformed | None:
            span, data = item
            return span.fault(digest_of(data, hash_threads(data.size, [total])))

        found_wrong = map_largest_first(check, spans, lambda item: item[1].size)
        return faults + [fault for fault in found_wrong if fault is not None]


def expected_of(
    header: AnchorHeader | DeltaHeader, name: str | None, file: object, size: int
) -> Expected:
    """What an object of a link has to be, by the link's header.

    ``name``: of the index, or of what it names, relative to it; None for a link of one file.
    """
    expect = partial(Expected, file, header.step, size)
    if not is_ours(header.metadata):
        return expect(0, lambda _: [])
    if name in (INDEX, DELTA_INDEX):
        return expect(size, partial(_index_spans, header, file))
    if isinstance(header, DeltaHeader):
        part = next((part for part in header.files if part.name == name), None)
        header_bytes = header.header_bytes if part is None else None
        return expect(header_bytes, partial(_delta_spans, header, part, file, size))
    held = next((held for held in header.files if held.name == name), None)
    if held is None or held.is_shard:
        return expect(None, partial(_anchor_spans, header, held, file, size))
    return expected_file(held, file, header.step)


def expected_file(held: AnchorFile, file: object, step: int | None) -> Expected:
    """What a file has to be that travels with an anchor, and is no shard."""
    whole = Span(0, held.nbytes, partial(_file_fault, held, file, step))
    return Expected(file, step, held.nbytes, 0, lambda _: [whole])


def has_file(path: Path, held: AnchorFile) -> bool:
    """Whether ``path`` is a file with the bytes of an anchor's, which is no shard."""
    if not path.is_file() or path.stat().st_size != held.nbytes:
        return False
    return not stream_faults(expected_file(held, path, None), pieces_of(path))


def _index_spans(header: AnchorHeader | DeltaHeader, file: object, raw: bytes) -> list[Span]:
    check_seal(raw, header.metadata, file)
    return []


def _delta_spans(
    header: DeltaHeader, part: PartFile | None, file: object, size: int, raw: bytes
) -> list[Span]:
    """The header, by its seal or as the index names it, then one digest over the payload."""
    if part is None:
        check_seal(raw, header.metadata, file)
    else:
        what = "the part's header does not have the digest that the delta's index names"
        _raise(difference(what, part.header_digest, digest_of(raw), file=file, step=header.step))
    expected = str(header.payload_digest if part is None else part.payload_digest)
    what = "the payload does not have the digest that the header names"
    return [Span(len(raw), size, partial(difference, what, expected, file=file, step=header.step))]


def _anchor_spans(
    header: AnchorHeader, shard: AnchorFile | None, file: object, size: int, raw: bytes
) -> list[Span]:
    """The header, by its seal or as the index names it, then each tensor."""
    if shard is None:
        check_seal(raw, header.metadata, file)
    else:
        _raise(_file_fault(shard, file, header.step, digest_of(raw)))
    rows = {tensor.name: tensor for tensor in header.tensors}
    return [
        Span(entry.start, entry.stop, partial(_tensor_fault, rows, entry, file, header.step))
        for entry in parse_header(raw, size, file).entries.values()
    ]


def _file_fault(held: AnchorFile, file: object, step: int | None, found: str) -> Malformed | None:
    whose = "shard's header" if held.is_shard else "file"
    what = f"the {whose} does not have the digest that the anchor's index names"
    return difference(what, held.digest, found, file=file, step=step)


def _tensor_fault(
    rows: Mapping[str, TensorState], entry: Entry, file: object, step: int | None, found: str
) -> Malformed | None:
    row = rows.get(entry.name)
    differs = partial(difference, file=file, tensor=entry.name, step=step)
    what = "the tensor does not have the digest that the anchor names"
    if row is None or row.digest != found:
        return differs(what, "no such tensor" if row is None else row.digest, found)
    what = "the tensor does not have the dtype and shape that the anchor names"
    expected = f"{row.dtype} {list(row.shape)}"
    return differs(what, expected, f"{entry.dtype} {list(entry.shape)}")


def _raise(fault: Malformed | None) -> None:
    if fault is not None:
        raise fault
