"""The modules that are mutated, and the tests that are to notice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.mutation.running import ROOT

TARGETS = {
    "deltactl/core/verify.py": ("tests/core/test_verify.py", "tests/test_bit_flips.py"),
    "deltactl/core/apply.py": (
        "tests/core/test_apply.py", "tests/core/test_in_memory.py", "tests/core/test_encoding.py",
        "tests/cli/test_apply.py",
    ),
    "deltactl/core/publish.py": (
        "tests/core/test_publish.py", "tests/core/test_admission.py",
        "tests/core/test_other_models.py",
    ),
    "deltactl/core/encoding/": (
        "tests/core/test_encoding.py", "tests/core/test_classes.py", "tests/core/test_golomb.py",
        "tests/core/test_grouping.py", "tests/core/test_ulp_ctx.py", "tests/test_golden.py",
    ),
    "deltactl/vllm/staging.py": ("tests/vllm/test_staging.py",),
    "deltactl/server/": ("tests/server/", "tests/cli/test_servers.py"),
}  # fmt: skip
"""Of a directory all modules, with the same tests; paths from the checkout."""


def modules(wanted: Sequence[str] = (), root: Path = ROOT) -> dict[str, tuple[str, ...]]:
    """The modules whose paths begin with one of ``wanted``, all by default, each with its tests.

    Raises ValueError where something that is wanted is no target's.
    """
    found = {}
    for target, tests in TARGETS.items():
        paths = sorted((root / target).glob("*.py")) if target.endswith("/") else [root / target]
        for path in paths:
            found[path.relative_to(root).as_posix()] = tests
    for each in wanted:
        if not any(module.startswith(each) for module in found):
            raise ValueError(f"{each} is not among {', '.join(TARGETS)}")
    return {
        module: _nearest_first(module, tests, root)
        for module, tests in found.items()
        if not wanted or module.startswith(tuple(wanted))
    }


def _nearest_first(module: str, tests: tuple[str, ...], root: Path) -> tuple[str, ...]:
    """Files before directories' others: a file that is named after the module is run first."""
    files: list[str] = []
    for test in tests:
        path = root / test
        inside = sorted(path.glob("test_*.py")) if path.is_dir() else [path]
        files += [each.relative_to(root).as_posix() for each in inside]
    named = f"test_{Path(module).stem}.py"
    return tuple(sorted(files, key=lambda file: not file.endswith(f"/{named}")))
