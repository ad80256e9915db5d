"""Compiles kernel.c and guard.c when a wheel is built; without a C compiler it has neither."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_NATIVE = Path(__file__).parents[1] / "deltactl/core/native"
_LIBRARIES = ("kernel", "guard")
_FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC")


class KernelBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the libraries to the wheel, or for an editable one to the source tree."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say in the wheel's tag that it is for this platform alone."""
        self._scratch = tempfile.mkdtemp()
        made = [Path(self._scratch, f"{name}.shared") for name in _LIBRARIES]
        if not all(_compile(out) for out in made):
            self.app.display_warning("no C compiler: deltactl is installed without its kernel")
            return
        for out in made:
            if version == "editable":
                new = _NATIVE / f"{out.name}.new"
                shutil.copy(out, new)
                os.replace(new, _NATIVE / out.name)  # a process may have the old one mapped
            else:
                build_data["force_include"][str(out)] = f"deltactl/core/native/{out.name}"
        if version == "editable":
            return
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what the wheel holds a copy of."""
        shutil.rmtree(self._scratch, ignore_errors=True)


def _compile(out: Path) -> bool:
    if os.name != "posix" or sys.byteorder != "little":
        return False
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    for command in (compiler.split(), ["cc"]):
        try:
            source = _NATIVE / f"{out.stem}.c"
            arguments = [*command, *_FLAGS, "-o", str(out), str(source)]
            subprocess.run(arguments, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return True
    return False
