"""Links and checkpoints that the processes of one machine share."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.checkpoint.checkpoint import Checkpoint
from deltactl.checkpoint.state import state_of
from deltactl.core.errors import Conflict, Malformed, NotFound, Transient, Unproven
from deltactl.format.link_names import delta_name
from deltactl.vllm.update import host
from deltactl.vllm.update.host import checkpoint_at, open_links
from tests.support.chains import AUX, content, make_chain, next_state, states
from tests.support.checkpoints import flip_bit
from tests.support.remote import RemoteBucket, dying, flipping
from tests.support.several import make_parts_chain

STEPS = 5


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of steps 1 to 5, an anchor at 1, and their checkpoints."""
    place = tmp_path_factory.mktemp("chain")
    make_chain(place, states(STEPS))
    return place


@pytest.fixture
def local(made: Path, tmp_path: Path) -> LocalBucket:
    """The chain for one test to harm; the checkpoints are beside it."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return LocalBucket(tmp_path / "bucket")


@pytest.fixture
def remote(local: LocalBucket, tmp_path: Path) -> RemoteBucket:
    return RemoteBucket(tmp_path / "bucket")


def deltas(*steps: int) -> list[str]:
    return [delta_name(step) for step in steps]


def shelf(cache: Path) -> list[Path]:
    return sorted((cache / "links").rglob("*.safetensors"))


def holds(checkpoint: Checkpoint, step: int) -> bool:
    expected = states(step)[-1]
    found = {t.name: (t.dtype, t.shape, t.data.tobytes()) for t in checkpoint.tensors.values()}
    return found == expected


def state_at(bucket: LocalBucket, step: int) -> str:
    return str(read_chain(LocalBucket(Path(bucket.url))).state_at(step))


# Links.


def test_links_that_can_be_mapped_stay_where_they_are(local: LocalBucket, cache: Path) -> None:
    found = open_links(local, deltas(2, 3))
    assert [delta.header.step for delta in found.deltas] == [2, 3]
    assert [delta.path for delta in found.deltas] == [local.path(name) for name in deltas(2, 3)]
    assert found.fetched_bytes == 0
    assert shelf(cache) == []


def test_links_are_fetched_once(remote: RemoteBucket, cache: Path) -> None:
    first = open_links(remote, deltas(2, 3))
    size = sum(delta.header.nbytes for delta in first.deltas)
    assert first.fetched_bytes == size
    assert all(path.is_relative_to(cache) for path in (delta.path for delta in first.deltas))
    second = open_links(remote, deltas(3, 2, 4))
    assert [delta.header.step for delta in second.deltas] == [3, 2, 4]
    assert second.fetched_bytes == second.deltas[2].header.nbytes
    assert sorted({d.path for d in (*first.deltas, *second.deltas)}) == shelf(cache)


class Heard:
    """A Progress, and what it was told: for each part its rising bytes."""

    def __init__(self) -> None:
        self.parts: dict[str, list[int]] = {}
        self.total = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        self.parts.setdefault(what, []).append(done)
        self.total = total


def test_what_is_fetched_is_told_as_it_comes(local: LocalBucket, tmp_path: Path) -> None:
    remote, heard = RemoteBucket(tmp_path / "bucket", part_bytes=200), Heard()
    links = open_links(remote, deltas(2, 3), heard)
    told = heard.parts.pop("fetching")
    assert told == sorted(told)
    assert told[-1] == heard.total == links.fetched_bytes
    assert len(set(told)) > 4
    assert heard.parts == {}
    open_links(local, deltas(2, 3), heard)
    open_links(remote, deltas(2, 3), heard)
    assert heard.parts == {}


def test_of_many_at_once_one_fetches(remote: RemoteBucket) -> None:
    found: list[host.FetchedLinks] = []
    threads = [
        threading.Thread(target=lambda: found.append(open_links(remote, deltas(2, 3))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    sizes = sorted(links.fetched_bytes for links in found)
    assert sizes[:3] == [0, 0, 0]
    assert sizes[3] > 0


def test_a_kept_link_that_is_torn_is_fetched_again(remote: RemoteBucket, cache: Path) -> None:
    good = open_links(remote, deltas(2)).deltas[0].path.read_bytes()
    (kept,) = shelf(cache)
    for at in (20, len(good) - 1):
        flip_bit(kept, at)
        again = open_links(remote, deltas(2))
        assert again.fetched_bytes == len(good)
        assert kept.read_bytes() == good
    kept.write_bytes(good[:-1])
    assert open_links(remote, deltas(2)).fetched_bytes == len(good)


@pytest.mark.parametrize("torn", [None, "flipped", "shorter", "missing"])
def test_links_of_several_files(tmp_path: Path, cache: Path, torn: str | None) -> None:
    bucket = make_parts_chain(tmp_path / "several", list(states(3)))
    names = [link.name for link in read_chain(bucket).links[1:]]
    mapped = open_links(bucket, names)
    assert mapped.fetched_bytes == 0
    remote = RemoteBucket(Path(bucket.url))
    found = open_links(remote, names)
    assert [delta.header for delta in found.deltas] == [
        replace(delta.header, file=f"{other.path}/{Path(delta.header.file).name}")
        for delta, other in zip(mapped.deltas, found.deltas, strict=True)
    ]
    size = found.deltas[0].header.nbytes
    assert found.fetched_bytes == size + found.deltas[1].header.nbytes
    part = sorted(found.deltas[0].path.glob("*.safetensors"))[0]
    assert part.is_relative_to(cache)
    if torn == "flipped":
        flip_bit(part, part.stat().st_size - 1)
    elif torn == "shorter":
        part.write_bytes(part.read_bytes()[:-1])
    elif torn == "missing":
        part.unlink()
    again = open_links(remote, names)
    assert again.fetched_bytes >= size if torn else again.fetched_bytes == 0
    assert [delta.header.step for delta in again.deltas] == [2, 3]
    for delta in again.deltas:
        delta.check_payload()


def test_old_links_of_several_files_give_way(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = make_parts_chain(tmp_path / "several", list(states(5)))
    remote = RemoteBucket(Path(bucket.url))
    for link in read_chain(bucket).links[1:]:
        open_links(remote, [link.name])
    kept = [path for path in (cache / "links/shelf").iterdir() if path.is_dir()]
    assert 1 <= len(kept) <= 2  # the one that was wanted last, and as many bytes of others


def test_wrong_bytes_from_the_store_get_no_name(remote: RemoteBucket, cache: Path) -> None:
    size = {item.name: item.size for item in remote.list()}[delta_name(3)]
    remote.faults.append(flipping(delta_name(3), size - 1))
    with pytest.raises(Malformed):
        open_links(remote, deltas(2, 3))
    assert shelf(cache) == []


def test_a_mapped_link_that_is_torn(local: LocalBucket) -> None:
    path = local.path(delta_name(3))
    assert path is not None
    flip_bit(path, path.stat().st_size - 1)
    with pytest.raises(Malformed, match="payload"):
        open_links(local, deltas(2, 3))


def test_a_store_that_goes_away_in_the_middle(remote: RemoteBucket, cache: Path) -> None:
    remote.faults.append(dying(3, on="deltas"))
    with pytest.raises(Transient):
        open_links(remote, deltas(2, 3, 4))
    assert shelf(cache) == []
    remote.faults.clear()
    assert len(open_links(remote, deltas(2, 3, 4)).deltas) == 3


def test_only_deltas_with_digests(local: LocalBucket, tmp_path: Path) -> None:
    anchor = read_chain(local).anchors[1].name
    with pytest.raises(Malformed):
        open_links(local, [anchor])
    with pytest.raises(NotFound):
        open_links(local, deltas(2, 9))
    place = tmp_path / "trl" / "deltas"
    place.mkdir(parents=True)
    golden = Path(__file__).parents[1] / "golden" / "trl-2"
    source = next(iter(sorted(golden.rglob("*delta*/*.safetensors"))))
    shutil.copy(source, place / "step_000002.safetensors")
    with pytest.raises(Unproven):
        open_links(LocalBucket(tmp_path / "trl"), deltas(2))


def test_links_take_a_bounded_place(remote: RemoteBucket, cache: Path) -> None:
    for step in range(2, STEPS + 1):
        found = open_links(remote, deltas(step))
        wanted = found.deltas[0].path
        assert wanted in shelf(cache)
        others = [path for path in shelf(cache) if path != wanted]
        assert sum(path.stat().st_size for path in others) <= wanted.stat().st_size
        assert len(found.deltas[0].records) == 2  # what is mapped is there all the same


# Checkpoints.


def test_a_step_is_rebuilt_once(remote: RemoteBucket, cache: Path) -> None:
    with checkpoint_at(remote, 3, state_at(remote, 3)) as first:
        assert holds(first, 3)
        assert first.path.is_relative_to(cache)
    remote.forget()
    with checkpoint_at(remote, 3, state_at(remote, 3)) as again:
        assert holds(again, 3)
    assert (remote.lists, remote.reads) == (0, [])


@pytest.mark.parametrize("model", [None, "step_1"])
def test_a_rebuild_is_told_as_it_goes(
    model: str | None, remote: RemoteBucket, tmp_path: Path
) -> None:
    heard = Heard()
    directory = None if model is None else tmp_path / model
    with checkpoint_at(remote, 3, state_at(remote, 3), model=directory, progress=heard) as found:
        assert heard.parts["writing"][-1] == sum(t.nbytes for t in found.tensors.values())
    links = ["anchors/step_000001", *deltas(2, 3)] if model is None else deltas(2, 3)
    sizes = [item.size for item in remote.list() if item.name.startswith(tuple(links))]
    assert heard.parts["fetching"][-1] == sum(sizes)


def test_of_many_at_once_one_rebuilds(remote: RemoteBucket) -> None:
    found: list[Checkpoint] = []
    state = state_at(remote, 4)
    threads = [
        threading.Thread(target=lambda: found.append(checkpoint_at(remote, 4, state)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(holds(checkpoint, 4) for checkpoint in found)
    assert remote.lists == 1


def test_the_next_step_takes_the_place_of_the_last(remote: RemoteBucket, cache: Path) -> None:
    before = checkpoint_at(remote, 3, state_at(remote, 3))
    remote.forget()
    with checkpoint_at(remote, 4, state_at(remote, 4)) as after:
        assert holds(after, 4)
        assert holds(before, 3)  # is mapped as long as somebody wants it
        assert after.path == before.path
    assert not any(name.startswith("anchors") and "model-" in name for name, *_ in remote.reads)
    assert len(list(cache.glob("checkpoints/**/*.safetensors.index.json"))) == 1
    with checkpoint_at(remote, 2, state_at(remote, 2)) as back:
        assert holds(back, 2)


def test_the_models_own_directory_where_it_is_the_step(
    remote: RemoteBucket, cache: Path, tmp_path: Path
) -> None:
    remote.forget()
    with checkpoint_at(remote, 2, state_at(remote, 2), model=tmp_path / "step_2") as found:
        assert found.path == tmp_path / "step_2"
        assert holds(found, 2)
    assert remote.reads == []


def test_it_is_built_on_the_models_own_directory(
    remote: RemoteBucket, cache: Path, tmp_path: Path
) -> None:
    model = tmp_path / "step_2"
    before = content(model)
    with checkpoint_at(remote, 4, state_at(remote, 4), model=model) as found:
        assert holds(found, 4)
        assert {name: (found.path / name).read_bytes() for name in AUX} == dict(AUX)
    fetched = {path.stat().st_size for path in shelf(cache)}
    sizes = {item.name: item.size for item in remote.list()}
    assert fetched == {sizes[name] for name in deltas(3, 4)}
    assert content(model) == before


def test_a_damaged_link_on_the_way_from_the_model_is_gone_round(
    tmp_path: Path, cache: Path
) -> None:
    bucket = make_chain(tmp_path / "far", states(8), anchor_every=6)
    flip_bit(Path(bucket.url) / "deltas/step_000004.safetensors", -1)
    state = str(read_chain(bucket).state_at(7))
    with checkpoint_at(bucket, 7, state, model=tmp_path / "far" / "step_1") as found:
        assert state_of(found) == state


@pytest.mark.parametrize("model", ["step_5", "none", "torn", "stranger"])
def test_a_model_that_leads_nowhere_is_left_alone(
    model: str, remote: RemoteBucket, tmp_path: Path
) -> None:
    if model == "torn":
        shutil.copytree(tmp_path / "step_2", tmp_path / model)
        (path, *_) = sorted((tmp_path / model).glob("*.safetensors"))
        path.write_bytes(path.read_bytes()[:-1])
    elif model == "stranger":
        make_chain(tmp_path / "other", [next_state(states(1)[0], 99)])
        (tmp_path / "other" / "step_1").rename(tmp_path / model)
    with checkpoint_at(remote, 3, state_at(remote, 3), model=tmp_path / model) as found:
        assert holds(found, 3)
        assert found.path != tmp_path / model


def test_another_state_than_the_chains(remote: RemoteBucket, cache: Path) -> None:
    with pytest.raises(Conflict, match="another state") as error:
        checkpoint_at(remote, 3, state_at(remote, 4))
    assert error.value.step == 3
    assert list(cache.rglob("model")) == []


@pytest.mark.parametrize("fault", ["flip", "cut", "gone", "proof"])
def test_a_kept_checkpoint_that_was_written_to_is_rebuilt(
    fault: str, remote: RemoteBucket, cache: Path
) -> None:
    checkpoint_at(remote, 3, state_at(remote, 3)).close()
    (path, *_) = sorted(cache.glob("checkpoints/**/model-*.safetensors"))
    if fault == "flip":
        flip_bit(path, path.stat().st_size - 1)
    elif fault == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif fault == "gone":
        shutil.rmtree(path.parent)
    else:
        next(iter(cache.rglob("proven"))).write_bytes(b"{")
    with checkpoint_at(remote, 3, state_at(remote, 3)) as found:
        assert holds(found, 3)


def test_a_checkpoint_of_a_chain_that_is_no_more(remote: RemoteBucket, tmp_path: Path) -> None:
    checkpoint_at(remote, 3, state_at(remote, 3)).close()
    shutil.rmtree(tmp_path / "bucket")
    other = [next_state(states(1)[0], 50)]
    make_chain(tmp_path, [other[0], next_state(other[0], 51)])
    remote = RemoteBucket(tmp_path / "bucket")
    with checkpoint_at(remote, 2, state_at(remote, 2)) as found:
        data = {t.name: (t.dtype, t.shape, t.data.tobytes()) for t in found.tensors.values()}
    assert data == next_state(other[0], 51)


def test_checkpoints_take_a_bounded_place(tmp_path: Path, cache: Path) -> None:
    for n in range(4):
        bucket = make_chain(tmp_path / f"chain-{n}", states(2))
        with checkpoint_at(bucket, 2, state_at(bucket, 2)) as found:
            assert holds(found, 2)
        assert len(list(cache.glob("checkpoints/*/model"))) <= 2
