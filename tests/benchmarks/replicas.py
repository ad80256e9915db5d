"""Print how long an update of six replicas takes beside that of the slowest of them: ``python -m
tests.benchmarks.replicas``, in an environment with vLLM.

Two are real vLLM servers on the CPU, the others stand-ins that take some seconds to stage. The
first step is loaded by one after the other, as a client without threads would, the second by all
side by side. All share this machine's cores, so that the real ones slow each other down.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

from deltactl.bucket import open_bucket
from deltactl.chain.store import Bucket
from deltactl.ops.push import push
from deltactl.server.apply import apply_to_servers
from tests.benchmarks.pause import change
from tests.support.vllm_models import MODELS, write_model
from tests.support.vllm_server import VllmServer, run_vllm_server
from tests.support.vllm_standin import StandIn

REAL = 2


def _chain(scratch: Path, model: str, share: float) -> tuple[Bucket, Path]:
    """Three steps, and the checkpoint of the first."""
    bucket = open_bucket(str(scratch / "bucket"))
    steps = [write_model(scratch / "step_0", model)]
    for step in (1, 2):
        steps.append(scratch / f"step_{step}")
        change(steps[-2], steps[-1], share, step)
    for step, path in enumerate(steps):
        push(path, bucket, step=step, anchor_every=0)
    return bucket, steps[0]


def _seconds(bucket: Bucket, step: int, urls: list[str]) -> float:
    since = time.perf_counter()
    for replica in apply_to_servers(bucket, step, urls).replicas:
        if replica.error is not None:
            raise SystemExit(f"step {step}, {replica.url}: {replica.error}")
    return time.perf_counter() - since


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen3")
    parser.add_argument("--share", type=float, default=0.01, help="of the elements that change")
    parser.add_argument(
        "--slow", type=float, nargs="*", default=[1.0, 2.0, 3.0, 4.0],
        help="seconds that each stand-in takes to stage",
    )  # fmt: skip
    parser.add_argument("--scratch", type=Path, help="an existing directory")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.scratch) as directory, ExitStack() as stack:
        scratch = Path(directory)
        bucket, model = _chain(scratch, options.model, options.share)
        names: dict[str, str] = {}
        for number in range(REAL):
            server: AbstractContextManager[VllmServer] = run_vllm_server(model, scratch / "vllm")
            names[stack.enter_context(server).url] = f"real vLLM {number + 1}"
        for number, seconds in enumerate(options.slow):
            place = scratch / f"stand-in-{number}"
            place.mkdir()
            standin = stack.enter_context(StandIn(model, place))
            standin.vllm.workers.before_staged = partial(time.sleep, seconds)
            names[standin.url] = f"stand-in, {seconds:g} s slow"
        urls = list(names)
        _seconds(bucket, 0, urls)  # they find out what they serve
        alone = {url: _seconds(bucket, 1, [url]) for url in urls}
        together = _seconds(bucket, 2, urls)
    for url, seconds in alone.items():
        print(f"{names[url]:24} {seconds:6.2f} s by itself")
    slowest, total = max(alone.values()), sum(alone.values())
    print(f"{'the slowest':24} {slowest:6.2f} s")
    print(f"{'one after the other':24} {total:6.2f} s")
    print(f"{'side by side':24} {together:6.2f} s, {together / slowest:.2f} of the slowest")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
