"""Which steps get an anchor."""

from __future__ import annotations

import pytest

from deltactl.core.errors import UsageError
from deltactl.trainer import AnchorEvery, SinceAnchor


@pytest.mark.parametrize(
    ("every", "step", "anchor", "due"),
    [
        (10, 9, 1, False),
        (10, 10, 1, True),
        (10, 11, 10, False),
        (10, 21, 10, True),  # the 20th was passed over
        (1, 2, 1, True),
        (0, 1000, 1, False),
    ],
)
def test_every_so_many_steps_as_trl_does(every: int, step: int, anchor: int, due: bool) -> None:
    assert AnchorEvery(every).due(SinceAnchor(step, anchor, 1, 1, 1)) is due


def test_a_negative_cadence_is_none() -> None:
    with pytest.raises(UsageError, match="negative"):
        AnchorEvery(-1)
