"""vLLM's part of the stand-in: what its routes do, as seen of vLLM 0.32, the bad included.

- An exception in a worker is status 500. With several ranks the replies of the ranks behind the
  first that fails stay in the queue, and each later call gets theirs to the call before.
- start while a session is open, and finish without one, are such exceptions; so is a method that no
  worker has.
- start and finish with nothing between are answered well, and set the version.
- A resume is answered well whatever the weights are, and paused or not.
- The prefixes that earlier weights computed are served until somebody clears them.
- Once the engine has died /health is status 503, and what needs the engine is status 500.
- The control routes ask for no key; without development mode they are not there at all.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from tests.support.vllm_standin import weights
from tests.support.vllm_standin.workers import Workers

Body = Mapping[str, Any]


class Refused(Exception):
    """An answer with another status than 200."""

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(message)


class Vllm:
    """One server's state. ``plugin``: with deltactl's backend and extension; ``dev``: development
    mode; ``dummy``: with weights that are not the directory's. ``served``: the states that requests
    were answered from, in order."""

    def __init__(
        self,
        model: Path,
        scratch: Path,
        *,
        ranks: int = 1,
        dev: bool = True,
        plugin: bool = True,
        dummy: bool = False,
    ) -> None:
        self.workers = Workers(model, ranks, scratch)
        if dummy:
            self.workers.overwrite(lambda bits: bits ^ 0x15)
        self.dev, self.plugin, self.version = dev, plugin, "0.32.0"
        self.extension: str | None = "deltactl.vllm.WorkerExtension" if plugin else None
        self.key: str | None = None
        self.replicas = 1
        self.logprobs = [-0.5, -1.5, -2.5, -3.5, -4.5]
        self.of_a_reload: list[float] | None = None  # what they are after one
        self.quantization: str | None = None
        self.device, self.moe = "cuda", False
        self.label = "default"
        self.paused = self.session = self.engine_dead = False
        self.resumed_on: list[tuple[str, str]] = []  # state and label
        self.served: list[str] = []
        self._prefixes: dict[str, str] = {}
        self._queues: list[deque[tuple[bool, Any]]] = [deque() for _ in range(ranks)]
        self._core = threading.RLock()
        self._running = threading.Condition()

    @property
    def live(self) -> str:
        """The state digest of the weights as they are now."""
        return weights.state(self.workers.tensors)

    def handle(self, method: str, path: str, query: Body, body: Body) -> Any:
        """The answer's JSON. Raises Refused."""
        open_to_all = {"/version": self._version, "/health": self._health}
        if (method, path) == ("POST", "/v1/completions"):
            return self._complete(body)
        if (method, path) == ("GET", "/v1/models"):
            return {"data": [{"id": "m"}]}
        if path in open_to_all:
            return open_to_all[path](query, body)
        route = _ROUTES.get((method, path)) if self.dev else None
        if route is None:
            raise Refused(404, "Not Found")
        if self.engine_dead and path != "/server_info":
            raise Refused(500, "EngineCore encountered an issue.")
        with self._core:
            return route(self, query, body)

    def _version(self, query: Body, body: Body) -> Any:
        return {"version": self.version}

    def _health(self, query: Body, body: Body) -> Any:
        if self.engine_dead:
            raise Refused(503, "")

    def _complete(self, body: Body) -> Any:
        """Answers with the state that it was computed from; a known prompt from what was then."""
        prompt = str(body["prompt"])
        with self._running:
            self._running.wait_for(lambda: not self.paused)
        with self._core:
            state = self._prefixes.setdefault(prompt, self.live)
            self.served.append(state)
        if "logprobs" not in body:
            return {"choices": [{"text": state}]}
        assert body["model"] == "m"
        row = dict(zip("abcde", self.logprobs, strict=True))
        if not all(map(isfinite, self.logprobs)):
            raise Refused(400, "Out of range float values are not JSON compliant")
        return {"choices": [{"text": state, "logprobs": {"top_logprobs": [row]}}]}

    def rpc(self, method: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Call a method on all ranks, with vLLM's queues between."""
        for rank, reply in enumerate(self._replies(method, arguments)):
            self._queues[rank].append(reply)
        found = []
        for queue in self._queues:
            good, value = queue.popleft()
            if not good:
                raise Refused(500, f"Worker failed with error '{value}'")
            found.append(value)
        return found

    def _replies(self, method: str, arguments: Mapping[str, Any]) -> list[tuple[bool, Any]]:
        ranks = self.workers.ranks
        try:
            if method == "reload_weights":
                self._reload(Path(arguments.get("weights_path", self.workers.model)))
                return [(True, None)] * ranks
            if method.startswith("deltactl_") and self.extension is not None:
                found = self.workers.call(method, arguments, self.session)
                return [(True, value) for value in found]
            if method in ("start", "update", "finish"):
                getattr(self, f"_worker_{method}")(**arguments)
                return [(True, None)] * ranks
            raise AttributeError(f"'Worker' object has no attribute '{method}'")
        except Exception as error:
            return [(False, f"{type(error).__name__}: {error}")] * ranks

    def _worker_start(self) -> None:
        if not self.plugin:
            raise RuntimeError("Weight transfer not configured.")
        if self.session:
            raise RuntimeError("start_weight_update called while a weight update is active")
        self.session = True

    def _worker_update(self, update: Mapping[str, Any]) -> None:
        if not self.session:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        self.workers.commit(str(update["update"]))

    def _worker_finish(self) -> None:
        if not self.session:
            raise RuntimeError("finish_weight_update called without a matching start")
        self.session = False

    def _reload(self, path: Path) -> None:
        """Tensor by tensor, so that what fails half-way has written the half before."""
        for name, live in weights.load(path).items():
            self.workers.tensors[name].bits[:] = live.bits
        self.logprobs = self.of_a_reload or self.logprobs

    # The routes of development mode.

    def _info(self, query: Body, body: Body) -> Any:
        backend = {"backend": "deltactl"} if self.plugin else None
        return {
            "vllm_config": {
                "weight_transfer_config": backend,
                "instance_id": self.workers.server,
                "speculative_config": self.workers.draft,
                "model_config": {
                    "dtype": f"torch.{self.workers.dtype}",
                    "model": str(self.workers.model),
                    "quantization": self.quantization,
                },
                "device_config": {"device": self.device},
                "parallel_config": {
                    "worker_extension_cls": self.extension or "",
                    "data_parallel_size": self.replicas,
                    "is_moe_model": self.moe,
                },
            }
        }

    def _pause(self, query: Body, body: Body) -> Any:
        if query.get("mode", "abort") not in ("abort", "wait", "keep"):
            raise Refused(400, "Invalid pause mode")
        self.paused = True
        if query.get("clear_cache", "true") == "true":
            self._prefixes.clear()
        return {"status": "paused"}

    def _sleep(self, query: Body, body: Body) -> Any:
        level = int(query.get("level", 1))
        self.paused = True
        self._prefixes.clear()
        if level:
            self.workers.sleep(level)
        return {"status": "sleeping", "level": level}

    def _wake(self, query: Body, body: Body) -> Any:
        """Runs again only once all is awake."""
        tags = [query["tags"]] if "tags" in query else ["weights", "kv_cache"]
        self.workers.wake(tags)
        if not self.workers.asleep:
            self._resume(query, body)
        return {"status": "sleeping" if self.workers.asleep else "awake", "tags": tags}

    def _check_weights(self, query: Body, body: Body) -> Any:
        assert body["action"] == "reset"
        self.workers.overwrite(lambda bits: 0 * bits)
        return {"success": True}

    def _resume(self, query: Body, body: Body) -> Any:
        self.resumed_on.append((self.live, self.label))
        with self._running:
            self.paused = False
            self._running.notify_all()
        return {"status": "resumed"}

    def _start(self, query: Body, body: Body) -> Any:
        self.rpc("start", {})
        return {"message": "Weight update started"}

    def _update(self, query: Body, body: Body) -> Any:
        if "update_info" not in body:
            raise Refused(400, "Field required")
        self.rpc("update", {"update": body["update_info"]})
        return {"message": "Weights updated"}

    def _finish(self, query: Body, body: Body) -> Any:
        self.rpc("finish", {})
        if body.get("weight_version") is not None:
            self.label = body["weight_version"]
        return {"message": "Weight update finished"}

    def _set_label(self, query: Body, body: Body) -> Any:
        self.label = body["new_version"]
        return {"success": True, "new_version": self.label}

    def _collective(self, query: Body, body: Body) -> Any:
        return {"results": self.rpc(body["method"], body.get("kwargs", {}))}

    def _reset_prefixes(self, query: Body, body: Body) -> Any:
        self._prefixes.clear()
        return {"success": True}


_Route = Callable[[Vllm, Body, Body], Any]

_ROUTES: dict[tuple[str, str], _Route] = {
    ("GET", "/is_paused"): lambda v, q, b: {"is_paused": v.paused},
    ("GET", "/weight_info"): lambda v, q, b: {"weight_version": v.label},
    ("GET", "/get_world_size"): lambda v, q, b: {"world_size": v.workers.ranks * v.replicas},
    ("GET", "/server_info"): Vllm._info,
    ("POST", "/pause"): Vllm._pause,
    ("POST", "/resume"): Vllm._resume,
    ("POST", "/sleep"): Vllm._sleep,
    ("POST", "/wake_up"): Vllm._wake,
    ("POST", "/weight_checker"): Vllm._check_weights,
    ("GET", "/is_sleeping"): lambda v, q, b: {"is_sleeping": v.paused or bool(v.workers.asleep)},
    ("POST", "/start_weight_update"): Vllm._start,
    ("POST", "/update_weights"): Vllm._update,
    ("POST", "/finish_weight_update"): Vllm._finish,
    ("POST", "/update_weight_version"): Vllm._set_label,
    ("POST", "/collective_rpc"): Vllm._collective,
    ("POST", "/reset_prefix_cache"): Vllm._reset_prefixes,
    ("POST", "/reset_mm_cache"): lambda v, q, b: None,
    ("POST", "/reset_encoder_cache"): lambda v, q, b: None,
}
