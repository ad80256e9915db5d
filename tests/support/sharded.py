"""Two ranks with models of DeepSpeed's ZeRO stage 3 and of FSDP1, each shown to every publisher.

Run as ``python -m tests.support.sharded ROOT RANK``, by each rank. What came of a case is a line of
``ROOT/rank-RANK.jsonl``; that both ranks come to the end shows that none waits for the other.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from deltactl.core.errors import DeltactlError, UsageError
from deltactl.trainer import DeltaCallback, Publisher, RanksPublisher
from tests.support.publishing import bits_of, small, update

COUNT = 2
CPU = torch.device("cpu")

Case = Callable[[Path], Any]


def run(root: Path) -> list[dict[str, dict[str, Any]]]:
    """What came of each case, by rank."""
    module = [sys.executable, "-m", "tests.support.sharded", str(root)]
    here = Path(__file__).parents[2]
    ranks = [
        subprocess.Popen([*module, str(rank)], cwd=here, stdout=subprocess.DEVNULL)
        for rank in range(COUNT)
    ]
    assert [rank.wait() for rank in ranks] == [0] * COUNT
    lines = [(root / f"rank-{rank}.jsonl").read_text().splitlines() for rank in range(COUNT)]
    return [{row["case"]: row for row in map(json.loads, rows)} for rows in lines]


# Models.


def fsdp1(**options: Any) -> torch.nn.Module:
    return FullyShardedDataParallel(small(torch.float32), device_id=CPU, **options)


def nested() -> torch.nn.Module:
    """Only a part of it is wrapped."""
    return torch.nn.ModuleDict({"head": torch.nn.Linear(24, 2), "body": fsdp1()})


def by_layer() -> torch.nn.Module:
    policy = ModuleWrapPolicy({torch.nn.Linear})
    return fsdp1(auto_wrap_policy=policy, use_orig_params=True)


def initialize(model: torch.nn.Module, stage: int = 3) -> Any:
    """DeepSpeed's engine of the model, which it shards in place."""
    config = settings(stage) | {"bf16": {"enabled": stage < 3}}
    import deepspeed

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    return engine


def settings(stage: int) -> dict[str, Any]:
    """DeepSpeed's, which is imported where it is needed: it takes seconds."""
    import deepspeed

    # An operation of its own for the CPU, which it would compile; it can do without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }


def zero3() -> torch.nn.Module:
    model = small(torch.float32)
    initialize(model)
    return model


def engine() -> Any:
    return initialize(small(torch.float32))


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "fsdp1": cache(fsdp1),
    "fsdp1 nested": cache(nested),
    "fsdp1 by layer": cache(by_layer),
    "zero3": cache(zero3),
    "zero3 engine": cache(engine),
}
"""Each is made once: to be refused changes nothing."""

# Who is shown them.


def publisher(model: torch.nn.Module, place: Path) -> Any:
    return Publisher(model, place / "bucket", scratch=place / f"scratch-{dist.get_rank()}")


def ranks_publisher(model: torch.nn.Module, place: Path) -> Any:
    return RanksPublisher(model, place / "bucket", scratch=place / "scratch")


def callback(model: torch.nn.Module, place: Path) -> Any:
    found = DeltaCallback(place / "bucket", scratch=place / f"scratch-{dist.get_rank()}")
    found.on_train_begin(None, SimpleNamespace(global_step=0), None, model=model)


PUBLISHERS = {"Publisher": publisher, "RanksPublisher": ranks_publisher, "DeltaCallback": callback}


def wrapped_later(make: Callable[..., Any], wrap: Callable[[torch.nn.Module], Any]) -> Case:
    """The publisher was made before."""

    def case(place: Path) -> None:
        model = small(torch.float32)
        with make(model, place) as found:
            wrap(model)
            found.publish()

    return case


def wrap_fsdp1(model: torch.nn.Module) -> Any:
    return FullyShardedDataParallel(model, device_id=CPU)


def wrap_by_layer(model: torch.nn.Module) -> Any:
    return FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)


def wrapped_much_later(place: Path) -> str:
    """After a step was published; training goes on."""
    model = small(torch.float32)
    found = publisher(model, place)
    found.publish()
    wrapper = wrap_fsdp1(model)
    optimizer = torch.optim.AdamW(wrapper.parameters(), lr=1e-3)
    for step in range(3):
        update(wrapper, optimizer, step)
        found.publish()
    error = found.error
    if dist.get_rank():
        found.close()
        assert error is None
        return "trained"
    with contextlib.suppress(DeltactlError):
        found.close()
    assert found.error is not None
    return f"trained, {type(error).__name__}: {error}"


def zero2(place: Path) -> None:
    """It leaves each rank whole parameters: published under the model's own names."""
    wrapped = initialize(small(), stage=2)
    with publisher(wrapped, place) as found:
        for step in (1, 2, 3):
            inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(step)).bfloat16()
            wrapped.backward(wrapped(inputs).float().square().mean())
            wrapped.step()
            found.publish(step)
            if dist.get_rank() == 0:
                (place / f"expected-{step}").write_bytes(
                    pickle.dumps(bits_of(wrapped.module.state_dict()))
                )
    assert found.error is None


def optimizer_of_zero2(place: Path) -> None:
    """It steps copies, which are written back later."""
    wrapped = initialize(small(), stage=2)
    Publisher(wrapped, place / "bucket", optimizer=wrapped.optimizer)


def inner_optimizer_of_zero2(place: Path) -> None:
    wrapped = initialize(small(), stage=2)
    Publisher(wrapped, place / "bucket", optimizer=wrapped.optimizer.optimizer)


def trainer(place: Path, stage: int) -> dict[str, Any]:
    """As transformers' Trainer has DeepSpeed wrap a model; what was published."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(place / "out"), max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
        ddp_backend="gloo", per_device_train_batch_size=8, bf16=True, deepspeed=settings(stage),
    )  # fmt: skip
    ids = [{"input_ids": [n + 1] * 8, "labels": [n + 2] * 8} for n in range(32)]
    found = DeltaCallback(place / "bucket", scratch=place / f"scratch-{dist.get_rank()}")
    Trainer(
        model=Qwen3ForCausalLM(config), args=arguments, train_dataset=ids, callbacks=[found]
    ).train()
    assert found.publisher is not None and found.publisher.error is None
    return {p.step: p.kind for p in found.publisher.history}


never_closed: list[RanksPublisher] = []


def ranks_never_closed(place: Path) -> None:
    """What this process ends with."""
    model = fully_shard(small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    never_closed.append(
        RanksPublisher(model, place / "bucket", optimizer=optimizer, scratch=place / "scratch")
    )
    for step in (1, 2, 3):
        update(model, optimizer, step)
        whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
        if dist.get_rank() == 0:
            (place / f"expected-{step}").write_bytes(pickle.dumps(bits_of(whole)))


def names_of_no_tensor(place: Path) -> None:
    """On one rank; the other is told."""
    names = {"nonexistent": None} if dist.get_rank() else None
    RanksPublisher(small(), place / "bucket", scratch=place / "scratch", names=names)


def another_dtype_later(place: Path) -> list[str]:
    """What a rank tells of it in three steps."""
    model = small(torch.float32)
    found = ranks_publisher(model, place)
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("deltactl")
    log.addHandler(handler)
    try:
        found.publish()
        model.bfloat16()
        for _ in range(3):
            found.publish()
        with contextlib.suppress(UsageError):
            found.close()
        return told
    finally:
        log.removeHandler(handler)


def one_of_emptied(place: Path) -> None:
    """No sharding that is known, and yet a rank whose parameters are empty."""
    model = small(torch.float32)
    model[1].weight.data = torch.empty(0)
    publisher(model, place)


CASES: dict[str, Case] = {
    f"{kind}: {name}": lambda place, make=make, model=model: make(model(), place)
    for kind, model in MODELS.items()
    for name, make in PUBLISHERS.items()
} | {
    "fsdp1 later: Publisher": wrapped_later(publisher, wrap_fsdp1),
    "fsdp1 later by layer: Publisher": wrapped_later(publisher, wrap_by_layer),
    "fsdp1 later: RanksPublisher": wrapped_later(ranks_publisher, wrap_fsdp1),
    "zero3 later: Publisher": wrapped_later(publisher, initialize),
    "zero3 later: RanksPublisher": wrapped_later(ranks_publisher, initialize),
    "fsdp1 much later: Publisher": wrapped_much_later,
    "emptied: Publisher": one_of_emptied,
    "zero2: Publisher": zero2,
    "zero2's optimizer: Publisher": optimizer_of_zero2,
    "zero2's inner optimizer: Publisher": inner_optimizer_of_zero2,
    "names of no tensor: RanksPublisher": names_of_no_tensor,
    "another dtype later: RanksPublisher": another_dtype_later,
    "zero3 of a Trainer: DeltaCallback": lambda place: trainer(place, stage=3),
    "zero2 of a Trainer: DeltaCallback": lambda place: trainer(place, stage=2),
    "never closed: RanksPublisher": ranks_never_closed,
}  # fmt: skip


def main(root: Path, rank: int) -> None:
    """All cases, one after the other."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(COUNT)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=COUNT
    )
    with open(root / f"rank-{rank}.jsonl", "w") as lines:
        for number, (name, case) in enumerate(CASES.items()):
            place = root / str(number)
            row = {"case": name, "error": None, "says": None, "hint": None}
            try:
                row["says"] = case(place)
            except DeltactlError as error:
                row |= {"error": type(error).__name__, "says": str(error), "hint": error.hint}
            row["published"] = sorted(p.name for p in place.glob("bucket/*"))
            print(json.dumps(row), file=lines, flush=True)
            dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
