"""One rank's work and the state machine together: small torch models, in slices over threads."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.checkpoint.checkpoint import Checkpoint
from deltactl.format.link_names import delta_name
from deltactl.ops.push import push
from deltactl.vllm.layout.proven import known
from deltactl.vllm.update.model_weights import ModelWork, Told
from deltactl.vllm.update.serving import Serving
from tests.support.checkpoints import Spec, changed, random_tensor, write_hf_directory
from tests.support.ranks import thread_peers, together

ENCODINGS = {2: "raw", 3: "gap_delta", 4: "ulp", 5: "ulp_ctx", 6: "ulp", 7: "ulp"}
EMPTY, DENSE, TIP = 5, 6, 7
LIMIT = 30.0


class Sliced(nn.Module):
    """``fused``: this rank's rows of "a", then of "b". ``norm`` is whole on every rank; "unused" is
    taken and left. With ``odd`` the loader changes "norm", so that no map can express it."""

    def __init__(self, rank: int, ranks: int, odd: bool = False) -> None:
        super().__init__()
        self.rank, self.ranks, self.odd = rank, ranks, odd
        self.fused = nn.Parameter(torch.zeros(24 // ranks, 8, dtype=torch.bfloat16))
        self.norm = nn.Parameter(torch.zeros(40, dtype=torch.bfloat16))
        self.requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        rows = 12 // self.ranks
        for name, tensor in weights:
            if name in ("a", "b"):
                part = tensor.narrow(0, self.rank * rows, rows)
                self.fused.data.narrow(0, "ab".index(name) * rows, rows).copy_(part)
            elif name == "norm":
                self.norm.data.copy_(tensor.flip(0) if self.odd else tensor)


def first() -> dict[str, Spec]:
    return {
        "a": random_tensor("BF16", (12, 8), 1),
        "b": random_tensor("BF16", (12, 8), 2),
        "norm": random_tensor("BF16", (40,), 3),
        "unused": random_tensor("BF16", (5,), 4),
    }


class Steps:
    """A chain, and the checkpoint of each of its steps."""

    def __init__(self, root: Path, tensors: dict[int, dict[str, Spec]]) -> None:
        self.root, self.tensors = root, tensors
        self.bucket = LocalBucket(root / "bucket")
        for step, tensors in self.tensors.items():
            made = write_hf_directory(self.checkpoint(step), tensors, shards=2)
            encoding = ENCODINGS.get(step, "ulp")
            push(made, self.bucket, step=step, encoding=encoding, anchor_every=0)
        chain = read_chain(self.bucket)
        self.states = {step: chain.state_at(step) for step in self.tensors}

    def checkpoint(self, step: int) -> Path:
        return self.root / f"step_{step}"


def load(model: Sliced, names: tuple[str, ...], checkpoint: Checkpoint) -> None:
    """Tensors of a checkpoint by the model's own loader."""
    tensors = {name: checkpoint.tensors[name] for name in names}
    model.load_weights(
        as_torch({name: (t.dtype, t.shape, bytes(t.data)) for name, t in tensors.items()})
    )


def load_and_turn(model: Sliced, names: tuple[str, ...], checkpoint: Checkpoint) -> None:
    """As a layer that lays out what was loaded in an order of its own, in place."""
    load(model, names, checkpoint)
    model.norm.data.copy_(model.norm.flip(0))


class Place:
    """Ranks that serve a copy of a chain's first step. ``reload``: of one rank's model; ``link``:
    where the directory's path leads instead; ``turns``: "norm" is turned round when it was
    loaded."""

    def __init__(
        self,
        steps: Steps,
        root: Path,
        ranks: int = 1,
        *,
        odd: bool = False,
        reload: Any = load,
        link: Path | None = None,
        turns: bool = False,
    ) -> None:
        if turns:
            reload = load_and_turn
        self.tensors, self.bucket, self.states = steps.tensors, steps.bucket, steps.states
        self.directory = root / "model"
        if link is None:
            shutil.copytree(steps.checkpoint(1), self.directory)
        else:
            self.directory.parent.mkdir(exist_ok=True)
            self.directory.symlink_to(link)
        self.models = [Sliced(rank, ranks, odd) for rank in range(ranks)]
        for model in self.models:
            model.load_weights(as_torch(self.tensors[1]))
            if turns:
                model.norm.data.copy_(model.norm.flip(0))
        peers = thread_peers(ranks)
        self.ranks = [
            Serving(
                ModelWork(model, lambda: self.directory, ranks, reload and partial(reload, model)),
                peers[n],
            )
            for n, model in enumerate(self.models)
        ]

    def each(self, act: Any) -> list[dict[str, Any]]:
        together(self.ranks, act)
        return self.now()

    def now(self) -> list[dict[str, Any]]:
        return [rank.state() for rank in self.ranks]

    def until(self, key: str, busy: str) -> list[dict[str, Any]]:
        deadline = time.monotonic() + LIMIT
        while busy in [_phase(row[key]) for row in self.now()]:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return self.now()

    def ready(self) -> list[dict[str, Any]]:
        steps = {state: step for step, state in self.states.items()}
        self.each(lambda rank: rank.identify(steps))
        self.until("identity", "running")
        return self.each(lambda rank: rank.record_map())

    def stage(self, to: int, *, full: bool = False) -> list[dict[str, Any]]:
        before = self.now()[0]
        request = {
            "id": f"to {to}",
            "bucket": self.bucket.url,
            "from_step": before["step"],
            "from_state": before["state"],
            "to_step": to,
            "to_state": self.states[to],
            "links": [] if full else [delta_name(n) for n in range(before["step"] + 1, to + 1)],
            "full": full,
        }
        self.each(lambda rank: rank.stage(request))
        self.until("update", "staging")
        return self.each(lambda rank: rank.seal(f"to {to}"))

    def update(self, to: int, *, full: bool = False) -> None:
        sealed = self.stage(to, full=full)
        assert {row["update"]["phase"] for row in sealed} == {"ready"}, sealed
        done = self.each(lambda rank: rank.commit(f"to {to}"))
        assert {row["update"]["phase"] for row in done} == {"committed"}, done
        for row in self.each(lambda rank: rank.done(f"to {to}")):
            assert (row["step"], row["state"], row["error"]) == (to, self.states[to], None)

    def holds(self, step: int) -> bool:
        """Whether every live bit is what loading that step would have made it."""
        for model in self.models:
            like = Sliced(model.rank, model.ranks, model.odd)
            like.load_weights(as_torch(self.tensors[step]))
            for mine, wanted in zip(model.parameters(), like.parameters(), strict=True):
                if not torch.equal(mine.view(torch.int16), wanted.view(torch.int16)):
                    return False
        return True

    def audit(self) -> dict[str, Any]:
        self.each(lambda rank: rank.audit())
        deadline = time.monotonic() + LIMIT
        while (row := self.each(lambda rank: rank.seal_audit())[0]["audit"])["phase"] == "running":
            assert time.monotonic() < deadline
        return dict(row)


def _phase(value: Any) -> Any:
    return value["phase"] if isinstance(value, dict) else value


def as_torch(tensors: dict[str, Spec]) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, torch.frombuffer(bytearray(data), dtype=torch.bfloat16).reshape(shape))
        for name, (_, shape, data) in tensors.items()
    ]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """Read it, never write."""
    tensors = {1: first()}
    for step in ENCODINGS:
        share = {EMPTY: 0.0, DENSE: 1.0}.get(step, 0.1)
        tensors[step] = {
            name: spec if not share else changed(spec, share, step)
            for name, spec in tensors[step - 1].items()
        }
    return Steps(tmp_path_factory.mktemp("steps"), tensors)


@pytest.fixture(params=[1, 2, 3])
def place(request: pytest.FixtureRequest, steps: Steps, tmp_path: Path) -> Place:
    return Place(steps, tmp_path, request.param)


def test_the_step_is_found_by_what_the_directory_holds(place: Place) -> None:
    for row in place.ready():
        assert (row["identity"], row["step"], row["state"]) == ("known", 1, place.states[1])
        assert row["map"] == {
            "tensors": 3, "unmapped": {}, "ignored": ["unused"], "refused": {}, "proven": known()
        }  # fmt: skip


def test_one_step_after_another(place: Place) -> None:
    place.ready()
    for step in range(2, TIP + 1):
        if step == EMPTY:
            assert place.stage(step)[0]["update"]["phase"] == "already"
            place.each(lambda rank: rank.done(f"to {EMPTY}"))
            continue
        place.update(step)
        assert place.holds(step)
        assert place.audit() == {
            "phase": "done", "checked": 3, "differing": [], "unaudited": ["unused"]
        }  # fmt: skip


@pytest.mark.parametrize("by", [(TIP,), (3, TIP), (EMPTY, DENSE, TIP), (DENSE, TIP)])
def test_many_links_at_once(place: Place, by: tuple[int, ...]) -> None:
    place.ready()
    for step in by:
        place.update(step)
        assert place.holds(step)
        assert place.audit()["differing"] == []


def test_every_tensor_anew_forth_and_back(place: Place) -> None:
    place.ready()
    for step in (TIP, 1, 3):
        place.update(step, full=True)
        assert place.holds(step)
        assert place.audit()["differing"] == []
    place.update(4)
    assert place.holds(4)


def assert_one_full_load(place: Place, steps: Steps) -> None:
    """Nobody knows the weights until all were loaded; then they are as any others."""
    for row in place.now():
        assert (row["identity"], row["step"], row["state"]) == ("known", None, None)
        assert (row["map"]["unmapped"], row["doubt"]["kind"]) == ({}, "Malformed")
    for row in place.stage(3, full=True):
        assert row["update"]["reloaded"] == ["a", "b", "norm"]
    place.each(lambda rank: rank.discard("to 3"))
    place.update(3, full=True)
    assert place.holds(3)
    for row in place.now():
        assert (row["map"]["tensors"], row["map"]["unmapped"]) == (3, {})
    assert place.audit()["differing"] == []
    place.update(4)
    assert place.holds(4)


def test_a_directory_that_was_replaced_before_it_was_looked_at(
    steps: Steps, tmp_path: Path
) -> None:
    """It holds a later step than the one that was loaded, whatever its files' times are."""
    place = Place(steps, tmp_path, 2)
    shutil.rmtree(place.directory)
    shutil.copytree(steps.checkpoint(3), place.directory)
    for file in place.directory.iterdir():
        os.utime(file, (0, 0))
    place.ready()
    assert_one_full_load(place, steps)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_directory_that_is_a_link_which_is_moved(steps: Steps, tmp_path: Path, when: str) -> None:
    """After the engine was made nobody is misled; before, the sums tell."""
    place = Place(steps, tmp_path, 2, link=steps.checkpoint(3 if when == "before" else 1))
    place.directory.unlink()
    place.directory.symlink_to(steps.checkpoint(4))
    place.ready()
    if when == "before":
        assert_one_full_load(place, steps)
        return
    assert [row["step"] for row in place.now()] == [1, 1]
    place.update(3)
    assert place.holds(3)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weights_that_were_never_loaded(steps: Steps, tmp_path: Path, ranks: int) -> None:
    place = Place(steps, tmp_path, ranks)
    for model in place.models:
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    place.ready()
    assert_one_full_load(place, steps)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_were_reset_after_they_were_known(
    steps: Steps, tmp_path: Path, ranks: int
) -> None:
    """The map was proven, so that they are written through it."""
    place = Place(steps, tmp_path, ranks)
    place.ready()
    place.update(2)
    for model in place.models:
        for parameter in model.parameters():
            parameter.zero_()
    assert len(place.audit()["differing"]) == 3
    for row in place.stage(2, full=True):
        assert (row["state"], row["update"]["reloaded"]) == (None, [])
    place.each(lambda rank: rank.discard("to 2"))
    place.update(2, full=True)
    assert place.holds(2)


def test_a_directory_without_weights_is_refused(steps: Steps, tmp_path: Path) -> None:
    """Nothing tells then which tensors there are and where each of them lies."""
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    place = Place(steps, tmp_path / "place", 2, link=empty)
    for row in place.ready():
        assert (row["identity"], row["state"], row["map"]) == ("failed", None, None)
        assert row["error"]["file"] == str(empty)
        assert row["error"]["hint"] is not None
    assert place.stage(3, full=True)[0]["update"] is None
    assert place.holds(1)


def test_a_copy_on_another_rank_that_differs(steps: Steps, tmp_path: Path) -> None:
    """Each rank has all of "norm"; what one adds up alone is not all that is to be right."""
    place = Place(steps, tmp_path, 3)
    place.ready()
    place.models[2].norm.view(torch.int16)[7] ^= 1
    assert place.audit()["differing"] == ["norm"]
    place.update(2, full=True)
    assert place.holds(2)
    assert place.audit()["differing"] == []


def test_a_layer_that_changes_its_weights_shows_only_once_they_were_loaded(
    steps: Steps, tmp_path: Path
) -> None:
    """And where no reload was proven for it, that is told, and nobody is to be answered by it."""
    experts = "UnquantizedFusedMoEMethod"
    for kind, phase in (("UnquantizedLinearMethod", "committed"), (experts, "failed")):
        place = Place(steps, tmp_path / kind, 2, turns=True)
        for model in place.models:
            model.quant_method = type(kind, (), {})()
        place.ready()
        place.stage(3, full=True)
        for row in place.each(lambda rank: rank.commit("to 3")):
            assert row["update"]["phase"] == phase
            assert set(row["map"]["unmapped"]) == ({"norm"} if phase == "committed" else set())
            if phase == "failed":
                assert row["update"]["error"]["kind"] == "Unsupported"
                assert row["poisoned"]["hint"] == "pull the step, and start the server anew on it"


def test_parameters_that_were_exchanged(steps: Steps, tmp_path: Path) -> None:
    """What the map leads to is not what the model computes with any more."""
    place = Place(steps, tmp_path, 2)
    place.ready()
    place.update(2)
    place.models[1].norm = nn.Parameter(torch.zeros_like(place.models[1].norm), requires_grad=False)
    place.each(lambda rank: rank.audit())
    assert [row["state"] for row in place.now()] == [None, None]
    place.ready()
    assert [row["doubt"]["tensor"] for row in place.now()] == ["norm", "norm"]
    place.update(3, full=True)
    assert place.holds(3)


def test_a_directory_that_was_replaced_by_the_same(steps: Steps, tmp_path: Path) -> None:
    """What is live is proven to be what it holds, whatever became of its files."""
    place = Place(steps, tmp_path, 2)
    shutil.rmtree(place.directory)
    shutil.copytree(steps.checkpoint(1), place.directory)
    place.ready()
    place.update(2)
    assert place.holds(2)


def test_a_directory_that_is_gone(steps: Steps, tmp_path: Path) -> None:
    place = Place(steps, tmp_path, 2)
    shutil.rmtree(place.directory)
    for row in place.ready():
        assert (row["identity"], row["map"]) == ("failed", None)
        assert row["error"]["kind"] == "NotFound"
    shutil.copytree(steps.checkpoint(1), place.directory)
    place.ready()
    place.update(2)
    assert place.holds(2)


def test_a_live_bit_that_is_not_the_directory_s(steps: Steps, tmp_path: Path) -> None:
    place = Place(steps, tmp_path)
    place.models[0].fused.view(torch.int16)[0, 0] ^= 1
    (row,) = place.ready()
    assert (row["doubt"]["tensor"], row["map"]["tensors"]) == ("a", 3)
    assert_one_full_load(place, steps)


@pytest.mark.parametrize("full", [False, True])
def test_what_no_map_can_express_goes_through_the_loader(
    steps: Steps, tmp_path: Path, full: bool
) -> None:
    place = Place(steps, tmp_path, 2, odd=True)
    for row in place.ready():
        assert set(row["map"]["unmapped"]) == {"norm"}
        assert (row["doubt"]["kind"], row["state"]) == ("Unproven", None)
    place.update(2, full=True)
    for row in place.stage(3, full=full):
        assert row["update"]["reloaded"] == ["norm"]
    place.each(lambda rank: rank.discard("to 3"))
    place.update(3, full=full)
    assert place.holds(3)
    found = place.audit()
    assert (found["differing"], found["unaudited"]) == ([], ["norm", "unused"])
    place.update(TIP, full=full)
    assert place.holds(TIP)


def test_what_no_map_can_express_where_nothing_else_loads_it(steps: Steps, tmp_path: Path) -> None:
    place = Place(steps, tmp_path, odd=True, reload=None)
    place.ready()
    (row,) = place.stage(3, full=True)
    assert row["update"]["phase"] == "failed"
    assert row["update"]["error"]["found"] == "a, b, norm"
    assert place.holds(1)


def test_a_layer_that_no_reload_was_proven_for_is_refused_by_name(
    steps: Steps, tmp_path: Path
) -> None:
    place = Place(steps, tmp_path, 2, odd=True)
    for model in place.models:
        model.head = nn.Module()
        model.head.quant_method = type("Fp8LinearMethod", (), {})()
    refused = "head is laid out by Fp8LinearMethod"
    assert place.ready()[0]["map"]["refused"] == {"norm": refused}
    for row in place.stage(3, full=True):
        assert row["update"]["phase"] == "failed"
        error = row["update"]["error"]
        assert (error["kind"], error["found"]) == ("Unsupported", refused)
        assert error["hint"] == "pull the step, and start the server anew on it"
        assert row["poisoned"] is None
    assert place.holds(1)


def test_a_quantised_layer_that_is_not_where_the_map_says_is_refused_before_it_is_loaded(
    steps: Steps, tmp_path: Path
) -> None:
    """What would be loaded is made over, whatever is live now."""
    place = Place(steps, tmp_path, 2, turns=True)
    for model in place.models:
        model.head = nn.Module()
        model.head.quant_method = type("Fp8LinearMethod", (), {})()
    place.ready()
    for row in place.stage(3, full=True):
        assert row["update"]["phase"] == "failed"
        assert row["update"]["error"]["kind"] == "Unsupported"
        assert row["poisoned"] is None


@pytest.mark.parametrize("fails", [0, 1])
def test_a_loader_that_fails_leaves_the_server_poisoned(
    steps: Steps, tmp_path: Path, fails: int
) -> None:
    """Half of it may be loaded: nobody knows, and a full update has to write it all."""
    broken: list[bool] = []

    def reload(model: Sliced, names: tuple[str, ...], checkpoint: Checkpoint) -> None:
        if broken and model.rank == fails:
            model.norm.data[3] = 7
            raise MemoryError
        load(model, names, checkpoint)

    place = Place(steps, tmp_path, 2, odd=True, reload=reload)
    place.ready()
    place.update(2, full=True)
    broken.append(True)
    place.stage(3)
    for row in place.each(lambda rank: rank.commit("to 3")):
        assert row["update"]["phase"] == "failed"
        assert row["poisoned"] is not None
    broken.clear()
    place.each(lambda rank: rank.discard("to 3"))
    place.update(3, full=True)
    assert place.holds(3)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("moved", ["unused", "norm"])
def test_a_tensor_that_another_stands_for_has_to_stay_its_equal(
    tmp_path: Path, moved: str, full: bool
) -> None:
    """As the output layer that is tied to an embedding: the loader takes it and keeps nothing."""
    tied = first() | {"unused": first()["norm"]}
    both = {**tied, **dict.fromkeys(("unused", "norm"), changed(tied["norm"], 0.2, 5))}
    apart = {**both, moved: changed(both[moved], 0.2, 6)}
    place = Place(Steps(tmp_path / "steps", {1: tied, 2: both, 3: apart}), tmp_path)
    place.ready()
    (row,) = place.stage(3, full=full)
    assert row["update"]["phase"] == "failed"
    assert row["update"]["error"]["kind"] == "Unsupported"
    assert row["update"]["error"]["tensor"] == "unused"
    place.each(lambda rank: rank.discard("to 3"))
    place.update(2, full=full)
    assert place.holds(2)


def test_a_step_with_another_tensor_is_refused(tmp_path: Path) -> None:
    more = first() | {"new": random_tensor("BF16", (3,), 9)}
    place = Place(Steps(tmp_path / "steps", {1: first(), 2: more}), tmp_path)
    place.ready()
    for full in (False, True):
        (row,) = place.stage(2, full=full)
        assert row["update"]["error"]["kind"] == "Unsupported"
        assert row["update"]["error"]["tensor"] == "new"
        place.each(lambda rank: rank.discard("to 2"))
    assert place.holds(1)


def test_the_parts_of_a_staging_are_added_up() -> None:
    heard: list[tuple[int, int]] = []
    told = Told(lambda fetched, worked: heard.append((fetched, worked)))
    for what, *counts in (
        ("fetching", 0, 4, 9), ("writing", 0, 5), ("fetching", 0, 3), ("fetching", 0, 2),
    ):  # fmt: skip
        for done in counts:
            told(what, int(done), 9)
    assert heard[-1] == (14, 19)
    assert heard == sorted(heard)
    told("fetching", 1, 9)  # what was fetched turned out to be torn
    assert heard[-1] == (13, 19)
