"""The trainer: learns from rollouts in the bucket, and publishes every optimizer step there.

It has no address but the bucket's. How many servers there are, and where, it need not know.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from deltactl.bucket import open_bucket
from deltactl.chain.store import Bucket
from deltactl.demo.game.rollouts import Batch, read_batch
from deltactl.demo.loop.processes import part, tell

FINAL = "final.safetensors"
"""What the trainer holds in the end, written into its own directory, for comparison alone."""

_LOOK = 0.02  # seconds between two looks for the next batch


def work(settings: dict[str, Any]) -> None:
    """Settings: bucket (a URL), steps, seed, place (a directory)."""
    import torch
    from safetensors.torch import save_file

    from deltactl.demo.game import policy, tokens
    from deltactl.demo.game.grpo import Learner
    from deltactl.trainer import Publisher

    torch.set_num_threads(1)  # the model is small, and others want the cores
    bucket, place = open_bucket(settings["bucket"]), Path(settings["place"])
    model = policy.new_model(settings["seed"])
    policy.warm_up(model, settings["seed"])
    learner = Learner(model)
    publisher = Publisher(
        model,
        bucket,
        optimizer=learner.optimizer,
        dtype="bfloat16",
        files=tokens.tokenizer(),
        scratch=place / "publisher",
        notify=lambda _, step: tell(event="published", step=step),
    )
    with publisher:
        publisher.publish(0)
        for number in range(settings["steps"]):
            batch = _await_batch(bucket, number)
            began = time.monotonic()
            update = learner.update(batch.rollouts)
            tell(
                event="trained",
                step=number + 1,
                reward=batch.reward,
                staleness=batch.staleness,
                drift=update.drift,
                clipped=update.clipped,
                gradient=update.gradient,
                seconds=time.monotonic() - began,
            )
    held = {name: tensor.detach().bfloat16() for name, tensor in model.state_dict().items()}
    save_file(held, place / FINAL, metadata={"format": "pt"})
    links = [
        {
            "step": row.step,
            "kind": row.kind,
            "bytes": row.bytes,
            "changed_elements": row.changed_elements,
            "total_elements": row.total_elements,
            "seconds": row.seconds,
            "blocked_seconds": row.blocked_seconds,
            "state": row.state,
        }
        for row in publisher.history
    ]
    tell(event="done", links=links)


def _await_batch(bucket: Bucket, number: int) -> Batch:
    while (batch := read_batch(bucket, number)) is None:
        time.sleep(_LOOK)
    return batch


if __name__ == "__main__":
    part(work)
