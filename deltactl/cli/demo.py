"""``deltactl demo``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltactl.cli.interface import text
from deltactl.cli.interface.exits import UNSOUND
from deltactl.cli.interface.manual import manual
from deltactl.cli.interface.options import Json, Quiet, output
from deltactl.cli.loop import (
    LOOP_KEYS,
    LOOP_STEPS,
    Asked,
    Loop,
    LoopBucket,
    LoopPlot,
    LoopSeed,
    LoopVllm,
    check,
    run_loop,
)
from deltactl.core.errors import Conflict, DeltactlError, UsageError
from deltactl.core.facts import facts_of
from deltactl.core.progress import Progress

if TYPE_CHECKING:
    from deltactl.chain.store import Bucket
    from deltactl.ops.pull import PullReport
    from deltactl.ops.push import PushReport
    from deltactl.ops.verify import VerifyReport

_STEPS = 12
_NEEDED = ("torch", "transformers", "tokenizers")


@dataclass(frozen=True, slots=True)
class _Published:
    """A step of the training, and what became of it in the bucket."""

    push: PushReport
    path: Path
    loss: float
    checkpoint_bytes: int

    @property
    def sparsity(self) -> float | None:
        changed = self.push.changed_elements
        return None if changed is None else 1 - changed / self.push.total_elements

    @property
    def times_smaller(self) -> float:
        return self.checkpoint_bytes / self.push.bytes


@dataclass(frozen=True, slots=True)
class _Account:
    """All that the demo found out. ``differing``: tensors whose bits are not the trainer's."""

    steps: tuple[_Published, ...]
    verify: VerifyReport
    pull: PullReport
    trainer_state: str
    elements: int
    differing: tuple[str, ...]
    where: Path | None

    @property
    def equal(self) -> bool:
        return self.pull.state == self.trainer_state and not self.differing and self.elements > 0

    @property
    def ok(self) -> bool:
        return self.verify.ok and not self.verify.unproven and self.equal


@manual(
    keys={
        "ok": "whether the chain was verified and the last step came back bit for bit",
        "steps": "published steps: step, kind, bytes, changed_elements, sparsity (both null for a "
        "first anchor), times_smaller, state, loss (nats a token)",
        "total_elements": "elements of the model",
        "checkpoint_bytes": "size of a step's tensors",
        "verify": "of the chain, at level rebuild: ok, level, links, errors",
        "pull": "of the last step: step, state, bytes_fetched",
        "equal": "whether the pulled tensors are the trainer's, bit for bit",
        "trainer_state": "state digest of the trainer's last checkpoint",
        "differing": "names of tensors that differ",
        "directory": "where all was kept; null if it was removed",
        "bucket": "the chain's bucket; null if it was removed",
        **{f"--loop: {key}": what for key, what in LOOP_KEYS.items()},
    },
    exits=[UNSOUND, 4, 5, 11],
    examples=[
        "deltactl demo",
        "deltactl demo kept && deltactl log kept/bucket",
        "deltactl demo --loop --vllm VENV/bin/vllm --plot reward.png",
    ],
)
def demo(
    ctx: typer.Context,
    directory: Annotated[
        Path | None,
        typer.Argument(
            readable=False,
            metavar="DIR",
            help="Keep checkpoints, bucket and pulled step here; by default they are removed.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            min=1,
            help=f"Steps to train and publish. Default: {_STEPS}; with --loop {LOOP_STEPS}.",
            show_default=False,
        ),
    ] = None,
    loop: Loop = False,
    bucket: LoopBucket = None,
    seed: LoopSeed = None,
    vllm: LoopVllm = None,
    plot: LoopPlot = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a tiny model, publish every step, verify the chain, and pull the last step back.

    A Qwen3-shaped model of 0.7 million parameters is really trained, by AdamW on float32 weights at
    a learning rate of 2e-6, and saved in bfloat16 after each step. The steps go into a local
    bucket; the chain is verified by rebuilding every step; the last one is pulled, compared with
    the trainer's bit for bit, and loaded by transformers. Takes seconds, and needs no GPU and no
    network.

    With --loop the model learns a word game, in processes that share only the bucket: a trainer
    publishes every step, a follower brings a real vLLM server to each, and a player asks the
    server, plays against an environment over HTTP, and puts rollouts into the bucket. At the end
    the server's weights are compared with the trainer's, bit for bit. Takes minutes, one of them
    for vLLM to start; it needs vLLM, on the CPU if need be.
    """
    screen = output(ctx, json=json, quiet=quiet)
    asked = Asked(bucket, seed, vllm, plot)
    _check_installed()
    if loop:
        check(asked)
        with _place(directory) as place:
            run_loop(screen, place, steps, asked, directory)
        return
    asked.refuse()
    with _place(directory) as place, screen.progress() as progress:
        account = _run(place, steps or _STEPS, directory, progress)
    screen.result(_document(account), lambda: _lines(account))
    if not account.ok:
        for error in _faults(account):
            screen.fault(error)
        raise typer.Exit(UNSOUND)


def _check_installed() -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise DeltactlError(
            f"the demo trains a model, which needs {' and '.join(missing)}",
            found="not installed",
            hint="pip install 'deltactl[demo]'",
        )


@contextmanager
def _place(directory: Path | None) -> Iterator[Path]:
    """Where the demo works. Tips are cached apart: the user's own cache is none of its business."""
    with TemporaryDirectory(prefix="deltactl-demo-") as temporary:
        place = Path(temporary) if directory is None else _empty(directory)
        settings = {
            "DELTACTL_CACHE": str(Path(temporary, "cache")),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield place
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _empty(directory: Path) -> Path:
    """``directory``, made if need be. What holds something may be somebody's: it is left alone."""
    hint = "name a directory that is empty or does not exist"
    if directory.exists() and not directory.is_dir():
        raise UsageError(
            "the place is a file; the demo fills a directory", file=directory, hint=hint
        )
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise Conflict("the directory is not empty", file=directory, hint=hint)
    return directory


def _run(place: Path, steps: int, where: Path | None, progress: Progress) -> _Account:
    from deltactl.bucket import open_bucket
    from deltactl.checkpoint.checkpoint import open_checkpoint
    from deltactl.checkpoint.state import state_of
    from deltactl.ops.pull import pull
    from deltactl.ops.verify import verify_bucket

    bucket = open_bucket(str(place / "bucket"))
    published = tuple(_publish(place / "trainer", bucket, steps, progress))
    verified = verify_bucket(bucket, level="rebuild")
    pulled = pull(bucket, place / "pulled")
    last = published[-1].path
    with open_checkpoint(last) as checkpoint:
        state = state_of(checkpoint)
    elements, differing = _compare(place / "pulled", last)
    return _Account(published, verified, pulled, state, elements, tuple(differing), where)


def _publish(out: Path, bucket: Bucket, steps: int, progress: Progress) -> Iterator[_Published]:
    from deltactl.checkpoint.checkpoint import open_checkpoint
    from deltactl.demo.tiny_model import train
    from deltactl.ops.push import push

    progress("training", 0, 1)
    for trained in train(out, steps):
        report = push(trained.path, bucket, step=trained.step)
        with open_checkpoint(trained.path) as checkpoint:
            size = checkpoint.nbytes
        progress("training", trained.step * size, steps * size)
        yield _Published(report, trained.path, trained.loss, size)


def _compare(found: Path, expected: Path) -> tuple[int, list[str]]:
    """Elements of ``expected``, and the tensors that ``found`` does not hold with the same bits.

    By the safetensors library and by transformers, as a server would load it: the library that is
    on show here has no part in this.
    """
    from transformers import AutoModelForCausalLM

    from deltactl.demo.tiny_model import quiet

    wanted, held = _load(expected), _load(found)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(found)
    served = model.bfloat16().state_dict()
    differing = [
        name
        for name in sorted(wanted.keys() | held.keys())
        if not (
            _same_bits(held.get(name), wanted.get(name))
            and _same_bits(served.get(name), wanted.get(name))
        )
    ]
    return sum(tensor.numel() for tensor in wanted.values()), differing


def _load(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def _same_bits(a: Any, b: Any) -> bool:
    """Whether two bfloat16 tensors are one, bit for bit; no tensor is equal to nothing."""
    import torch

    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def _document(account: _Account) -> dict[str, Any]:
    last, where = account.steps[-1], account.where
    return facts_of(
        account,
        *("ok", "steps", "total_elements", "checkpoint_bytes", "verify", "pull", "equal"),
        *("trainer_state", "differing"),
        steps=[_step(published) for published in account.steps],
        total_elements=last.push.total_elements,
        checkpoint_bytes=last.checkpoint_bytes,
        verify=facts_of(account.verify, "ok", "level", "links", "errors"),
        pull=facts_of(account.pull, "step", "state", "bytes_fetched"),
        directory=where,
        bucket=None if where is None else where / "bucket",
    )


def _step(published: _Published) -> dict[str, Any]:
    of_push = facts_of(published.push, "step", "kind", "bytes", "changed_elements", "state")
    return of_push | facts_of(published, "sparsity", "times_smaller", "loss")


def _lines(account: _Account) -> Iterable[str]:
    last = account.steps[-1]
    total, size = last.push.total_elements, last.checkpoint_bytes
    model = f"a model of {text.plural(total, 'element')}, {text.size(size)} in bfloat16"
    yield f"trained {model}, for {text.plural(len(account.steps), 'step')}"
    yield ""
    head = (">step", "kind", ">size", ">changed", ">sparsity", ">smaller")
    yield from text.table(head, [_row(published) for published in account.steps])
    yield ""
    verified, pulled = account.verify, account.pull
    links, faults = text.plural(verified.links, "link"), text.plural(len(verified.errors), "fault")
    yield f"verified {links} at level {verified.level}: {faults}"
    got = f"{text.size(pulled.bytes_fetched)} in {text.plural(pulled.links, 'link')}"
    yield f"pulled step {pulled.step}: {got}, state {text.short(pulled.state)}"
    if account.ok:
        yield (
            f"ok: step {pulled.step} pulled from the chain equals the trainer's, "
            f"{text.plural(account.elements, 'element')}, bit for bit"
        )
    if account.where is not None:
        yield ""
        yield "try next:"
        for command in _next_commands(account.where / "bucket", last.push.step):
            yield f"  {command}"


def _row(published: _Published) -> tuple[object, ...]:
    push = published.push
    both = push.kind == "anchor" and push.changed_elements is not None  # an anchor beside its delta
    return (
        push.step,
        "delta, anchor" if both else push.kind,
        text.size(push.bytes),
        text.count(push.changed_elements),
        text.share(published.sparsity),
        text.times(published.times_smaller),
    )


def _next_commands(bucket: Path, last: int) -> list[str]:
    name = shlex.quote(str(bucket))
    step = shlex.quote(f"{bucket}@{min(5, last)}")
    return [
        f"deltactl log {name}",
        f"deltactl show {step}",
        f"deltactl verify {name} --level rebuild",
    ]


def _faults(account: _Account) -> Iterator[DeltactlError]:
    for row in account.verify.errors + account.verify.unproven:
        yield DeltactlError(**row)
    step = account.pull.step
    if account.pull.state != account.trainer_state:
        yield DeltactlError(
            "the pulled step is not the trainer's",
            step=step,
            expected=f"state {account.trainer_state}",
            found=f"state {account.pull.state}",
        )
    for name in account.differing:
        yield DeltactlError("the tensor's bits are not the trainer's", step=step, tensor=name)
