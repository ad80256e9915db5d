"""What ``clean_bucket`` takes and what it leaves, of every kind of bucket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltactl.chain.reading import read_chain
from deltactl.chain.store import Bucket
from deltactl.chain.transfer.snapshot import Snapshot, take_snapshot
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.core.errors import Conflict, NotAllowed, Unsupported
from deltactl.core.progress import silent
from deltactl.files.temporary import Unfinished
from deltactl.format.anchor import INDEX
from deltactl.format.delta_index import part_name
from deltactl.format.link_names import delta_directory
from deltactl.ops.clean import CleanReport, clean_bucket
from deltactl.ops.push import push
from deltactl.ops.verify import verify_bucket
from deltactl.trainer.upload.put import put_anchor, put_index
from tests.bucket.conftest import OpenBucket
from tests.support.chains import states, write_steps
from tests.support.checkpoints import write_safetensors

DAY = 86400.0
TIP = 4


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def steps(tmp_path: Path) -> list[Path]:
    return write_steps(tmp_path / "steps", states(TIP))


@pytest.fixture
def chain(open_at: OpenBucket, steps: list[Path]) -> Bucket:
    """Anchors at 1 and 4, in directories; the tip is 4."""
    for step in steps:
        push(step, open_at(), anchor_every=TIP)
    return open_at()


def objects(bucket: Bucket) -> dict[str, bytes]:
    return {o.name: bytes(bucket.read(o.name, 0, 1 << 30)) for o in bucket.list()}


def later(bucket: Bucket, days: float = 2, **options: Any) -> CleanReport:
    """Cleaned with a clock that is ahead, so that all is as old as that."""
    return clean_bucket(bucket, now=time.time() + days * DAY, **options)


def begin(bucket: Bucket, steps: list[Path], step: int, scratch: Path) -> Snapshot:
    """An anchor of a step whose index is never put."""
    scratch.mkdir()
    with open_checkpoint(steps[min(step, TIP) - 1]) as checkpoint:
        snapshot = take_snapshot(checkpoint, step, scratch, silent)
    for name, path in snapshot.files.items():
        assert bucket.put(name, path)
    return snapshot


def found(report: CleanReport) -> dict[str, tuple[str, str]]:
    return {item.name: (item.kind, item.action) for item in report.items}


def test_an_object_says_when_it_was_written(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"content")
    before = time.time()
    bucket.put("object", tmp_path / "source")
    (item,) = bucket.list()
    assert item.modified is not None
    assert before - 60 < item.modified < time.time() + 60


def test_of_a_whole_chain_nothing_is_taken(chain: Bucket) -> None:
    before = objects(chain)
    assert list(chain.unfinished()) == []
    report = later(chain)
    assert (report.items, report.errors) == ((), ())
    assert objects(chain) == before


def test_an_unfinished_anchor_below_the_tip(
    chain: Bucket, steps: list[Path], tmp_path: Path
) -> None:
    before = objects(chain)
    begin(chain, steps, 2, tmp_path / "scratch")
    began = objects(chain)
    size = sum(map(len, began.values())) - sum(map(len, before.values()))

    young = clean_bucket(chain)
    assert found(young) == {"anchors/step_000002": ("unfinished anchor", "keep")}
    assert "touched" in str(young.items[0].why)
    dry = later(chain, dry_run=True)
    assert found(dry) == {"anchors/step_000002": ("unfinished anchor", "remove")}
    assert objects(chain) == began, "neither took anything"

    report = later(chain)
    assert found(report) == found(dry)
    assert (report.bytes, len(report.cleaned), report.errors) == (size, 1, ())
    assert objects(chain) == before
    assert later(chain).items == ()
    assert verify_bucket(chain, level="rebuild").ok


@pytest.mark.parametrize("step", [TIP + 1, TIP + 7])
def test_what_belongs_to_a_step_above_the_tip_is_left(
    chain: Bucket, steps: list[Path], tmp_path: Path, step: int
) -> None:
    begin(chain, steps, step, tmp_path / "scratch")
    before = objects(chain)
    (item,) = later(chain, days=1000).items
    assert (item.action, item.step) == ("keep", step)
    assert "publishing" in str(item.why)
    assert objects(chain) == before


def test_the_tips_own_unfinished_anchor_is_left_and_finished(
    open_at: OpenBucket, steps: list[Path], tmp_path: Path
) -> None:
    bucket = open_at()
    for step in steps[:2]:
        push(step, bucket)
    snapshot = begin(bucket, steps, 2, tmp_path / "scratch")
    assert [item.action for item in later(bucket).items] == ["keep"]
    assert put_anchor(bucket, snapshot)
    assert [link.step for link in read_chain(bucket).links] == [1, 2, 2]


def test_where_there_is_no_chain_yet_a_first_anchor_is_left(
    bucket: Bucket, steps: list[Path], tmp_path: Path
) -> None:
    begin(bucket, steps, 1, tmp_path / "scratch")
    assert [item.action for item in later(bucket, days=1000).items] == ["keep"]


FOREIGN = ["anchors/step_000002/notes.txt", "anchors/step_000002/sub/model.safetensors"]


@pytest.mark.parametrize("name", FOREIGN)
def test_what_no_push_makes_is_left(
    chain: Bucket, steps: list[Path], tmp_path: Path, name: str
) -> None:
    begin(chain, steps, 2, tmp_path / "scratch")
    (tmp_path / "foreign").write_bytes(b"mine")
    assert chain.put(name, tmp_path / "foreign")
    before = objects(chain)
    (item,) = later(chain).items
    assert item.action == "keep"
    assert name.removeprefix("anchors/step_000002/") in str(item.why)
    assert objects(chain) == before


def test_objects_of_other_names_are_not_looked_at(chain: Bucket, tmp_path: Path) -> None:
    (tmp_path / "foreign").write_bytes(b"mine")
    names = ["notes.txt", "anchors/readme", "deltas/step_2/x", "runs/anchors/step_000002/x"]
    for name in names:
        assert chain.put(name, tmp_path / "foreign")
    before = objects(chain)
    assert later(chain, days=1000).items == ()
    assert objects(chain) == before


def test_parts_of_a_try_before_are_taken_and_the_delta_stays(
    chain: Bucket, steps: list[Path], tmp_path: Path
) -> None:
    part = write_safetensors(tmp_path / "part.safetensors", states(1)[0])
    for step in (2, TIP, TIP + 1):
        for number in range(2):
            name = f"{delta_directory(step)}/{part_name(number, 3, 'gone')}"
            assert chain.put(name, part)
    before = objects(chain)
    report = later(chain)
    assert {item.step: item.action for item in report.items} == {2: "remove", 4: "keep", 5: "keep"}
    assert {item.kind for item in report.items} == {"unfinished delta"}
    gone = {name for name in before if name.startswith("deltas/step_000002/")}
    assert len(gone) == 2
    assert objects(chain).keys() == before.keys() - gone


def test_a_faulty_link_is_no_left_over(chain: Bucket, steps: list[Path], tmp_path: Path) -> None:
    begin(chain, steps, 2, tmp_path / "scratch")
    (tmp_path / "torn").write_bytes(b"{")
    assert chain.put(f"anchors/step_000002/{INDEX}", tmp_path / "torn")
    before = objects(chain)
    assert later(chain, days=1000).items == ()
    assert objects(chain) == before


# With somebody who publishes at the same time.


class Meddled:
    """A bucket; before or after calls of a method something else happens, once each."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._plans: list[tuple[str, str, str, Callable[[], object]]] = []

    def before(self, method: str, about: str, act: Callable[[], object]) -> None:
        self._plans.append(("before", method, about, act))

    def after(self, method: str, about: str, act: Callable[[], object]) -> None:
        self._plans.append(("after", method, about, act))

    @property
    def happened(self) -> bool:
        return not self._plans

    def __getattr__(self, name: str) -> Any:
        given = getattr(self._bucket, name)
        if name not in ("list", "put", "delete", "read"):
            return given

        def call(*args: Any) -> Any:
            self._act("before", name, args)
            result = [*given()] if name == "list" else given(*args)
            self._act("after", name, args)
            return result

        return call

    def _act(self, when: str, method: str, args: tuple[Any, ...]) -> None:
        for plan in [*self._plans]:
            moment, name, about, act = plan
            if (moment, name) == (when, method) and about in (str(args[0]) if args else ""):
                self._plans.remove(plan)
                act()
                return


@pytest.fixture
def late(chain: Bucket, steps: list[Path], tmp_path: Path) -> Iterator[Snapshot]:
    """An anchor of step 2, as a trainer puts it when it is at step 4 already."""
    (tmp_path / "late").mkdir()
    with open_checkpoint(steps[1]) as checkpoint:
        yield take_snapshot(checkpoint, 2, tmp_path / "late", silent)


def is_whole(bucket: Bucket, step: int = 2) -> bool:
    report = verify_bucket(bucket, level="rebuild")
    return report.ok and step in read_chain(bucket).starts


@pytest.mark.parametrize(
    ("when", "method", "about"),
    [
        ("after", "put", "vocab.txt"),  # the last file; the push has not looked again
        ("before", "put", INDEX),  # it has looked, and is about to put the index
    ],
)
def test_files_that_go_before_the_index_is_there_are_put_again(
    chain: Bucket, late: Snapshot, when: str, method: str, about: str
) -> None:
    meddled: Any = Meddled(chain)
    getattr(meddled, when)(method, about, lambda: later(chain))
    assert about in "".join(late.files) + late.name
    assert put_anchor(meddled, late)
    assert meddled.happened
    assert is_whole(chain)


def test_files_that_go_each_time_are_no_link(chain: Bucket, late: Snapshot) -> None:
    meddled: Any = Meddled(chain)
    for _ in range(40):
        meddled.before("read", "anchors/step_000002", lambda: later(chain))
    with pytest.raises(Conflict, match="removed while the link was put") as caught:
        put_anchor(meddled, late)
    assert caught.value.step == 2
    assert late.name not in objects(chain), "and its index is not put"


def test_other_ranks_files_cannot_be_put_again(chain: Bucket, late: Snapshot) -> None:
    sizes = {name: path.stat().st_size for name, path in late.files.items()}
    for name, path in late.files.items():
        chain.put(name, path)
    chain.delete(next(iter(sizes)))
    with pytest.raises(Conflict, match="removed"):
        put_index(chain, late.name, late.path, 2, sizes)
    assert late.name not in objects(chain)


def test_a_link_that_is_finished_before_its_files_go_stays(chain: Bucket, late: Snapshot) -> None:
    for name, path in late.files.items():
        chain.put(name, path)
    meddled: Any = Meddled(chain)
    meddled.after("list", "", lambda: chain.put(late.name, late.path))
    report = later(meddled)
    assert [item.action for item in report.items] == ["keep"]
    assert "finished meanwhile" in str(report.items[0].why)
    assert report.errors == ()
    assert is_whole(chain)


def test_a_link_that_is_finished_while_its_files_go_is_told(chain: Bucket, late: Snapshot) -> None:
    for name, path in late.files.items():
        chain.put(name, path)
    meddled: Any = Meddled(chain)
    meddled.before("delete", "", lambda: chain.put(late.name, late.path))
    report = later(meddled)
    (error,) = report.errors
    assert isinstance(error, Conflict)
    assert (error.file, error.step) == (late.name, 2)
    assert "verify" in str(error.hint)


def test_what_was_touched_since_it_was_listed_is_left(chain: Bucket, late: Snapshot) -> None:
    """A push that goes on with an old try: one file is new."""
    first, *others = late.files.items()
    for name, path in others:
        chain.put(name, path)
    now = time.time() + 2 * DAY
    meddled: Any = Meddled(chain)
    given = meddled._bucket.list

    class Old:
        """The first listing; later ones have a file that was written just now."""

        lists = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(chain, name)

        def list(self) -> list[Any]:
            self.lists += 1
            found = [*given()]
            if self.lists == 1:
                return found
            name = others[0][0]
            return [type(o)(o.name, o.size, now) if o.name == name else o for o in found]

    report = clean_bucket(Old(), now=now)  # type: ignore[arg-type]
    assert "touched meanwhile" in str(report.items[0].why)
    assert set(dict(others)) <= objects(chain).keys()
    assert first[0] not in objects(chain)


def test_a_store_that_does_not_say_how_old_things_are(chain: Bucket, late: Snapshot) -> None:
    class Ageless:
        def __getattr__(self, name: str) -> Any:
            return getattr(chain, name)

        def list(self) -> list[Any]:
            return [type(o)(o.name, o.size) for o in chain.list()]

    name, path = next(iter(late.files.items()))
    chain.put(name, path)
    (item,) = later(Ageless()).items  # type: ignore[arg-type]
    assert (item.action, item.age) == ("keep", None)
    assert name in objects(chain)


@pytest.mark.parametrize("kind", [NotAllowed, Unsupported])
def test_what_may_not_be_looked_at_is_told_and_the_rest_is_done(
    chain: Bucket, late: Snapshot, kind: type[Exception]
) -> None:
    class Closed:
        def __getattr__(self, name: str) -> Any:
            return getattr(chain, name)

        def unfinished(self) -> list[Unfinished]:
            raise kind("uploads may not be listed")

    name, path = next(iter(late.files.items()))
    chain.put(name, path)
    report = later(Closed())  # type: ignore[arg-type]
    assert [type(error) for error in report.errors] == [kind]
    assert name not in objects(chain)
