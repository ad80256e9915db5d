"""What sleeps, by what vLLM's allocator keeps of its memory."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deltactl.vllm.update.sleeping import asleep

MODULE = "vllm.device_allocator.cumem"


class AsVllmDoes:
    """What vLLM's allocator keeps, and when it says of memory that it sleeps."""

    instance: AsVllmDoes | None = None

    def __init__(self) -> None:
        self.pointer_to_data: dict[int, Any] = {}

    def sleep(self) -> None:
        for data in self.pointer_to_data.values():
            data.is_asleep = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        for data in self.pointer_to_data.values():
            others = data.tag not in ("weights", "kv_cache")
            data.is_asleep &= not (tags is None or data.tag in tags or others)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> AsVllmDoes:
    """One that holds memory of every tag."""
    module = ModuleType(MODULE)
    module.CuMemAllocator = AsVllmDoes  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    made = AsVllmDoes()
    made.pointer_to_data = {
        n: SimpleNamespace(tag=tag, is_asleep=False)
        for n, tag in enumerate(("weights", "kv_cache", "runtime"))
    }
    monkeypatch.setattr(AsVllmDoes, "instance", made)
    return made


def test_weights_and_cache_sleep_and_wake_one_after_the_other(allocator: AsVllmDoes) -> None:
    assert asleep() == ()
    allocator.sleep()
    assert asleep() == ("weights", "kv_cache")
    allocator.wake_up(["weights"])
    assert asleep() == ("kv_cache",)
    allocator.wake_up(["kv_cache"])
    assert asleep() == ()


def test_where_nothing_ever_slept_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    assert asleep() == asleep(SimpleNamespace()) == ()
    module = ModuleType(MODULE)
    module.CuMemAllocator = AsVllmDoes  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    assert asleep(SimpleNamespace(_sleep_mode_backend=None)) == ()
    assert AsVllmDoes.instance is None


@pytest.mark.parametrize(
    ("state", "tags"), [("SUSPENDED", ("weights", "kv_cache")), ("RUNNING", ())]
)
def test_a_backend_of_another_kind_says_it_of_all(state: str, tags: tuple[str, ...]) -> None:
    backend = SimpleNamespace(state=lambda: state)
    assert asleep(SimpleNamespace(_sleep_mode_backend=backend)) == tags
