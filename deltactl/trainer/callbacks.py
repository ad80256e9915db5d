"""The publisher as a callback of transformers' Trainer, and so of TRL's trainers."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from deltactl.chain.store import Bucket
from deltactl.trainer.publisher import Publisher
from deltactl.trainer.report import log


class DeltaCallback(TrainerCallback):
    """Publishes each optimizer step of a Trainer into a bucket::

        trainer.add_callback(DeltaCallback("s3://bucket/run", dtype="bfloat16"))

    ``options``: the publisher's, but for ``optimizer`` and ``step``, which the Trainer knows.
    ``files`` is by default the Trainer's tokenizer or processor. With TRL, whose trainers are
    Trainers, ``notify`` is the place to tell vLLM servers of a step.

    ``publisher`` is there from the beginning of training on, also when it has ended. What it would
    raise when it is made, as for a model that it refuses, is raised then, before training. What
    fails later neither stops training nor keeps its end from saving the model: it is in the log,
    and in ``publisher.error``. A Trainer whose training raises does not tell its callbacks; what
    was captured is put when the process ends, or when the callback is used again.
    """

    def __init__(self, bucket: str | os.PathLike[str] | Bucket, **options: Any) -> None:
        self.publisher: Publisher | None = None
        self._bucket, self._options = bucket, options

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        processing_class: Any = None,
        **others: Any,
    ) -> None:
        tokenizer = processing_class or others.get("tokenizer")  # its name before transformers 5
        options: dict[str, Any] = {"files": tokenizer} | self._options
        if self.publisher is not None:
            self.publisher.abandon()  # of a training that an exception ended, or long closed
        self.publisher = Publisher(model, self._bucket, step=state.global_step, **options)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.publisher is not None:
            self.publisher.publish(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.publisher is None:
            return
        try:
            self.publisher.close()
        except Exception as error:
            log.error("not everything was published: %s", error)
