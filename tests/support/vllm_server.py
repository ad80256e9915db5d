"""A real vLLM server on loopback, on the CPU: started, asked and stopped.

``vllm`` is imported nowhere in this process. A start takes about 25 seconds of two cores and 3 GB,
so a server is shared by as many tests as can be.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import requests

from tests.support.s3_server import free_ports
from tests.support.supervised import descendants_of

ROOT = Path(__file__).parents[2]
EXTENSION = "tests.support.vllm_debug.DebugExtension"
BACKEND = '{"backend":"deltactl"}'
_READY = 900.0  # seconds from the start of the process to the first healthy answer
_ANSWER = 120.0  # seconds that any request may take
_TAIL = 6000  # characters of the log in a failure's message


REQUIRED = "DELTACTL_TEST_REQUIRE_VLLM"
"""If this is set in the environment, as in .ci/run, tests that need vLLM fail without it."""


def vllm_is_missing() -> bool:
    """Whether the tests of a real server cannot run here, by this interpreter."""
    return find_spec("vllm") is None


class Refused(Exception):
    """A route answered with an error; ``status`` is the HTTP status, ``text`` the body."""

    def __init__(self, route: str, status: int, text: str) -> None:
        self.status, self.text = status, text
        super().__init__(f"{route}: {status} {text[:2000]}")


@dataclass(frozen=True)
class VllmServer:
    """One that answers at ``url``, started on the checkpoint ``model``."""

    url: str
    model: Path
    log: Path
    world_size: int
    supervisor: subprocess.Popen[bytes]

    def get(self, route: str, **query: str) -> Any:
        """The JSON that a GET gives; ``Refused`` if the status is not 200."""
        return self._answer("get", route, None, query)

    def post(self, route: str, body: object = None, **query: str) -> Any:
        """The JSON that a POST of ``body`` gives; ``Refused`` if the status is not 200."""
        return self._answer("post", route, body, query)

    def _answer(self, verb: str, route: str, body: object, query: Mapping[str, str]) -> Any:
        answer = requests.request(
            verb, self.url + route, json=body, params=dict(query), timeout=_ANSWER
        )
        if answer.status_code != 200:
            raise Refused(route, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    def rpc(self, method: str, **kwargs: object) -> list[Any]:
        """Call a method of the worker on every rank; their results, rank 0 first."""
        found: list[Any] = self.post("/collective_rpc", {"method": method, "kwargs": kwargs})[
            "results"
        ]
        assert len(found) == self.world_size, found
        return found

    def generate(self, prompts: list[list[int]], tokens: int = 16) -> list[Any]:
        """For each prompt (token ids) greedy completion: text, tokens and their logprobs.

        Floats are the server's own decimal strings' values: equal bits give equal results.
        """
        body = {
            "model": "m",
            "prompt": prompts,
            "max_tokens": tokens,
            "temperature": 0,
            "logprobs": 3,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        choices = self.post("/v1/completions", body)["choices"]
        return [
            {
                "ids": choice["token_ids"],
                "logprobs": choice["logprobs"]["token_logprobs"],
                "top": choice["logprobs"]["top_logprobs"],
            }
            for choice in sorted(choices, key=lambda choice: choice["index"])
        ]

    def running(self) -> int:
        """Requests in flight, by the server's own count, which follows a moment later."""
        text = requests.get(self.url + "/metrics", timeout=_ANSWER).text
        rows = re.findall(r"^vllm:num_requests_running(?:\{.*\})? (\S+)$", text, re.MULTILINE)
        return int(float(rows[0]))

    def alive(self) -> bool:
        """Whether /health says that the engine runs."""
        try:
            return requests.get(self.url + "/health", timeout=_ANSWER).status_code == 200
        except requests.RequestException:
            return False

    def processes(self) -> dict[int, str]:
        """Every process of the server: id and title (``VLLM::EngineCore``, ...)."""
        found = {}
        for pid in descendants_of(self.supervisor.pid):
            with contextlib.suppress(OSError):
                raw = Path(f"/proc/{pid}/cmdline").read_bytes()
                found[pid] = raw.replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def tail(self) -> str:
        """The end of what it wrote."""
        return self.log.read_text(errors="replace")[-_TAIL:]


@contextlib.contextmanager
def run_vllm_server(
    model: Path,
    scratch: Path,
    *,
    world_size: int = 1,
    eager: bool = True,
    options: tuple[str, ...] = ("--weight-transfer-config", BACKEND),
    extension: str | None = EXTENSION,
    environment: Mapping[str, str] | None = None,
) -> Iterator[VllmServer]:
    """A server on a free port, with its log and caches in ``scratch``; gone afterwards.

    ``world_size``: tensor-parallel ranks. ``eager``: without torch.compile. Raises RuntimeError
    with the log's tail if it ends or is not healthy in time.
    """
    port = free_ports(1)[0]
    command = ["vllm", "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m"]
    command += ["--dtype", "bfloat16", "--max-model-len", "256", "--max-num-seqs", "8"]
    command += ["--tensor-parallel-size", str(world_size), *options]
    command += ["--enforce-eager"] if eager else []
    command += ["--worker-extension-cls", extension] if extension else []
    given = dict(environment or {})
    with started(command, port, model, scratch, world_size=world_size, environment=given) as server:
        yield server


@contextlib.contextmanager
def started(
    command: Sequence[str],
    port: int,
    model: Path,
    scratch: Path,
    *,
    world_size: int = 1,
    environment: Mapping[str, str],
    cwd: Path = ROOT,
) -> Iterator[VllmServer]:
    """The server that a command line starts at a port; see ``run_vllm_server``."""
    scratch.mkdir(parents=True, exist_ok=True)
    program = str(Path(sys.executable).parent / command[0])
    log = scratch / f"vllm-{port}.log"
    with open(log, "wb") as out:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "tests.support.supervised", program, *command[1:]],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=_environment(scratch, world_size) | dict(environment),
        )
    server = VllmServer(f"http://127.0.0.1:{port}", model, log, world_size, supervisor)
    try:
        _await_ready(server)
        yield server
    finally:
        assert supervisor.stdin is not None
        supervisor.stdin.close()
        supervisor.wait()


def _environment(scratch: Path, world_size: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return kept | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CACHE_ROOT": str(scratch / "compiled"),
        "VLLM_CPU_OMP_THREADS_BIND": _cores(world_size),
    }


def _cores(world_size: int) -> str:
    """The cores of this process dealt out to the ranks, in vLLM's notation."""
    cores = sorted(os.sched_getaffinity(0))
    dealt = [cores[rank::world_size] or cores[:1] for rank in range(world_size)]
    return "|".join(",".join(map(str, row)) for row in dealt)


def _await_ready(server: VllmServer) -> None:
    deadline = time.monotonic() + _READY
    while not server.alive():
        if server.supervisor.poll() is not None or time.monotonic() > deadline:
            why = "ended" if server.supervisor.poll() is not None else "was not ready in time"
            raise RuntimeError(f"the vLLM server {why}:\n{server.tail()}")
        time.sleep(0.2)
