"""What ``--worker-extension-cls deltactl.vllm.WorkerExtension`` adds to vLLM's worker.

Its methods are called on all ranks by ``POST /collective_rpc`` with ``{"method": ..., "kwargs":
{...}}``. Each returns the state of its rank afterwards, a dict that survives as JSON: what
``Serving.state`` tells and

- ``backend``: whether the server has our engine; without it nothing is known;
- ``dtype``, ``model``: as vLLM was configured; ``draft``: ``method`` and ``model`` of what guesses
  tokens;
- ``session``: whether a weight update was started and not finished;
- ``call``: the argument ``call`` given back. After an exception in some other RPC vLLM gives out
  each reply of a rank one call late; who sends a fresh ``call`` each time sees it.

None raises, for the same reason. What a call met is ``error`` of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import deltactl
from deltactl.vllm.update.served import PROTOCOL
from deltactl.vllm.update.serving import Serving
from deltactl.vllm.update.sleeping import asleep

State = dict[str, Any]

_OF_SERVING = (
    "server", "step", "state", "bucket", "poisoned", "doubt", "error", "update", "map", "audit",
    "asleep",
)  # fmt: skip


class WorkerExtension:
    """Mixed into the worker by vLLM, never made by itself. See the module."""

    # Of vLLM's worker
    rank: int
    vllm_config: Any
    weight_transfer_engine: Any

    def deltactl_state(self, call: str | None = None) -> State:
        """Tell how things are."""
        return _told(self, call)

    def deltactl_identify(
        self, bucket_states: Mapping[str, int] | None = None, call: str | None = None
    ) -> State:
        """Find out in a thread which state is served; ``bucket_states``: state digest to step."""
        return _told(self, call, lambda serving: serving.identify(bucket_states))

    def deltactl_map(self, call: str | None = None) -> State:
        """Collective: record the weight map."""
        return _told(self, call, lambda serving: serving.record_map())

    def deltactl_tensors(self, call: str | None = None) -> State:
        """Tell on the first rank, in ``tensors``, type and shape of the checkpoint's by name."""
        found: list[Any] = []
        act = (lambda serving: found.append(serving.tensors())) if self.rank == 0 else None
        return _told(self, call, act) | {"tensors": found[0] if found else None}

    def deltactl_stage(self, update: Mapping[str, Any], call: str | None = None) -> State:
        """Begin an update in a thread; see ``Serving.stage``."""
        return _told(self, call, lambda serving: serving.stage(update))

    def deltactl_seal(self, id: str, call: str | None = None) -> State:
        """Collective: prove the staged update against the live weights of all ranks."""
        return _told(self, call, lambda serving: serving.seal(id))

    def deltactl_discard(self, id: str, call: str | None = None) -> State:
        """Forget an update that was not committed."""
        return _told(self, call, lambda serving: serving.discard(id))

    def deltactl_done(self, id: str, call: str | None = None) -> State:
        """Acknowledge an update."""
        return _told(self, call, lambda serving: serving.done(id))

    def deltactl_audit(self, call: str | None = None) -> State:
        """Collective: sum the live weights in a thread."""
        return _told(self, call, lambda serving: serving.audit())

    def deltactl_audit_seal(self, call: str | None = None) -> State:
        """Collective: compare the sums of all ranks with the chain's."""
        return _told(self, call, lambda serving: serving.seal_audit())


def _told(
    worker: WorkerExtension, call: str | None, act: Callable[[Serving], None] | None = None
) -> State:
    """The state after ``act``. A function, since vLLM wants no further names in its worker."""
    config = worker.vllm_config
    serving = getattr(worker.weight_transfer_engine, "serving", None)
    state: State = dict.fromkeys(_OF_SERVING) | {"identity": "unknown"}
    if isinstance(serving, Serving):
        worker.weight_transfer_engine.runner = getattr(worker, "model_runner", None)
        serving.asleep = partial(asleep, worker)
        if act is not None:
            act(serving)
        state |= serving.state()
    return state | {
        "deltactl": deltactl.__version__,
        "protocol": PROTOCOL,
        "rank": worker.rank,
        "world_size": config.parallel_config.world_size,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "model": str(config.model_config.model),
        "backend": isinstance(serving, Serving),
        "draft": _draft(config),
        "session": bool(getattr(worker, "_weight_update_active", False)),
        "call": call,
    }


def _draft(config: Any) -> State | None:
    """How vLLM guesses tokens, if it does."""
    speculative = getattr(config, "speculative_config", None)
    if speculative is None:
        return None
    return {key: str(getattr(speculative, key, None)) for key in ("method", "model")}
