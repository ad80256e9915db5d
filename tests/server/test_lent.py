"""A delta by itself, as servers can read it: a link of a bucket while it is applied."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_links
from deltactl.format.delta import open_delta
from deltactl.format.delta_index import DELTA_INDEX
from deltactl.format.link_names import delta_directory, delta_name
from deltactl.server.goal import lent
from tests.support.chains import make_delta, states
from tests.support.several import write_parts

BEFORE, AFTER = states(2)


def made(place: Path, several: bool) -> Path:
    if several:
        return write_parts(place, BEFORE, AFTER, count=3, step=2)
    return make_delta(place, BEFORE, AFTER, step=2)


@pytest.mark.parametrize("several", [False, True])
def test_a_delta_that_lies_in_no_bucket(tmp_path: Path, several: bool) -> None:
    place = made(tmp_path / "delta", several)
    with lent(place) as (bucket, name):
        (link,) = read_links(LocalBucket(bucket), [name])
        assert link.result_state == open_delta(place).header.result_state
        assert len(link.objects) == (4 if several else 1)
        assert open_delta(bucket / name).header.step == 2
    assert not bucket.exists()
    open_delta(place).check_payload()


@pytest.mark.parametrize("several", [False, True])
def test_a_delta_that_is_a_link_already(tmp_path: Path, several: bool) -> None:
    home = delta_directory(2) if several else delta_name(2)
    (tmp_path / "bucket/deltas").mkdir(parents=True)
    shutil.move(made(tmp_path / "delta", several), tmp_path / "bucket" / home)
    with lent(tmp_path / "bucket" / home) as found:
        name = f"{home}/{DELTA_INDEX}" if several else home
        assert found == (tmp_path / "bucket", name)
