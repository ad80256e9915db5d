"""Print what policies of anchors cost over a long simulated run:
``python -m tests.benchmarks.anchors``.

By arithmetic, not by running: a model of bf16 weights, of which a share that wanders around one in
a hundred changes at each step, at so many bytes a change. For each policy: all bytes that the
trainer writes, and what a replica that starts at the worst moment fetches, replays and waits for.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from random import Random

from deltactl.chain.anchor_policy import REPLAY_SECONDS, Adaptive, AnchorPolicy, Every, Run

_BYTES_A_CHANGE = {"ulp": 1.23, "ulp_ctx": 0.85, "gap_delta": 4.0}  # as make_pair's pair gave


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a whole run: anchors, bytes written; of the worst start: bytes fetched, and seconds."""

    anchors: int
    written: float
    worst_bytes: float
    worst_seconds: float


def changes(elements: int, steps: int, seed: int = 0) -> list[int]:
    """Changed elements of each step: a share that drifts between 0.2 and 4 %, more at first."""
    draw = Random(seed)
    level, found = 0.0, []
    for step in range(steps):
        level = 0.98 * level + draw.gauss(0, 0.08)
        warm = 2 * math.exp(-step / 50)
        share = min(max(0.01 * math.exp(level + warm), 0.002), 0.04)
        found.append(round(share * elements))
    return found


def simulate(
    policy: AnchorPolicy, elements: int, changed: list[int], width: float, bandwidth: float
) -> Cost:
    """Play the run: step 1 is an anchor, and each later one a delta of ``width`` bytes a change."""
    anchor = 2 * elements
    written, anchors, at = float(anchor), 1, 1
    since_bytes = since_changed = 0
    worst_bytes, worst_seconds = float(anchor), anchor / bandwidth
    for step, count in enumerate(changed[1:], 2):
        since_bytes += round(count * width)
        since_changed += count
        written += round(count * width)
        if policy.due(Run(step, at, anchor, since_bytes, since_changed)):
            written += anchor
            anchors, at = anchors + 1, step
            since_bytes = since_changed = 0
        fetched = anchor + since_bytes
        seconds = fetched / bandwidth + since_changed * REPLAY_SECONDS
        worst_bytes, worst_seconds = max(worst_bytes, fetched), max(worst_seconds, seconds)
    return Cost(anchors, written, worst_bytes, worst_seconds)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=7_000_000_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--encoding", choices=_BYTES_A_CHANGE, default="ulp")
    options = parser.parse_args(arguments)
    changed = changes(options.elements, options.steps)
    width = _BYTES_A_CHANGE[options.encoding]
    share = sum(changed) / len(changed) / options.elements
    print(f"{options.elements:,} elements, {options.steps} steps, {share:.2%} changed a step")
    print(f"{'bandwidth':>10} {'policy':12} {'anchors':>7} {'written':>10} {'worst start':>22}")
    for bandwidth in (12.5e6, 125e6, 1.25e9):
        policies = {f"every {n}": Every(n) for n in (10, 50, 200)} | {"never": Every(0)}
        for name, policy in {**policies, "adaptive": Adaptive(bandwidth)}.items():
            cost = simulate(policy, options.elements, changed, width, bandwidth)
            print(
                f"{bandwidth * 8 / 1e9:5.1f} Gbit {name:12} {cost.anchors:7} "
                f"{cost.written / 1e12:7.2f} TB {cost.worst_bytes / 1e9:9.1f} GB "
                f"{cost.worst_seconds:8.0f} s"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
