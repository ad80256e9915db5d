"""Trainers that publish until they are killed, one after the other, each going on with the chain.

``kills(root, ...)`` runs this file in a process that forks them, since to import torch takes longer
than to train. Each notes the state digest of its weights in ``root/states`` at every step, before
it is published, and has weights of its own, as after a training that went on from elsewhere.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Literal

import torch
import torch._dynamo  # which an optimizer would import, in every process for itself

from deltactl.bucket.local import LocalBucket
from deltactl.core.digest import TensorState, hasher, state_digest
from deltactl.ops.verify import verify_bucket
from deltactl.trainer import Every, Publisher

_LINKS = 4  # that a trainer at most gets confirmed before its time has come
_LONGEST = 0.05  # seconds that it lives on from then


def kills(root: Path, count: int, seed: int) -> list[str]:
    """Kill ``count`` trainers, and let one come to its end; what is wrong after each, as text.

    Every fourth is killed at a moment while it begins, the others while they train, once the
    bucket has some links more.
    """
    command = [sys.executable, "-m", "tests.support.killed_trainer", str(root), str(count)]
    done = subprocess.run(
        [*command, str(seed)], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def train(root: Path, seed: int, steps: int | None, running: Callable[[], None]) -> None:
    """Train and publish: for ever, or so many steps and to the end."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    states = open(root / "states", "a", buffering=1)  # noqa: SIM115 - until the process ends
    optimizer.register_step_post_hook(lambda *_: states.write(_state(model) + "\n"))
    mirror: Literal["disk", "memory"] = "disk" if seed % 2 else "memory"
    publisher = Publisher(
        model,
        LocalBucket(root / "bucket"),
        optimizer=optimizer,
        anchors=Every(3),
        mirror=mirror,
        scratch=root / "scratch",
    )
    running()
    done = 0
    while steps is None or done < steps:
        model(torch.randn(4, 64).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if publisher.error is not None:
            raise publisher.error
    publisher.close()


def _state(model: torch.nn.Module) -> str:
    """The state digest of a bf16 model's own state dict."""
    return state_digest(
        TensorState(name, "BF16", tuple(tensor.shape), _digest(tensor))
        for name, tensor in model.state_dict().items()
    )


def _digest(tensor: torch.Tensor) -> str:
    found: str = hasher().update(tensor.view(torch.int16).numpy().tobytes()).hexdigest()
    return found


def _forked(work: Callable[[], None]) -> int:
    """In a process of its own, so that this one never has threads when it forks; its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(1)


def _verify(root: Path) -> None:
    bucket = LocalBucket(root / "bucket")
    if (root / "bucket" / "deltas").exists():
        report = verify_bucket(bucket, level="data")
        assert report.ok, report.errors


def _wait_for_links(root: Path, pid: int, more: int) -> None:
    goal = _links(root) + more
    while (
        _links(root) < goal
        and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    ):
        time.sleep(0.001)


def _links(root: Path) -> int:
    return len(list((root / "bucket").glob("*/step_*")))


def _say(writer: int) -> None:
    os.write(writer, b"!")


def _ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    root, count, draw = Path(sys.argv[1]), int(sys.argv[2]), Random(int(sys.argv[3]))
    faults = []
    for number in range(count):
        status = _kill(root, number, draw)
        if status != -signal.SIGKILL:
            faults.append(f"trainer {number} ended with {status} before it was killed")
        if _ended(_forked(lambda: _verify(root))):
            faults.append(f"the chain that trainer {number} left is not sound")
    if _ended(_forked(lambda: train(root, count, 4, lambda: None))):
        faults.append("the last trainer did not come to its end")
    json.dump(faults, sys.stdout)


def _kill(root: Path, number: int, draw: Random) -> int:
    """Start a trainer and kill it; how it ended."""
    reader, writer = os.pipe()
    pid = _forked(lambda: train(root, number, None, lambda: _say(writer)))
    os.close(writer)
    if number % 4:
        os.read(reader, 1)
        _wait_for_links(root, pid, draw.randint(0, _LINKS))
    time.sleep(draw.uniform(0, _LONGEST))  # the moment is not to be a certain one
    os.kill(pid, signal.SIGKILL)
    os.close(reader)
    return _ended(pid)


if __name__ == "__main__":
    main()
