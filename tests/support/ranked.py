"""Runs of several ranks, as processes with gloo, that publish what they train.

``Ranks`` runs this file in a process that forks the ranks of one run after the other, since to
import torch, and its compiler, which optimizers ask for, takes longer than to train. Each step the
test alone gathers the whole state, and the first rank notes it in ``root/expected``.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from deltactl.bucket.local import LocalBucket
from deltactl.core.errors import Conflict
from deltactl.ops.verify import verify_bucket
from deltactl.trainer import Every, RanksPublisher
from deltactl.trainer.ranks import group
from deltactl.trainer.upload.waiting import PATIENTLY
from tests.support.page_reader import state_digest
from tests.support.publishing import Bits, MoodyBucket, bits_of


class Ranks:
    """Runs scenarios; a context manager that ends the process behind it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ranked"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=Path(__file__).parents[2],
        )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def __call__(self, root: Path, scenario: str, count: int, seed: int = 0) -> dict[int, Bits]:
        """Run a scenario on so many ranks; returns the whole state at each step that it notes."""
        self._run(root, scenario, count, seed)
        return noted(root)

    def kills(self, root: Path, count: int, seed: int = 0) -> None:
        """Kill a rank of so many runs, one after the other; the chain verifies after each."""
        self._run(root, "killed", count, seed)

    def _run(self, *order: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(*order, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        errors = Path(str(order[0]), "errors")
        assert answer == "well\n", errors.read_text() if errors.exists() else answer


def noted(root: Path) -> dict[int, Bits]:
    """By step, what the runs of a directory have noted."""
    places = (root / "expected").iterdir()
    return {int(path.name): pickle.loads(path.read_bytes()) for path in places}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _digest(state: Mapping[str, torch.Tensor]) -> str:
    codes = {"bfloat16": "BF16", "int64": "I64"}
    bits = {
        name: (codes[dtype], tuple(state[name].shape), data)
        for name, (dtype, data) in bits_of(state).items()
    }
    return state_digest(bits)


# What a rank does.


class Run:
    """One rank of a run."""

    def __init__(self, root: Path, rank: int, count: int, seed: int) -> None:
        self.root, self.rank, self.count, self.seed = root, rank, count, seed
        self.bucket: LocalBucket = MoodyBucket(root / "bucket")
        self.cast: torch.dtype | None = None

    def publisher(self, model: torch.nn.Module, **options: Any) -> RanksPublisher:
        options = {"anchors": Every(3), "scratch": self.root / "scratch"} | options
        return RanksPublisher(model, self.bucket, **options)

    def note(self, model: torch.nn.Module, step: int) -> None:
        """The whole state, gathered by all, as torch gives it."""
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        state = {}
        for name, tensor in inner.state_dict().items():
            whole = _whole(tensor)
            rounds = self.cast is not None and whole.dtype == torch.float32
            state[name] = whole.to(self.cast) if rounds else whole
        if self.rank == 0:
            place = self.root / "expected"
            place.mkdir(exist_ok=True)
            (place / f"{step}.new").write_bytes(pickle.dumps(bits_of(state)))
            os.rename(place / f"{step}.new", place / str(step))

    def train(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
        """The same for the same batch; each rank has another part of it."""
        draw = torch.Generator().manual_seed(100 * batch + self.rank)
        width = next(m for m in model.modules() if isinstance(m, torch.nn.Linear)).in_features
        inputs = torch.randn(4, width, generator=draw).to(next(model.parameters()).dtype)
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def uneven(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.nn.Sequential:
    """Dimensions that few numbers of ranks divide; one is smaller than four."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(13, 30), torch.nn.Tanh(), torch.nn.Linear(30, 7), torch.nn.Linear(7, 3)
    )
    model.register_buffer("steps", torch.tensor(0))
    return model.to(dtype)


def three_lines(run: Run, model: torch.nn.Module, steps: int, **options: Any) -> None:
    """The loop of a script, in which the publisher is the only addition."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with run.publisher(model, optimizer=optimizer, **options) as publisher:
        first = publisher._training
        for step in range(first + 1, first + steps + 1):
            run.train(model, optimizer, step)
            run.note(model, step)
    links = [p.training_step for p in publisher.history if p.kind == "delta"]
    assert links[-1:] == ([first + steps] if run.rank == 0 else [])


def fsdp(run: Run) -> None:
    model = uneven(seed=run.seed)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    three_lines(run, model, 5)


def callback(run: Run) -> None:
    """As transformers' Trainer calls it, on every rank."""
    from deltactl.trainer import DeltaCallback

    model = uneven()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    callback = DeltaCallback(run.bucket, scratch=run.root / "scratch")
    for step in range(4):
        state = SimpleNamespace(global_step=step)
        if step == 0:
            callback.on_train_begin(None, state, None, model=model)
            continue
        run.train(model, optimizer, step)
        callback.on_step_end(None, state, None)
        run.note(model, step)
    callback.on_train_end(None, None, None)
    assert isinstance(callback.publisher, RanksPublisher)
    assert callback.publisher.error is None


def share(run: Run) -> None:
    """What a rank holds is its share of the model, and not more."""
    model = uneven(seed=run.seed)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with run.publisher(model, optimizer=optimizer) as publisher:
        run.train(model, optimizer, 1)
        run.note(model, 1)
        publisher._agree(publisher._line, PATIENTLY)  # type: ignore[arg-type]
        assert publisher._line is not None
        watched = publisher._parts._capturer.mirror.nbytes
        state = model.state_dict().values()
        sharded = [t for t in state if isinstance(t, DTensor)]
        local = sum(t.to_local().nbytes for t in sharded)
        total = sum(t.nbytes for t in sharded)
        assert watched - local in (0, 8), "besides the buffer, the parts that it holds"
        assert publisher._line._owned.nbytes <= total / run.count + 8 + 13 * 30 * 2


def masters(run: Run) -> None:
    """Float32 masters, published as bfloat16, mirrors on the disk."""
    model = uneven(torch.float32)
    fully_shard(model)
    run.cast = torch.bfloat16
    three_lines(run, model, 4, dtype="bfloat16", mirror="disk", encoding="ulp_ctx")


def hsdp(run: Run) -> None:
    """Sharded within, replicated between."""
    mesh = init_device_mesh("cpu", (2, run.count // 2), mesh_dim_names=("replicate", "shard"))
    model = uneven(seed=run.seed)
    fully_shard(model, mesh=mesh)
    three_lines(run, model, 4)


def tensor_parallel(run: Run) -> None:
    """FSDP upon tensor parallelism: both cut the first dimension of one weight."""
    mesh = init_device_mesh("cpu", (2, run.count // 2), mesh_dim_names=("dp", "tp"))
    model = uneven(seed=run.seed)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    three_lines(run, model, 4)


def ddp(run: Run) -> None:
    model = DistributedDataParallel(uneven(torch.float32, seed=run.seed))
    three_lines(run, model, 4)


class Placed(torch.nn.Module):
    """One tensor for each way to place it on a mesh of two dimensions."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        ways = [
            (Replicate(), Replicate()), (Shard(0), Replicate()), (Replicate(), Shard(1)),
            (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0)), (Shard(2), Shard(1)),
        ]  # fmt: skip
        for number, placements in enumerate(ways):
            torch.manual_seed(number)
            whole = torch.randn(5, 7, 3).bfloat16()
            tensor = distribute_tensor(whole, mesh, placements)
            self.register_parameter(f"w{number}", torch.nn.Parameter(tensor))
        self.empty = torch.nn.Parameter(distribute_tensor(torch.empty(0, 4), mesh, ways[1]))
        self.scalar = torch.nn.Parameter(distribute_tensor(torch.tensor(1.5), mesh, ways[0]))
        self.tied = self.w3


def placements(run: Run) -> None:
    """Every kind of placement, changed by hand: a few elements, all, none."""
    vars(group)["_ROUND"] = 64  # so that what is exchanged takes many rounds
    model = Placed(init_device_mesh("cpu", (2, run.count // 2)))
    with run.publisher(model) as publisher:
        for step in range(1, 5):
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    draw = torch.Generator().manual_seed(10 * step + number)
                    share = (0.05, 1.0, 0.0)[(step + number) % 3]
                    change = torch.rand(parameter.shape, generator=draw) < share
                    whole = parameter.full_tensor()
                    whole = torch.where(change, whole * -1.5 + 1, whole)
                    mine = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
                    parameter.copy_(mine)
            publisher.publish()
            run.note(model, step)
    if run.rank == 0:  # the first of two that are tied
        for path in (run.root / "expected").iterdir():
            bits = pickle.loads(path.read_bytes())
            bits.pop("tied", None)
            path.write_bytes(pickle.dumps(bits))


def goes_on(run: Run) -> None:
    """A run that takes up another's chain, whose model had other tensors too."""
    model = uneven(seed=run.seed)
    if run.seed % 2:
        model.append(torch.nn.Linear(3, 2, dtype=torch.bfloat16))
    fully_shard(model)
    three_lines(run, model, 3)


def another_model(run: Run) -> None:
    """In a chain: refused by all ranks, and let in by all where that is meant."""
    three_lines(run, fully_shard(uneven()), 2)
    other = fully_shard(torch.nn.Sequential(uneven(seed=1)))
    refusal = None
    try:
        run.publisher(other)
    except Conflict as error:
        refusal = error
    assert refusal is not None and "another model than the chain's" in str(refusal)
    assert "'0.'" in str(refusal.hint), refusal.hint
    three_lines(run, other, 2, step=2, allow_other_model=True)


def fails(run: Run) -> None:
    """A rank cannot make its part of one step, and another not take what changed of another: both
    are in the next link. Then the bucket fails one rank for a while."""
    model = uneven()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    publisher = run.publisher(model, optimizer=optimizer)
    broken = RuntimeError("broken by the test")

    def breaks(*_: Any, **__: Any) -> Any:
        raise broken

    line, parts = publisher._line, publisher._parts
    assert line is not None
    links = []
    for step in range(1, 8):
        if step == 1 + run.seed and run.rank == 1:
            line._first = line._delta = breaks  # type: ignore[method-assign]
        if step == 3 + run.seed and run.rank == run.count - 1:
            parts._watched = breaks  # type: ignore[method-assign]
        run.train(model, optimizer, step)
        if publisher._encoding is not None:
            publisher._encoding[1].result()  # so that the rank, and no later one, is broken
            links.append(step)
        for owner, names in ((line, ("_first", "_delta")), (parts, ("_watched",))):
            for name in names:
                vars(owner).pop(name, None)
        run.note(model, step)
    publisher.close()
    assert publisher.error is None
    if run.rank == 0:
        published = [p.step for p in publisher.history if p.kind == "delta" or p.step < 3]
        left = {1 + run.seed, 3 + run.seed}
        assert sum(p.merged_steps for p in publisher.history) == len(left), publisher.history
        for path in list((run.root / "expected").iterdir()):
            if int(path.name) not in published:
                path.unlink()


def gives_up(run: Run) -> None:
    """The bucket takes no more of one rank's files: no rank publishes any more, and all know."""
    model = uneven()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    publisher = run.publisher(model, optimizer=optimizer, anchors=Every(0))
    assert isinstance(run.bucket, MoodyBucket)
    for step in range(1, 4):
        if run.rank == 1:
            run.bucket.before = _refuse
        run.train(model, optimizer, step)
        if step < 3:
            run.note(model, step)
    try:
        publisher.close()
    except Exception:
        return
    raise AssertionError("nobody was told")


def _refuse(name: str) -> None:
    if "step_000003" in name:
        raise PermissionError(f"the test does not let {name} pass")


def for_ever(run: Run) -> None:
    """Train until somebody kills one."""
    model = uneven(seed=run.seed)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    states = open(run.root / "states", "a", buffering=1)  # noqa: SIM115 - until the process ends

    def note(*_: Any) -> None:
        state = {name: _whole(tensor) for name, tensor in model.state_dict().items()}
        if run.rank == 0:
            states.write(_digest(state) + "\n")

    optimizer.register_step_post_hook(note)  # before the publisher's own
    publisher = run.publisher(model, optimizer=optimizer)
    (run.root / f"training-{run.rank}").touch()
    step = publisher._training
    while publisher.error is None:
        step += 1
        run.train(model, optimizer, step)


# The processes.


def _rank(scenario: str, root: Path, rank: int, count: int, seed: int) -> None:
    torch.set_num_threads(1)
    os.environ["DELTACTL_CACHE"] = str(root / "cache")
    store = f"file://{root}/rendezvous-{os.getppid()}-{scenario}-{seed}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    globals()[scenario](Run(root, rank, count, seed))
    dist.destroy_process_group()


def _forked(root: Path, work: Callable[[], None]) -> int:
    """In a process of its own, so that this one never has threads when it forks; its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.dup2(os.open(root / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        work()
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    os._exit(1)


def _start(scenario: str, root: Path, count: int, seed: int) -> list[int]:
    work = [partial(_rank, scenario, root, rank, count, seed) for rank in range(count)]
    return [_forked(root, of_rank) for of_rank in work]


def _ends(pids: list[int]) -> Iterator[int]:
    for pid in pids:
        yield os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _kill_one(root: Path, count: int, seed: int, draw: Random) -> None:
    """Kill one rank at a moment while all train, and then, as torchrun would, all others."""
    pids = _start("for_ever", root, count, seed)
    while not all((root / f"training-{rank}").exists() for rank in range(count)):
        time.sleep(0.01)
    time.sleep(draw.uniform(0, 1))  # the moment is not to be a certain one
    first = draw.randrange(count)
    os.kill(pids[first], signal.SIGKILL)
    time.sleep(draw.uniform(0, 0.2))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert list(_ends(pids))[first] == -signal.SIGKILL
    for rank in range(count):
        (root / f"training-{rank}").unlink()


def _kill(root: Path, kills: int, seed: int) -> None:
    """One run after the other, of two ranks or four; the chain is to verify after each."""
    draw = Random(seed)
    for number in range(kills):
        _kill_one(root, draw.choice((2, 4)), number, draw)
        (status,) = _ends([_forked(root, partial(_verify, root))])
        assert status == 0


def _verify(root: Path) -> None:
    if any((root / "bucket").glob("anchors/*/*.index.json")):
        report = verify_bucket(LocalBucket(root / "bucket"), level="rebuild")
        assert report.ok, report.errors


def _well(root: Path, scenario: str, count: int, seed: int) -> bool:
    if scenario != "killed":
        return not any(list(_ends(_start(scenario, root, count, seed))))
    try:
        _kill(root, count, seed)
    except AssertionError:
        return False
    return True


def main() -> None:
    """Take orders from stdin: root, scenario, count, seed."""
    for order in sys.stdin:
        root, scenario, count, seed = order.split()
        print("well" if _well(Path(root), scenario, int(count), int(seed)) else "not", flush=True)


if __name__ == "__main__":
    main()
