"""The player: asks the server, plays at the environment, puts rollouts into the bucket.

It knows nothing of the trainer. Batch ``n``, of which the trainer makes step n + 1, is begun once
the server serves step n - AHEAD or a later one: so rollouts get as stale as that and no staler, the
player is never further ahead, and the trainer need not wait for the newest step to be served.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from deltactl.bucket import open_bucket
from deltactl.demo.game.play import Player, Table
from deltactl.demo.game.rollouts import put_batch
from deltactl.demo.game.sampling import ServedPolicy
from deltactl.demo.loop.processes import part, tell

AHEAD = 2
_LOOK = 0.05  # seconds between two looks at the server


def work(settings: dict[str, Any]) -> None:
    """Settings: bucket, server, environment (URLs), steps, seed, place (a directory)."""
    bucket, scratch = open_bucket(settings["bucket"]), Path(settings["place"], "batch.json")
    policy = ServedPolicy(settings["server"])
    player = Player(policy, Table(settings["environment"]), settings["seed"])
    for number in range(settings["steps"]):
        while (served := policy.known()) is None or served < number - AHEAD:
            time.sleep(_LOOK)
        began = time.monotonic()
        batch = player.play(number)
        put_batch(bucket, batch, scratch)
        tell(
            event="played",
            batch=number,
            reward=batch.reward,
            rollouts=len(batch.rollouts),
            by_step=batch.by_step(),
            seconds=time.monotonic() - began,
        )
    player.close()


if __name__ == "__main__":
    part(work)
