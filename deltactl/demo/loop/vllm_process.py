"""A vLLM server of the loop's own: where its program is, and how it is started."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import requests

from deltactl import __version__
from deltactl.core.errors import DeltactlError, Unsupported
from deltactl.demo.game.play import GROUP, GROUPS
from deltactl.demo.game.sampling import MODEL
from deltactl.server.preflight import BACKEND, EXTENSION

_READY = 600.0  # seconds from its start to its first answer; torch may have to be read from disk
_LOOK = 0.2  # seconds between two looks
_ASKED = """
from importlib.metadata import entry_points, version
import deltactl
version("vllm")
print(deltactl.__version__, *(e.name for e in entry_points(group="vllm.general_plugins")))
"""


def find_vllm(given: str | None) -> Path:
    """The program ``vllm``: ``given``, or beside this Python, or on PATH. Raises DeltactlError,
    Unsupported where its environment lacks this deltactl."""
    hint = f"python -m venv VENV && VENV/bin/pip install vllm deltactl=={__version__}"
    hint += ", then add --vllm VENV/bin/vllm"
    own = Path(sys.executable).with_name("vllm")
    found = shutil.which(given) if given else (str(own) if own.exists() else shutil.which("vllm"))
    if found is None:
        where = given or "on PATH"
        raise DeltactlError("the loop needs a vLLM server", found=f"no program {where}", hint=hint)
    python = Path(found).with_name("python")
    asked = [str(python), "-c", _ASKED]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)
    except OSError as error:
        what = "the Python of this vLLM does not run"
        raise DeltactlError(what, file=python, found=error.strerror, hint=hint) from None
    words = answer.stdout.split()
    if answer.returncode or not words:
        lines = answer.stderr.strip().splitlines()
        what = "vLLM's environment lacks vllm or deltactl"
        found = lines[-1] if lines else "nothing"
        raise DeltactlError(what, file=python, found=found, hint=hint)
    if words[0] != __version__ or BACKEND not in words[1:]:
        what = "the deltactl in vLLM's environment is another, or is not installed"
        raise Unsupported(
            what,
            file=python,
            expected=f"deltactl {__version__} and its plugin",
            found=answer.stdout.strip(),
            hint=f"{python} -m pip install deltactl=={__version__}",
        )
    return Path(found)


def free_port() -> int:
    """A port of loopback that was free a moment ago."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


def command(program: Path, model: Path, port: int) -> list[str]:
    """The server's command line, on a leash: it ends with the process that started it."""
    return [
        *(sys.executable, "-m", "deltactl.demo.loop.processes"),
        *(str(program), "serve", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL),
        *("--dtype", "bfloat16", "--max-model-len", "64", "--max-num-seqs", str(GROUPS * GROUP)),
        *("--generation-config", "vllm", "--enforce-eager"),
        *("--weight-transfer-config", f'{{"backend":"{BACKEND}"}}'),
        *("--worker-extension-cls", EXTENSION),
    ]


def environment(scratch: Path) -> dict[str, str]:
    """The server's environment. No metrics of use are sent, and nothing is fetched."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CACHE_ROOT": str(scratch / "vllm-cache"),
        # On a CPU: little memory, and one thread, since the model is small and others want cores.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }


def await_ready(url: str, hear: Callable[[float], object]) -> None:
    """Wait until the server answers. ``hear``: waits some seconds, and raises if it has ended."""
    deadline = time.monotonic() + _READY
    while not _answers(url):
        if time.monotonic() > deadline:
            what = "vLLM was not ready in time"
            raise DeltactlError(what, file=url, expected=f"an answer within {_READY:g} seconds")
        hear(_LOOK)


def _answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).status_code == 200
    except requests.RequestException:
        return False
