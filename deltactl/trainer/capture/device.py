"""Tensors on a device, chunk by chunk in the host's memory: a chunk is copied while others are
compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from deltactl.codec.bits import Bits, elements
from deltactl.core.threads import cores
from deltactl.trainer.model.tensors import Live, bytes_of

CHUNK = 1 << 24
"""Bytes of a buffer. On an H200 with 16 cores 4 MiB took nearly twice as long."""

_BUFFERS_MAX = 32


Wait = Callable[[], None]


class Copier(Protocol):
    """Copies from one device to the host."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        """A buffer of the host for it to copy to: uint8, shape (nbytes,)."""
        ...

    def start(self, live: Live, at: int, end: int, target: torch.Tensor) -> Wait:
        """Begin to copy what is published of the elements from ``at`` to ``end``; the target is
        filled when what this returns has been called, from any thread."""
        ...


class PlainCopier:
    """For any device: copies when it is asked to."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def start(self, live: Live, at: int, end: int, target: torch.Tensor) -> Wait:
        target.copy_(bytes_of(_view(live, at, end)))
        return lambda: None


class CudaCopier:
    """For NVIDIA's and AMD's GPUs: pinned buffers, and a stream beside the training's.

    The stream first waits for what the training has already asked the device to do. The training
    goes on when all copies have been waited for, so that none reads a later step's weights.
    """

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda  # which leaves this constructor untyped
        self._stream = cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def start(self, live: Live, at: int, end: int, target: torch.Tensor) -> Wait:
        with torch.cuda.stream(self._stream):
            target.copy_(bytes_of(_view(live, at, end)), non_blocking=True)
            done: Wait = self._stream.record_event().synchronize
        return done


def _view(live: Live, at: int, end: int) -> torch.Tensor:
    """What is published, rounded on the device, so that half as much is copied."""
    piece = live.flat[at:end]
    return piece.to(torch.bfloat16) if live.rounded else piece


def copier_for(device: torch.device) -> Copier:
    """What copies from a device to the host."""
    return CudaCopier(device) if device.type == "cuda" else PlainCopier()


class Staging:
    """A ring of buffers of one device, kept from step to step, since pinned memory is slow to get:
    for each core one to compare, and one on its way.

    ``make_copier`` is called once a step, on the training's thread.
    """

    def __init__(self, make_copier: Callable[[], Copier]) -> None:
        self._make_copier = make_copier
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        self._made = 0
        self.buffers = min(2 * cores(), _BUFFERS_MAX)

    def each_chunk(
        self, tensors: list[Live], work: Callable[[Live, int, Bits], None], pool: Executor
    ) -> Iterator[Future[None]]:
        """Have ``work(live, first element, bits)`` called in the pool for every chunk; a future for
        each, which the caller waits for, as soon as its copy has begun."""
        copier = self._make_copier()
        for live in tensors:
            size = live.elements_in(CHUNK)
            for at in range(0, live.flat.numel(), size):
                end = min(at + size, live.flat.numel())
                yield self._chunk(copier, live, at, end, work, pool)

    def _chunk(
        self,
        copier: Copier,
        live: Live,
        at: int,
        end: int,
        work: Callable[[Live, int, Bits], None],
        pool: Executor,
    ) -> Future[None]:
        buffer = self._take(copier)
        target = buffer[: (end - at) * (live.nbytes // live.flat.numel())]
        try:
            wait = copier.start(live, at, end, target)
        except BaseException:
            self._free.put(buffer)
            raise

        def finish() -> None:
            try:
                wait()
                work(live, at, elements(target.numpy(), live.dtype))
            finally:
                self._free.put(buffer)

        return pool.submit(finish)

    def _take(self, copier: Copier) -> torch.Tensor:
        if self._made == self.buffers:
            return self._free.get()
        self._made += 1
        return copier.buffer(CHUNK)
