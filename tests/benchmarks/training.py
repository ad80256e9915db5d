"""Print what publishing costs a training loop, beside TRL's detector of changes:
``python -m tests.benchmarks.training``.

The same loop, AdamW on bfloat16 weights and gradients that stay as they are, runs in processes of
its own: as it is; with TRL's detector (before each step all parameters cloned to the CPU, after it
each whole tensor compared, the indices by ``nonzero``), which makes no file and uploads nothing;
and with the publisher, which also encodes and puts every step. Rounds alternate. Blocked is the
time in which the loop does nothing else. Memory is anonymous, at its peak; a mirror on the disk is
none.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.measure import anonymous_peak

PLAIN, TRL, MEMORY, DISK = "plain loop", "TRL's detector", "mirror in memory", "mirror on disk"
WAYS = (PLAIN, TRL, MEMORY, DISK)
LIMIT = 0.5
"""Of TRL's blocked time that the publisher may take."""

_WIDTH = 1024
_CODE = "from tests.benchmarks.training import child; child()"


def run(params: int, steps: int, rounds: int, where: Path | None) -> dict[str, dict[str, float]]:
    """By way: median seconds of a step and blocked in a step, peak bytes, share of elements that a
    step changes."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            with tempfile.TemporaryDirectory(dir=where) as scratch:
                out = Path(scratch, "result")
                peak = anonymous_peak(_CODE, [way, str(params), str(steps), scratch, str(out)])
                found[way].append(json.loads(out.read_text()) | {"peak": peak})
    return {
        way: {key: median(row[key] for row in rows) for key in rows[0]}
        for way, rows in found.items()
    }


def child() -> None:
    """One run of the loop, in a process of its own."""
    way, params, steps, scratch, out = sys.argv[1:]
    result = _loop(way, int(params), int(steps), Path(scratch))
    Path(out).write_text(json.dumps(result))


def _loop(way: str, params: int, steps: int, scratch: Path) -> dict[str, float]:
    import torch

    torch.manual_seed(0)
    layers = max(1, params // _WIDTH**2)
    model = torch.nn.ParameterList(
        torch.empty(_WIDTH, _WIDTH, dtype=torch.bfloat16).normal_(0, 0.02) for _ in range(layers)
    )
    for weight in model:
        weight.grad = torch.empty_like(weight).normal_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    seconds: list[float] = []
    detector = _detector(way, model, optimizer, scratch)
    for _ in range(steps + 2):
        began = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    detector.close()
    blocked, changed = detector.blocked[2:], detector.changed[2:]  # the first holds all
    return {
        "step": median(seconds[2:]),
        "blocked": median(blocked) if blocked else 0.0,
        "changed": median(changed) if changed else 0.0,
    }


class _Nothing:
    """A plain loop."""

    def __init__(self) -> None:
        self.blocked: list[float] = []
        self.changed: list[float] = []

    def close(self) -> None:
        """Nothing is left to do."""


def _detector(way: str, model: Any, optimizer: Any, scratch: Path) -> _Nothing:
    if way == PLAIN:
        return _Nothing()
    return _Trl(model, optimizer) if way == TRL else _Ours(way, model, optimizer, scratch)


class _Trl(_Nothing):
    def __init__(self, model: Any, optimizer: Any) -> None:
        super().__init__()
        self._model, self._before, self._seconds = model, {}, 0.0
        optimizer.register_step_pre_hook(self._clone)
        optimizer.register_step_post_hook(self._compare)

    def _clone(self, *_: Any) -> None:
        began = time.perf_counter()
        self._before = {n: p.detach().to("cpu", copy=True) for n, p in self._parameters()}
        self._seconds = time.perf_counter() - began

    def _compare(self, *_: Any) -> None:
        import torch

        began = time.perf_counter()
        patch, count, total = {}, 0, 0
        for name, parameter in self._parameters():
            flat = parameter.detach().to("cpu").view(-1)
            index = (flat != self._before[name].view(-1)).nonzero(as_tuple=True)[0]
            patch[name] = index.to(torch.int32), flat[index]
            count, total = count + index.numel(), total + flat.numel()
        self.blocked.append(self._seconds + time.perf_counter() - began)
        self.changed.append(count / total)

    def _parameters(self) -> Any:
        return self._model.named_parameters()


class _Ours(_Nothing):
    def __init__(self, way: str, model: Any, optimizer: Any, scratch: Path) -> None:
        from deltactl.trainer import Every, Publisher

        super().__init__()
        self._publisher = Publisher(
            model, scratch / "bucket", optimizer=optimizer, anchors=Every(0),
            scratch=scratch / "scratch", mirror="disk" if way == DISK else "memory",
        )  # fmt: skip

    def close(self) -> None:
        self._publisher.close()
        self.blocked = [p.blocked_seconds for p in self._publisher.history]
        self.changed = [1 - (p.sparsity or 0.0) for p in self._publisher.history]


def main() -> int:
    """Measure, print, and say by the exit status whether the limit is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=1 << 27)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path, help="where files are made")
    options = parser.parse_args()
    found = run(options.params, options.steps, options.rounds, options.scratch)
    print(f"{'':18}{'step':>10}{'blocked':>10}{'of TRL':>8}{'memory':>10}{'changed':>9}")
    theirs = found[TRL]["blocked"]
    for way, row in found.items():
        share = f"{row['blocked'] / theirs:.3f}" if row["blocked"] else ""
        print(
            f"{way:18}{row['step']:8.3f} s{row['blocked']:8.3f} s{share:>8}"
            f"{row['peak'] / 1e6:7.0f} MB{100 * row['changed']:7.2f} %"
        )
    return 0 if all(found[way]["blocked"] <= LIMIT * theirs for way in (MEMORY, DISK)) else 1


if __name__ == "__main__":
    sys.exit(main())
