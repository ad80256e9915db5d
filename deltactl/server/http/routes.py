"""The routes of a vLLM server that an update takes, by what they do."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Literal

from deltactl.core.errors import Malformed
from deltactl.server.http.wire import HEALTH, Wire
from deltactl.server.model import Spec
from deltactl.server.state import EngineState, Seen, of_ranks, specs_in

PauseMode = Literal["keep", "wait", "abort"]


class Server:
    """One vLLM server. All methods raise what Wire raises, and nothing is tried twice."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url, timeout
        self._wire = Wire(url, timeout)

    def close(self) -> None:
        self._wire.close()

    def version(self) -> str:
        found = self._wire.get("/version").get("version")
        if not isinstance(found, str):
            raise Malformed("the answer to /version names none", file=self.url)
        return found

    def health(self) -> None:
        """Raises Dead where vLLM says that its engine is."""
        self._wire.get(HEALTH)

    def configuration(self) -> dict[str, Any]:
        """vLLM's own configuration. The first time it is asked for takes a server seconds."""
        found = self._wire.get("/server_info", config_format="json").get("vllm_config")
        if not isinstance(found, dict):
            raise Malformed("the server's configuration is no JSON object", file=self.url)
        return found

    def world_size(self) -> int:
        """How many ranks hold the weights, those of other data-parallel replicas included."""
        return self._number("/get_world_size", "world_size")

    def paused(self) -> bool:
        found = self._wire.get("/is_paused").get("is_paused")
        if not isinstance(found, bool):
            raise Malformed("the server does not say whether it is paused", file=self.url)
        return found

    def label(self) -> str:
        """The weight version that the server tells its clients; a label and nothing more."""
        return str(self._wire.get("/weight_info").get("weight_version"))

    def set_label(self, label: str) -> None:
        self._wire.post("/update_weight_version", {"new_version": label})

    def model(self) -> str:
        """The name by which requests ask for the model."""
        rows = self._wire.get("/v1/models").get("data")
        first = rows[0] if isinstance(rows, list) and rows else None
        if not isinstance(first, dict) or not isinstance(first.get("id"), str):
            raise Malformed("the answer to /v1/models names no model", file=self.url)
        return str(first["id"])

    def logprobs(self, model: str, prompt: Sequence[int], most: int) -> list[float]:
        """Of the likeliest tokens, ``most`` at most, after a prompt of token ids."""
        body = {"model": model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
        found: Any = self._wire.post("/v1/completions", {**body, "logprobs": most})
        try:
            (row,) = found["choices"][0]["logprobs"]["top_logprobs"]
            return [float(value) for value in row.values()]
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            what = "the answer to /v1/completions has no log probabilities"
            raise Malformed(what, file=self.url) from None

    def look(self) -> Seen:
        return Seen(self.engine("deltactl_state"), self.paused(), self.label())

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        self._wire.post("/pause", None, mode=mode, clear_cache=clear_cache)

    def resume(self) -> None:
        self._wire.post("/resume", None)

    def start(self) -> None:
        self._wire.post("/start_weight_update", None)

    def commit(self, update: str) -> None:
        self._wire.post("/update_weights", {"update_info": {"update": update}})

    def finish(self, label: str | None) -> None:
        body = {} if label is None else {"weight_version": label}
        self._wire.post("/finish_weight_update", body)

    def clear_prefixes(self) -> bool:
        """Forget the prefixes that earlier weights computed; requests in flight begin anew.

        False where vLLM could not, as something held them.
        """
        answer = self._wire.post(
            "/reset_prefix_cache", None, reset_running_requests=True, reset_external=True
        )
        return answer.get("success") is True

    def clear_inputs(self) -> None:
        """Forget what the encoders of images and the like computed."""
        self._wire.post("/reset_mm_cache", None)
        self._wire.post("/reset_encoder_cache", None)

    def engine(self, method: str, **arguments: Any) -> EngineState:
        """Call a method of the plugin on every rank: what they say of themselves afterwards."""
        call = secrets.token_hex(8)
        return of_ranks(self.rpc(method, call=call, **arguments), call, self.url)

    def tensors(self) -> dict[str, Spec]:
        """Of the checkpoint that the server was started on; empty where it cannot tell."""
        call = secrets.token_hex(8)
        replies = self.rpc("deltactl_tensors", call=call)
        of_ranks(replies, call, self.url)
        return specs_in(replies[0])

    def rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Call a worker's method on every rank; their replies.

        Without a limit of vLLM's own: the replies that come after it would be taken for those of
        the next call. For the same reason a method that may not be there must not be called on a
        server of several ranks.
        """
        body: dict[str, Any] = {"method": method, "kwargs": arguments}
        found = self._wire.post("/collective_rpc", body).get("results", [])
        if not isinstance(found, list):
            raise Malformed("the server's answer has no results", file=self.url)
        return found

    def _number(self, path: str, key: str) -> int:
        found = self._wire.get(path).get(key)
        if type(found) is not int or found < 1:
            raise Malformed(f"the server's answer to {path} makes no sense", file=self.url)
        return found
