"""An update of a test's server, request by request, so that each can be left out or go wrong."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from tests.support.vllm_chain import ModelChain
from tests.support.vllm_server import VllmServer

PROMPTS = [[5, 6, 7, 8, 9], [100, 3, 200, 4], [17] * 40, [450, 2, 2, 301]]
LIMIT = 120.0
_ids = (f"test-{n}" for n in itertools.count())

State = dict[str, Any]


class Client:
    """Drives one server. ``chain``: where it gets its steps from."""

    def __init__(self, server: VllmServer, chain: ModelChain) -> None:
        self.server, self.chain = server, chain

    def ask(self, method: str, **kwargs: object) -> list[State]:
        """Call a method of ours on all ranks; the states, each proven to be of this very call."""
        call = next(_ids)
        found = self.server.rpc(f"deltactl_{method}", call=call, **kwargs)
        assert [state["call"] for state in found] == [call] * len(found), "replies are out of step"
        assert [state["rank"] for state in found] == list(range(len(found)))
        return found

    def states(self) -> list[State]:
        return self.ask("state")

    def wait(self, *, key: str, while_: str) -> list[State]:
        """Poll until no rank's ``key`` ("identity", "update", "audit") is in that phase."""
        return self._until(key, while_, self.states)

    def _until(self, key: str, while_: str, look: Callable[[], list[State]]) -> list[State]:
        deadline = time.monotonic() + LIMIT
        while while_ in [_phase(state, key) for state in look()]:
            assert time.monotonic() < deadline, self.states()
            time.sleep(0.02)
        return self.states()

    def prepare(self) -> list[State]:
        """Have the server know its state and its weight map."""
        self.ask("identify", bucket_states=self.chain.steps())
        self.wait(key="identity", while_="running")
        return self.ask("map")

    def stage(
        self, to: int, *, bucket: str | None = None, full: bool = False, **other: object
    ) -> str:
        """Stage the way to a step from the one that is served; the id, once it is staged or not."""
        state = self.states()[0]
        before, id_ = state["step"], next(_ids)
        request = {
            "id": id_,
            "bucket": bucket or self.chain.bucket,
            "from_step": before,
            "from_state": state["state"],
            "to_step": to,
            "to_state": self.chain.states[to],
            "links": [] if full or before is None else self.chain.links(before, to),
            "full": full,
        }
        self.ask("stage", update=request | other)
        self.wait(key="update", while_="staging")
        return id_

    def seal(self, id_: str) -> list[State]:
        return self.ask("seal", id=id_)

    def write(self, id_: str, *, mode: str = "keep", caches: bool = True) -> list[State]:
        """Pause, commit and resume, as a client would that looks at nothing in between."""
        self.server.post("/pause", mode=mode, clear_cache=str(caches).lower())
        self.commit(id_)
        if caches:
            answer = self.server.post("/reset_prefix_cache", reset_running_requests="true")
            assert answer == {"success": True}
        self.server.post("/resume")
        return self.states()

    def commit(self, id_: str) -> None:
        self.server.post("/start_weight_update")
        self.server.post("/update_weights", {"update_info": {"update": id_}})
        self.server.post("/finish_weight_update", {})

    def update(
        self, to: int, *, bucket: str | None = None, full: bool = False, mode: str = "keep"
    ) -> list[State]:
        """All of it, to an acknowledged end; asserts that every rank serves the step."""
        id_ = self.stage(to, bucket=bucket, full=full)
        sealed = self.seal(id_)
        assert phases(sealed) == ["ready"] * len(sealed), sealed
        written = self.write(id_, mode=mode)
        assert phases(written) == ["committed"] * len(written), written
        self.ask("done", id=id_)
        self.serves(to)
        return written

    def serves(self, step: int) -> list[State]:
        """Assert that every rank serves the step, with nothing left over."""
        found = self.states()
        for state in found:
            assert (state["step"], state["state"]) == (step, self.chain.states[step]), state
            assert state["poisoned"] is state["update"] is None, state
            assert state["session"] is False
        assert self.server.get("/is_paused") == {"is_paused": False}
        return found

    def reset(self, step: int = 1) -> None:
        """Bring the server to a step from wherever a test left it: every tensor written anew."""
        if self.states()[0]["session"]:
            self.server.post("/finish_weight_update", {})
        self.server.post("/resume")
        for state in self.states():
            if state["update"] is not None:
                phase, id_ = state["update"]["phase"], state["update"]["id"]
                self.ask("done" if phase == "committed" else "discard", id=id_)
                break
        self.update(step, full=True)

    def audit(self) -> list[str]:
        """Names of the tensors whose live bits are not those of the step that is served."""
        self.ask("audit")
        found = self._until("audit", "running", lambda: self.ask("audit_seal"))
        rows = [state["audit"] for state in found]
        assert all(row == rows[0] for row in rows), rows
        assert rows[0]["phase"] == "done", found
        assert rows[0]["checked"] > 0
        return list(rows[0]["differing"])

    def outputs(self) -> list[Any]:
        """Greedy tokens and their logprobs for fixed prompts, from empty caches."""
        self.server.post("/reset_prefix_cache")
        return self.server.generate(PROMPTS, 12)

    def checksums(self) -> list[dict[str, str]]:
        """Of every runtime parameter of every rank."""
        return self.server.rpc("test_checksums")


def phases(states: list[State]) -> list[str | None]:
    return [_phase(state, "update") for state in states]


def errors(states: list[State]) -> list[Any]:
    return [state["error"] for state in states]


def _phase(state: State, key: str) -> str | None:
    found = state[key]
    return found["phase"] if isinstance(found, dict) else found
