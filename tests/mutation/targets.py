"""The modules that are mutated, and the tests that are to notice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.mutation.running import ROOT

VERIFY = (
    "tests/ops/test_verify.py", "tests/ops/test_every_key.py", "tests/format/test_several_files.py",
    "tests/chain/test_guards.py", "tests/test_trl_chains.py", "tests/test_bit_flips.py",
)  # fmt: skip
PUBLISH = (
    "tests/ops/test_push.py", "tests/chain/test_admission.py", "tests/chain/test_other_models.py",
)  # fmt: skip

TARGETS: dict[str, tuple[str, ...]] = {
    "deltactl/ops/verify.py": VERIFY,
    "deltactl/chain/check/*.py": VERIFY,
    "deltactl/format/checker.py": (
        "tests/format/test_checker.py", "tests/chain/test_transfer.py", *VERIFY,
    ),
    "deltactl/replay/check.py": VERIFY,
    "deltactl/ops/apply.py": (
        "tests/ops/test_apply.py", "tests/replay/test_in_memory.py", "tests/codec/test_encoding.py",
        "tests/cli/test_apply.py",
    ),
    "deltactl/ops/push.py": PUBLISH,
    "deltactl/chain/admission.py": PUBLISH,
    "deltactl/chain/model.py": PUBLISH,
    "deltactl/codec/*.py": (
        "tests/codec/test_bits.py", "tests/codec/test_encoding.py", "tests/codec/test_classes.py",
        "tests/codec/test_golomb.py", "tests/codec/test_room.py",
        "tests/codec/test_grouping.py", "tests/codec/test_ulp_ctx.py", "tests/test_golden.py",
    ),
    "deltactl/vllm/staging/staging.py": ("tests/vllm/test_staging.py",),
    "deltactl/server/*.py": ("tests/server/test_*.py", "tests/cli/test_servers.py"),
}  # fmt: skip
"""Patterns of files in the checkout, and of those with their tests."""


def modules(wanted: Sequence[str] = (), root: Path = ROOT) -> dict[str, tuple[str, ...]]:
    """The modules whose paths begin with one of ``wanted``, all by default, each with its tests.

    Raises ValueError where something that is wanted is no target's.
    """
    found = {}
    for target, tests in TARGETS.items():
        for module in _files(target, root):
            found[module] = _nearest_first(module, tests, root)
    for each in wanted:
        if not any(module.startswith(each) for module in found):
            raise ValueError(f"{each} is not among {', '.join(TARGETS)}")
    return {
        module: tests
        for module, tests in found.items()
        if not wanted or module.startswith(tuple(wanted))
    }


def _files(pattern: str, root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.glob(pattern))


def _nearest_first(module: str, tests: tuple[str, ...], root: Path) -> tuple[str, ...]:
    """The files of the tests; one that is named after the module is run first."""
    files = [file for pattern in tests for file in _files(pattern, root)]
    named = f"test_{Path(module).stem}.py"
    return tuple(sorted(files, key=lambda file: not file.endswith(f"/{named}")))
