"""A small chain, and stand-ins of vLLM servers that were started on its first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.server.update import Options
from tests.support.chains import make_chain, states
from tests.support.vllm_standin import StandIn

QUICK = Options(timeout=60, grace=0.0)
"""No answer is waited for that long; and who left an update half-way is known to be gone."""


@dataclass(frozen=True)
class Steps:
    """Four steps: the bucket, a checkpoint of each, and the state digest of each by its number."""

    bucket: LocalBucket
    paths: dict[int, Path]
    states: dict[int, str]

    @property
    def url(self) -> str:
        return self.bucket.url


@pytest.fixture(scope="session")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """An anchor and three deltas. Read only."""
    root = tmp_path_factory.mktemp("chain")
    bucket = make_chain(root, states(4))
    chain = read_chain(bucket)
    known = {step: str(chain.state_at(step)) for step in (1, 2, 3, 4)}
    return Steps(bucket, {step: root / f"step_{step}" for step in known}, known)


Start = Callable[..., StandIn]


@pytest.fixture
def start(tmp_path: Path, steps: Steps) -> Iterator[Start]:
    """Start a stand-in, by default on the first step; all are closed at the end."""
    with ExitStack() as stack:
        count = iter(range(100))

        def started(step: int = 1, **options: Any) -> StandIn:
            scratch = tmp_path / f"server_{next(count)}"
            scratch.mkdir()
            return stack.enter_context(StandIn(steps.paths[step], scratch, **options))

        yield started
