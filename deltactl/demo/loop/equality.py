"""Whether the trainer, the bucket and the server hold the same bits in the end.

Three witnesses of the server: the state that its engine names, the engine's audit of all live
weights, and vLLM's own checksums of its parameters, in which deltactl has no part.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deltactl.chain.store import Bucket
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.checkpoint.state import state_of
from deltactl.codec.bits import Bytes
from deltactl.core.errors import Malformed
from deltactl.ops.pull import pull
from deltactl.server.audit import Audited, audit_servers
from deltactl.server.http.wire import Wire

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""What vLLM keeps as one parameter, rows below rows."""

_ANSWER = 120.0  # seconds


@dataclass(frozen=True, slots=True)
class Equality:
    """What each holds. ``step``: the bucket's tip; ``trainer``, ``bucket``, ``pulled``: state
    digests; ``elements``: of the trainer's tensors; ``unlike_pulled``: tensors whose bytes in the
    pulled directory are not the trainer's; ``audit``: by the server's engine; ``unlike_served``:
    parameters whose checksum by vLLM is not that of the trainer's tensors, or that one of the two
    lacks; ``parameters``: how many vLLM has."""

    step: int
    trainer: str
    bucket: str | None
    pulled: str
    elements: int
    unlike_pulled: tuple[str, ...]
    audit: Audited
    unlike_served: tuple[str, ...]
    parameters: int

    @property
    def holds(self) -> bool:
        """Whether all are the same, and there is something that is."""
        return (
            self.trainer == self.bucket == self.pulled == self.audit.state
            and self.step == self.audit.step
            and min(self.elements, self.parameters, self.audit.checked) > 0
            and self.audit.error is None
            and not (self.unlike_pulled or self.unlike_served)
            and not (self.audit.differing or self.audit.unaudited)
        )


def compare(bucket: Bucket, final: Path, url: str, place: Path) -> Equality:
    """Pull the tip to ``place`` and compare it, and what the server at ``url`` holds, with the
    trainer's own tensors in the file ``final``."""
    report = pull(bucket, place)
    trainer, trainers = _bytes(final)
    _, pulled = _bytes(place)
    [audit] = audit_servers(bucket, report.step, [url], timeout=_ANSWER).replicas
    wire = Wire(url, _ANSWER)
    expected, found = runtime_checksums(trainers), _checksums(wire)
    wire.close()
    return Equality(
        step=report.step,
        trainer=trainer,
        bucket=report.state if report.proven else None,
        pulled=state_at(place),
        elements=sum(data.size for data in trainers.values()) // 2,
        unlike_pulled=_unlike(trainers, pulled),
        audit=audit,
        unlike_served=tuple(
            name
            for name in sorted(expected.keys() | found.keys())
            if expected.get(name) != found.get(name)
        ),
        parameters=len(found),
    )


def state_at(path: Path) -> str:
    """The state digest of a checkpoint, hashed anew."""
    with open_checkpoint(path) as checkpoint:
        return state_of(checkpoint)


def _bytes(path: Path) -> tuple[str, dict[str, Bytes]]:
    """A checkpoint's state digest, and a copy of each tensor's bytes."""
    with open_checkpoint(path) as checkpoint:
        held = {name: np.array(checkpoint.tensors[name].data) for name in checkpoint.tensors}
        return state_of(checkpoint), held


def _unlike(expected: dict[str, Bytes], found: dict[str, Bytes]) -> tuple[str, ...]:
    names = sorted(expected.keys() | found.keys())
    return tuple(
        name
        for name in names
        if name not in expected
        or name not in found
        or not np.array_equal(expected[name], found[name])
    )


def runtime_checksums(tensors: dict[str, Bytes]) -> dict[str, str]:
    """What vLLM's checksums of its parameters must be: SHA-256 of each one's bytes, by name.

    Fused parameters are their parts' rows, one below the other, so their bytes are too.
    """
    parts = {part: (whole, n) for whole, all_ in FUSED.items() for n, part in enumerate(all_)}
    rows: dict[str, dict[int, Bytes]] = {}
    for name, data in tensors.items():
        words = name.split(".")
        place = next((n for n, word in enumerate(words) if word in parts), None)
        whole, order = (words[-2], 0) if place is None else parts[words[place]]
        if place is not None:
            words[place] = whole
        rows.setdefault(".".join(words), {})[order] = data
    return {
        name: hashlib.sha256(b"".join(found[n].tobytes() for n in sorted(found))).hexdigest()
        for name, found in rows.items()
    }


def _checksums(wire: Wire) -> dict[str, str]:
    """vLLM's own, by parameter; the rank before the last colon is left out."""
    found: Any = wire.post("/weight_checker", {"action": "checksum"}).get("checksums")
    if not isinstance(found, dict):
        raise Malformed("the server gives no checksums", file=wire.url)
    return {str(name).rpartition(":")[2]: str(digest) for name, digest in found.items()}
