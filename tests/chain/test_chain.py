"""The links of a bucket in order, and the ways through them."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.chain.chain import Chain
from deltactl.chain.reading import read_chain, read_links
from deltactl.core.errors import Malformed, NotFound
from deltactl.format.link_names import anchor_directory, anchor_file_name, delta_name
from deltactl.ops.push import push
from tests.support.chains import make_chain, states, write
from tests.support.checkpoints import flip_bit


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def bucket(tmp_path: Path) -> LocalBucket:
    """Steps 1 to 6; anchors at 1, 3 and 6."""
    return make_chain(tmp_path, states(6), anchor_every=3)


def kinds(chain: Chain) -> list[str]:
    return [f"{link.kind} {link.step}" for link in chain.links]


def way(chain: Chain, step: int) -> str:
    anchor, deltas = chain.path(step)
    return " ".join([f"({anchor.step})", *(str(link.step) for link in deltas)])


def test_names_sort_as_their_steps_and_grow_beyond_six_digits() -> None:
    assert delta_name(11) == "deltas/step_000011.safetensors"
    assert anchor_file_name(10) == "anchors/step_000010.safetensors"
    assert anchor_directory(1_234_567) == "anchors/step_1234567"


def test_links_in_order(bucket: LocalBucket) -> None:
    chain = read_chain(bucket)
    assert kinds(chain) == [
        "anchor 1", "delta 2", "delta 3", "anchor 3", "delta 4", "delta 5", "delta 6", "anchor 6",
    ]  # fmt: skip
    assert chain.problems == ()
    assert chain.steps == [1, 2, 3, 4, 5, 6]
    assert chain.tip == 6
    assert chain.url == bucket.url
    deltas = [chain.deltas[step] for step in range(2, 7)]
    for before, after in pairwise(deltas):
        assert before.result_state == after.base_state
    sizes = {item.name: item.size for item in bucket.list()}
    assert sum(link.bytes for link in chain.links) == sum(sizes.values())
    assert sum(len(link.objects) for link in chain.links) == len(sizes)


def test_the_way_to_each_step_starts_at_the_newest_anchor(bucket: LocalBucket) -> None:
    chain = read_chain(bucket)
    ways = [way(chain, step) for step in chain.steps]
    assert ways == ["(1)", "(1) 2", "(3)", "(3) 4", "(3) 4 5", "(6)"]
    assert [link.step for link in chain.path_from(2, 5)] == [3, 4, 5]
    assert chain.path_from(5, 5) == []
    starts = [chain.start_for(step) for step in range(8)]
    assert [start and start.step for start in starts] == [None, 1, 1, 3, 3, 3, 6, 6]


def test_the_way_from_a_held_step_is_the_one_of_the_fewest_bytes(bucket: LocalBucket) -> None:
    """By the links' own sizes, whatever they are: of each pair both ways are reckoned here."""
    chain = read_chain(bucket)
    for step in chain.steps:
        whole = chain.way(step)
        assert whole.anchor is not None
        assert [whole.anchor, *whole.deltas] == [*whole.links]
        for held in range(8):
            near = (
                [chain.deltas[n] for n in range(held + 1, step + 1)] if held in chain.steps else []
            )
            nearer = 0 < held <= step and sum(link.bytes for link in near) < whole.nbytes
            found = chain.way(step, held)
            assert [*found.links] == (near if nearer else [*whole.links])
            assert found.nbytes == sum(link.bytes for link in found.links)
            assert (found.anchor is None) is nearer


def test_the_one_way_that_there_is_is_taken(bucket: LocalBucket) -> None:
    for step in (1, 3, 6):
        shutil.rmtree(Path(bucket.url, anchor_directory(step)))
    chain = read_chain(bucket)
    assert [link.step for link in chain.way(6, 2).links] == [3, 4, 5, 6]
    with pytest.raises(Malformed):
        chain.way(6)
    bucket.delete(delta_name(4))
    with pytest.raises(Malformed, match="chain is broken"):
        read_chain(bucket).way(6, 2)
    with pytest.raises(NotFound, match="no such step"):
        read_chain(bucket).way(7, 6)


def test_newer_steps_are_those_with_objects_sound_or_not(bucket: LocalBucket) -> None:
    flip_bit(bucket.path(delta_name(5)), 20)
    chain = read_chain(bucket)
    assert chain.newer(3) == (4, 5, 6)
    assert chain.newer(6) == ()
    assert chain.newer(None) == (1, 2, 3, 4, 5, 6)
    assert Chain(()).newer(None) == ()


def test_a_state_is_the_newest_step_up_to_the_last_that_is_asked_for(tmp_path: Path) -> None:
    a, b = states(2)
    chain = read_chain(make_chain(tmp_path, [a, b, a, b, a]))
    first, second = chain.state_at(1), chain.state_at(2)
    assert chain.states() == {first: 5, second: 4}
    assert chain.states(4) == {first: 3, second: 4}
    assert chain.states(1) == {first: 1, second: 2}
    assert Chain(()).states() == {}


def test_the_step_that_is_wanted_is_the_tip_where_none_is_named(bucket: LocalBucket) -> None:
    chain = read_chain(bucket)
    assert (chain.wanted(None), chain.wanted(2)) == (6, 2)
    with pytest.raises(NotFound, match="holds no chain"):
        Chain((), url="x").wanted(None)
    with pytest.raises(Malformed, match="chain is broken"):
        Chain([chain.deltas[3]]).wanted(None)
    problem = Malformed("torn", step=7)
    with pytest.raises(Malformed, match="torn"):
        Chain((), [problem]).wanted(None)


@pytest.mark.parametrize("step", [0, 7, 1000])
def test_a_step_that_is_not_there(bucket: LocalBucket, step: int) -> None:
    with pytest.raises(NotFound, match="no such step") as caught:
        read_chain(bucket).path(step)
    assert caught.value.found == "steps 1 to 6"
    assert "log" in str(caught.value.hint)


def test_there_is_no_way_back(bucket: LocalBucket) -> None:
    with pytest.raises(Malformed):
        read_chain(bucket).path_from(5, 4)


def test_without_a_delta_later_anchors_lead_on(bucket: LocalBucket) -> None:
    bucket.delete(delta_name(4))
    chain = read_chain(bucket)
    assert chain.tip == 6
    assert way(chain, 6) == "(6)"
    assert way(chain, 3) == "(3)"
    for step in (5,):
        with pytest.raises(Malformed, match="chain is broken") as caught:
            chain.path(step)
        assert caught.value.found == "no link"
        assert "step 4" in str(caught.value.expected)
    with pytest.raises(NotFound):
        chain.path(4)


def test_the_tip_is_the_newest_step_that_can_be_rebuilt(bucket: LocalBucket) -> None:
    for name in (anchor_directory(6), anchor_directory(3)):
        shutil.rmtree(Path(bucket.url, name))
    assert way(read_chain(bucket), 6) == "(1) 2 3 4 5 6"
    bucket.delete(delta_name(4))
    assert read_chain(bucket).tip == 3
    shutil.rmtree(Path(bucket.url, anchor_directory(1)))
    chain = read_chain(bucket)
    assert chain.tip is None
    with pytest.raises(Malformed, match="chain is broken"):
        chain.path(2)


def test_an_empty_chain() -> None:
    chain = Chain(())
    assert (chain.tip, chain.steps, chain.links) == (None, [], ())
    with pytest.raises(NotFound) as caught:
        chain.path(1)
    assert caught.value.found == "no steps"


def test_no_bucket(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such bucket"):
        read_chain(LocalBucket(tmp_path / "nothing"))


def test_links_by_name_are_read_alone_and_in_the_order_asked_for(bucket: LocalBucket) -> None:
    names = [delta_name(5), delta_name(2), read_chain(bucket).anchors[6].name]
    flip_bit(bucket.path(delta_name(4)), 20)  # of which nobody asks
    found = read_links(bucket, names)
    assert [link.name for link in found] == names
    assert [link.step for link in found] == [5, 2, 6]
    assert found[0].result_state == read_chain(bucket).deltas[5].result_state
    assert read_links(bucket, []) == []


def test_links_by_name_that_are_not_there_or_torn(bucket: LocalBucket) -> None:
    with pytest.raises(NotFound) as missing:
        read_links(bucket, [delta_name(2), delta_name(7)])
    assert missing.value.file == delta_name(7)
    with pytest.raises(NotFound):
        read_links(bucket, ["../deltas/step_000002.safetensors"])
    flip_bit(bucket.path(delta_name(4)), 20)
    with pytest.raises(Malformed) as torn:
        read_links(bucket, [delta_name(2), delta_name(4)])
    assert torn.value.step == 4


def test_what_is_wrong_with_a_link_is_said_where_it_is_missed(bucket: LocalBucket) -> None:
    """Not that there is no such step, when its file is there and torn."""
    flip_bit(Path(bucket.url, delta_name(5)), 200)
    chain = read_chain(bucket)
    assert [problem.step for problem in chain.problems] == [5]
    assert [problem.file for problem in chain.problems] == [delta_name(5)]
    assert kinds(chain) == [
        "anchor 1", "delta 2", "delta 3", "anchor 3", "delta 4", "delta 6", "anchor 6",
    ]  # fmt: skip
    with pytest.raises(Malformed) as caught:
        chain.path(5)
    assert caught.value.file == delta_name(5)
    with pytest.raises(Malformed) as caught:
        chain.path_from(4, 6)
    assert caught.value.file == delta_name(5)
    assert way(chain, 6) == "(6)"


def test_a_step_whose_delta_is_torn_is_there_by_its_anchor(bucket: LocalBucket) -> None:
    flip_bit(Path(bucket.url, delta_name(3)), 200)
    chain = read_chain(bucket)
    assert way(chain, 5) == "(3) 4 5"


def test_an_anchor_that_is_torn_is_passed_over(bucket: LocalBucket) -> None:
    flip_bit(Path(bucket.url, anchor_directory(3), "model.safetensors.index.json"), 50)
    chain = read_chain(bucket)
    assert way(chain, 5) == "(1) 2 3 4 5"
    assert [problem.step for problem in chain.problems] == [3]


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "deltas/notes.txt",
        "deltas/step_7.safetensors",
        "deltas/step_0000007.safetensors",
        "deltas/step_000007.safetensors.bak",
        "deltas/step_000007/part.safetensors",
        "deltas/sub/step_000007.safetensors",
        "anchors/step_000007/model.safetensors",
        "anchors/step_0000007/model.safetensors.index.json",
        "anchors/step_00007.safetensors",
        "anchors/.step_000007.safetensors",
        "old/deltas/step_000007.safetensors",
        "deltas/step_١٢٣٤٥٦.safetensors",
    ],
)
def test_what_has_no_name_of_a_link_is_none(bucket: LocalBucket, name: str) -> None:
    before = kinds(read_chain(bucket))
    path = Path(bucket.url, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(bucket.url, delta_name(4)), path)
    chain = read_chain(bucket)
    assert kinds(chain) == before
    assert chain.problems == ()


@pytest.mark.parametrize("content", [b"", b"junk", b"\x08\0\0\0\0\0\0\0{}      "])
@pytest.mark.parametrize(
    "name",
    [delta_name(7), anchor_file_name(7), anchor_directory(7) + "/model.safetensors.index.json"],
)
def test_what_has_a_name_of_a_link_and_is_none_is_a_problem(
    bucket: LocalBucket, tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / "junk").write_bytes(content)
    bucket.put(name, tmp_path / "junk")
    chain = read_chain(bucket)
    assert [(problem.file, problem.step) for problem in chain.problems] == [(name, 7)]
    assert chain.tip == 6


def test_two_anchors_of_one_step_are_a_problem(bucket: LocalBucket, tmp_path: Path) -> None:
    single = LocalBucket(tmp_path / "single")
    push(write(tmp_path / "s.safetensors", states(3)[2], shards=0), single, step=3)
    bucket.put(anchor_file_name(3), Path(single.url, anchor_file_name(3)))
    chain = read_chain(bucket)
    assert [problem.what for problem in chain.problems] == ["the step has two anchors"]
    assert chain.problems[0].step == 3


def test_a_file_that_the_index_names_is_missing_or_of_another_size(bucket: LocalBucket) -> None:
    directory = anchor_directory(3)
    Path(bucket.url, directory, "config.json").unlink()
    chain = read_chain(bucket)
    assert chain.problems[0].file == f"{directory}/config.json"
    assert chain.problems[0].found == "no such object"
    Path(bucket.url, directory, "config.json").write_bytes(b"{}")
    assert read_chain(bucket).problems[0].found == "2 bytes"
