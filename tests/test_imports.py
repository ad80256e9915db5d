"""What importing the library costs, and what it must never bring along."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import deltactl.bench
import deltactl.bucket
import deltactl.chain
import deltactl.checkpoint
import deltactl.codec
import deltactl.core
import deltactl.files
import deltactl.format
import deltactl.ops
import deltactl.replay
import deltactl.server

NEVER = ("rich", "torch", "transformers", "typer")


def modules_of(package: object) -> list[str]:
    path, name = package.__path__, package.__name__  # type: ignore[attr-defined]
    return [name, *(found.name for found in pkgutil.walk_packages(path, f"{name}."))]


@pytest.mark.parametrize(
    "package",
    [
        deltactl.core,
        deltactl.files,
        deltactl.codec,
        deltactl.format,
        deltactl.checkpoint,
        deltactl.replay,
        deltactl.chain,
        deltactl.bucket,
        deltactl.ops,
        deltactl.server,
        deltactl.bench,
    ],
    ids=lambda p: p.__name__,
)
def test_no_module_imports_the_interface_or_torch(package: object) -> None:
    """One after the other in a fresh interpreter, so that a culprit is named."""
    modules = modules_of(package)
    assert len(modules) > 1
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    found = [never for never in {NEVER!r} if never in sys.modules]\n"
        "    assert not found, f'{name} imports {found}'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_trainer_brings_torch_only_when_it_is_asked_for() -> None:
    program = (
        "import sys; from deltactl.trainer import Adaptive, Every\n"
        f"print(*(never for never in {NEVER!r} if never in sys.modules))\n"
        "import deltactl.trainer\n"
        "assert all(getattr(deltactl.trainer, name) for name in deltactl.trainer.__all__)\n"
        "assert 'torch' in sys.modules and not hasattr(deltactl.trainer, 'Publishers')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_package_itself_is_light() -> None:
    program = "import sys, deltactl; print(*(m for m in ('numpy', 'blake3') if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
