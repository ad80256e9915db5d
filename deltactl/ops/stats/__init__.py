"""How sparse training is: measured on two checkpoints, read from a delta, summed over a bucket."""

from __future__ import annotations

from deltactl.ops.stats.chain import stats_bucket
from deltactl.ops.stats.link import stats_delta
from deltactl.ops.stats.pair import stats_pair
from deltactl.ops.stats.report import BANDWIDTHS, Stats, ship_seconds

__all__ = ["BANDWIDTHS", "Stats", "ship_seconds", "stats_bucket", "stats_delta", "stats_pair"]
