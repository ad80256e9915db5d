"""Publishes every optimizer step of a training run as the next link of a chain."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch

from deltactl.chain.anchor_policy import AnchorPolicy, Every
from deltactl.chain.store import Bucket
from deltactl.codec import DEFAULT, encoding_named
from deltactl.trainer.capture.mirror import MEMORY
from deltactl.trainer.model.names import Names, Naming, unwrapped
from deltactl.trainer.model.optimizers import Given
from deltactl.trainer.model.tensors import check_view
from deltactl.trainer.upload.account import Notify
from deltactl.trainer.upload.aux_files import Files
from deltactl.trainer.upload.stepping import Stepping


@dataclass(frozen=True, slots=True)
class Settings:
    """What a publisher needs of its arguments to begin; see Publisher."""

    bucket: str | os.PathLike[str] | Bucket
    step: int | None
    encoding: str
    anchors: AnchorPolicy
    files: Files | None
    scratch: str | os.PathLike[str] | None
    mirror: Literal["memory", "disk"]
    notify: Notify | None
    allow_other_model: bool


class Publisher(Stepping[Any]):
    """Publishes a model's weights, step by step, into a bucket::

        with Publisher(model, "s3://bucket/run", optimizer=optimizer):
            ...  # the training loop as it is

    With an ``optimizer`` every call of its ``step`` that steps is published; without one, and for
    what else should be, ``publish`` is called. Training waits only while what changed is taken from
    the weights; encoding and uploading go on beside it.

    The chain in the bucket is gone on with from its tip, whatever became of the run that made it:
    the first link then holds what the model differs by. An empty bucket, and a chain that cannot be
    proven, get an anchor first. A link is only put once the one before it is confirmed. One that
    fails is tried again, for as long as the run goes on; a step that could not even be encoded is
    part of the next link. What is known to have failed, and not yet been made good, is ``error``.

    ``model``: may be wrapped by torch.compile, DistributedDataParallel, Accelerate. Of several
    ranks that hold the same weights only rank 0 publishes. Where a model is spread over ranks, as
    fully_shard and tensor parallelism leave it, each publishes its part and none ever has all of
    it: then every rank makes a publisher with the same arguments and calls ``publish`` and
    ``close`` as often as the others; see RanksPublisher.

    ``bucket``: a bucket's address, or a Bucket.

    ``step``: the training step that the model is at; the next one is one more. By default that of
    the chain's tip. A chain's steps only rise: where training went on from an earlier step than the
    chain has got to, its steps are published under numbers from the tip on, and that is logged;
    ``Publication.training_step`` has the trainer's own.

    ``encoding``: of the deltas, see ``deltactl push``. ``anchors``: when a step gets an anchor
    beside its delta.

    ``optimizer``: one, or a list of several in the order in which they step, such as Muon beside
    AdamW; then the weights are published when the last one has stepped.

    ``when_busy``: what to do while several links wait for the bucket. "wait": training waits until
    one is confirmed, as long as waiting may help, and says so. "merge": steps get no link of their
    own, and the next link holds all changes since the last. ``max_wait``: seconds after which
    "wait" becomes "merge", until the bucket has taken a link.

    ``files``: what travels with anchors so that they can be served: a directory, of which
    everything but weights is taken, or a tokenizer, saved beside the model's config.

    ``names``: from the model's names to the checkpoint's, where those are not what a Hugging Face
    model's ``save_pretrained`` writes.

    ``dtype``: "bfloat16" to publish float32 masters rounded to it.

    ``scratch``: a directory of this publisher's own on a local disk, kept from run to run, by
    default below the cache. It holds the newest local anchor, another while that is made, and as
    much of deltas: up to three times a checkpoint.

    ``mirror``: where the copy of what was last captured is, as large as a checkpoint: in "memory",
    or on the "disk", in ``scratch``.

    ``notify``: called with the bucket's URL and the step once a step is confirmed, on a thread of
    its own; of steps that are confirmed meanwhile it is only told the newest. What it raises is
    logged.

    ``allow_other_model``: let another model follow on the chain's tip, with an anchor; else a chain
    is of one model, see ``deltactl push``. Smaller changes, such as a new head, are logged.

    A publisher that is never closed is when the process ends: what was captured is put then, for up
    to a minute, and it is logged how many steps are not in the bucket.

    Raises UsageError; Unsupported for a model whose weights cannot be published as it holds them
    (FSDP1, DeepSpeed's ZeRO stage 3, adapters of PEFT), on every rank alike; NotAllowed for a
    directory that cannot be written; Conflict where the bucket holds another model's chain, or
    another publisher of this machine has ``scratch``; and what the bucket raises.
    """

    def __new__(cls, model: torch.nn.Module, *_: Any, **__: Any) -> Self:
        """The kind of publisher that the model takes."""
        made: Self = super().__new__(_kind_for(model) if cls is Publisher else cls)
        return made

    def __init__(
        self,
        model: torch.nn.Module,
        bucket: str | os.PathLike[str] | Bucket,
        *,
        optimizer: Given | None = None,
        step: int | None = None,
        encoding: str = DEFAULT,
        anchors: AnchorPolicy = Every(),  # noqa: B008 - frozen
        when_busy: Literal["wait", "merge"] = "wait",
        max_wait: float | None = None,
        files: Files | None = None,
        names: Names | None = None,
        dtype: Literal["bfloat16"] | None = None,
        scratch: str | os.PathLike[str] | None = None,
        mirror: Literal["memory", "disk"] = MEMORY,
        notify: Notify | None = None,
        allow_other_model: bool = False,
    ) -> None:
        encoding_named(encoding)
        check_view(dtype)
        super().__init__(optimizer, step, when_busy, max_wait)
        self._model, self._dtype = unwrapped(model), dtype
        self._naming = Naming(model, names)
        self._open(
            Settings(
                bucket, step, encoding, anchors, files, scratch, mirror, notify, allow_other_model
            )
        )

    def _open(self, settings: Settings) -> None:
        """Look at the model and the bucket, and begin."""
        raise NotImplementedError


def _kind_for(model: torch.nn.Module) -> Any:
    from deltactl.trainer.ranks.piece import is_spread
    from deltactl.trainer.ranks.publisher import RanksPublisher
    from deltactl.trainer.single import SinglePublisher

    spread = isinstance(model, torch.nn.Module) and is_spread(model)
    return RanksPublisher if spread else SinglePublisher
