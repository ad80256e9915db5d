"""Print how long a real vLLM server stands still for an update, beside its native sparse loader:
``python -m tests.benchmarks.pause``, in an environment with vLLM.

Both load the same steps, one in a hundred elements changed, into the same model on the CPU, each in
a server of its own, one after the other. The pause is from the first route to the last: /pause to
/resume. Before each of our updates the server sums its live weights while it serves; how long that
takes is what an ``apply`` of the step takes that it is on. Memory is what the server's largest
process holds beside mapped files, before the first step was staged and at its most while steps were
loaded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from deltactl.bucket import open_bucket
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.ops.diff import diff
from deltactl.ops.push import push
from deltactl.server.apply import apply_to_servers
from tests.support.vllm_models import MODELS, write_model
from tests.support.vllm_native import plugin
from tests.support.vllm_server import ROOT, VllmServer, run_vllm_server

_NATIVE = ("--weight-transfer-config", '{"backend":"native"}')


@dataclass(slots=True)
class Found:
    """Of one way: seconds paused, staged and summed, by update; bytes of live weights that are
    summed; bytes of memory before and at most."""

    pauses: list[float] = field(default_factory=list)
    stagings: list[float] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    live: int = 0
    before: int = 0
    peak: int = 0


def change(source: Path, target: Path, share: float, seed: int) -> int:
    """Copy a checkpoint of one file and flip the last bit of a share of its bf16 elements; how
    many."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    name = "model.safetensors"
    (target / name).write_bytes((source / name).read_bytes())
    draw = np.random.default_rng(seed)
    with open_checkpoint(source) as checkpoint:
        sizes = [(tensor.name, tensor.nbytes) for tensor in checkpoint.tensors.values()]
    raw = np.memmap(target / name, np.uint8, "r+")
    header = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    bits = raw[header:].view(np.uint16)
    assert bits.nbytes == sum(size for _, size in sizes)
    at = np.unique(draw.integers(bits.size, size=round(bits.size * share)))
    bits[at] ^= 1
    raw.flush()
    return int(at.size)


@contextmanager
def _memory(server: VllmServer, found: Found) -> Iterator[None]:
    """Note what the largest process holds meanwhile."""
    done, processes = threading.Event(), server.processes()

    def held() -> int:
        return max(map(_anonymous, processes))

    def watch() -> None:
        while not done.wait(0.02):
            found.peak = max(found.peak, held())

    found.before = held()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _anonymous(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if "RssAnon" in line)


def _ours(steps: list[Path], scratch: Path, encoding: str) -> Found:
    found = Found()
    bucket = open_bucket(str(scratch / f"bucket-{encoding}"))
    for step, path in enumerate(steps):
        push(path, bucket, step=step, anchor_every=0, encoding=encoding)
    with run_vllm_server(steps[0], scratch / "ours") as server:
        server.generate([[5, 6, 7]])
        apply_to_servers(bucket, 0, [server.url])  # finds out what it serves
        with _memory(server, found):
            for step in range(1, len(steps)):
                [replica] = apply_to_servers(bucket, step, [server.url]).replicas
                if replica.error is not None or replica.seconds_paused is None:
                    raise SystemExit(f"step {step}: {replica.error}")
                found.pauses.append(replica.seconds_paused)
                found.stagings.append(replica.seconds_staging)
                start = time.perf_counter()
                [again] = apply_to_servers(bucket, step, [server.url]).replicas
                found.sums.append(time.perf_counter() - start)
                if again.error is not None or again.how is not None:
                    raise SystemExit(f"step {step} again: {again.error}, {again.how}")
    with open_checkpoint(steps[0]) as checkpoint:
        found.live = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    return found


def _native(steps: list[Path], scratch: Path) -> Found:
    found = Found()
    deltas = []
    for step in range(1, len(steps)):
        delta = scratch / f"{step}.delta"
        with open_checkpoint(steps[step - 1]) as a, open_checkpoint(steps[step]) as b:
            diff(a, b, delta, encoding="raw", step=step)
        deltas.append(delta)
    with open_checkpoint(steps[0]) as checkpoint:
        shapes = {name: list(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    path = f"{ROOT}:{plugin(scratch / 'plugin')}"
    with run_vllm_server(
        steps[0], scratch / "native", options=_NATIVE, environment={"PYTHONPATH": path}
    ) as server:
        server.generate([[5, 6, 7]])
        server.post("/init_weight_transfer_engine", {"init_info": {}})
        with _memory(server, found):
            for delta in deltas:
                info: dict[str, Any] = {"path": str(delta), "shapes": shapes}
                start = time.perf_counter()
                server.post("/pause", mode="keep")
                server.post("/start_weight_update")
                server.post("/update_weights", {"update_info": info})
                server.post("/finish_weight_update", {"weight_version": delta.stem})
                server.post("/resume")
                found.pauses.append(time.perf_counter() - start)
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="474M")
    parser.add_argument("--share", type=float, default=0.01, help="of the elements that change")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--encoding", nargs="*", default=["ulp"])
    parser.add_argument("--scratch", type=Path, help="an existing directory")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.scratch) as directory:
        scratch = Path(directory)
        steps = [write_model(scratch / "step_0", options.model)]
        for step in range(1, options.updates + 1):
            steps.append(scratch / f"step_{step}")
            changed = change(steps[-2], steps[-1], options.share, step)
        print(f"{options.model}: {changed:,} elements change at each of {options.updates} steps")
        native = _native(steps, scratch)
        print(_row("native sparse loader", native))
        for encoding in options.encoding:
            ours = _ours(steps, scratch, encoding)
            print(_row(f"deltactl, {encoding}", ours))
            ratio = median(ours.pauses) / median(native.pauses)
            print(f"  paused {ratio:.3f} of the native loader's time")
    return 0


def _row(name: str, found: Found) -> str:
    pauses = " ".join(f"{1000 * seconds:.0f}" for seconds in found.pauses)
    staged = f", staged before in {median(found.stagings):.2f} s" if found.stagings else ""
    if found.sums:
        seconds = median(found.sums)
        staged += f', found "on it already" by its sums in {1000 * seconds:.0f} ms'
        staged += f" ({found.live / 1e9 / seconds:.1f} GB/s)"
    more = (found.peak - found.before) / 1e6
    return (
        f"{name:22} paused {1000 * median(found.pauses):7.0f} ms (each: {pauses}){staged}; "
        f"memory {found.before / 1e6:.0f} MB and {more:.0f} MB more at most"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
