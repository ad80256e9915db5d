"""Every optimizer step in the bucket, bit for bit, from three lines in a training loop."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.codec import ENCODINGS
from deltactl.core.errors import Conflict, NotAllowed, Unsupported, UsageError
from deltactl.format.delta import DeltaHeader
from deltactl.format.header import Record
from deltactl.ops.pull import pull
from deltactl.trainer import Every, Publisher
from tests.support.checkpoints import flip_bit
from tests.support.foreign import LFS
from tests.support.publishing import (
    Bits,
    MoodyBucket,
    adamw,
    assert_chain,
    bits_of,
    small,
    update,
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def bucket(tmp_path: Path) -> MoodyBucket:
    return MoodyBucket(tmp_path / "bucket")


def records(bucket: LocalBucket, step: int) -> dict[str, Record]:
    header = read_chain(bucket).deltas[step].header
    assert isinstance(header, DeltaHeader)
    return header.records


def train(
    publisher: Publisher | None,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
) -> dict[int, Bits]:
    """The bits after each step; the publisher's hook is in the optimizer, or publish is called."""
    found = {}
    for step in steps:
        update(model, optimizer, step)
        if publisher is not None:
            publisher.publish(step)
        found[step] = bits_of(model.state_dict())
    return found


@pytest.mark.parametrize("mirror", ["memory", "disk"])
@pytest.mark.parametrize("encoding", list(ENCODINGS))
def test_three_lines_in_a_plain_loop(
    tmp_path: Path, bucket: MoodyBucket, encoding: Any, mirror: Any
) -> None:
    model = small()
    optimizer = adamw(model)
    with Publisher(
        model, bucket, optimizer=optimizer, encoding=encoding, mirror=mirror, anchors=Every(3)
    ) as publisher:
        expected = train(None, model, optimizer, range(1, 8))
    assert_chain(bucket, expected, tmp_path)
    chain = read_chain(bucket)
    assert {link.encoding for link in chain.deltas.values()} == {encoding}
    assert 1 in chain.anchors
    deltas = [p for p in publisher.history if p.kind == "delta"]
    assert [p.step for p in deltas] == [2, 3, 4, 5, 6, 7]
    assert [p.bytes for p in deltas] == [chain.deltas[p.step].bytes for p in deltas]
    assert [p.state for p in deltas] == [chain.state_at(p.step) for p in deltas]
    assert publisher.error is None


def test_two_calls_in_a_plain_loop_without_an_optimizer(tmp_path: Path) -> None:
    model = small()
    with Publisher(model, str(tmp_path / "bucket")) as publisher:
        publisher.publish(5)
        expected = {5: bits_of(model.state_dict())}
        expected |= train(publisher, model, adamw(model), range(6, 9))
    assert_chain(LocalBucket(tmp_path / "bucket"), expected, tmp_path)


def test_anchors_come_by_their_policy_and_hold_the_step(
    tmp_path: Path, bucket: MoodyBucket
) -> None:
    model = small()
    with Publisher(model, bucket, anchors=Every(2)) as publisher:
        expected = {}
        for step in range(1, 7):
            expected |= train(publisher, model, adamw(model), range(step, step + 1))
            kind = "delta" if step in (3, 5) else "anchor"
            wait_for(lambda s=(step, kind): s in [(p.step, p.kind) for p in publisher.history])
    assert sorted(read_chain(bucket).anchors) == [1, 2, 4, 6]
    assert_chain(bucket, expected, tmp_path)
    for step in (3, 5):  # anchors that stand alone
        bucket.delete(f"deltas/step_{step:06d}.safetensors")
    pull(bucket, tmp_path / "alone", step=6)


def wait_for(condition: Any) -> None:
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came to be")


def test_deltas_do_not_pile_up_where_no_anchor_is_wanted(
    tmp_path: Path, bucket: MoodyBucket
) -> None:
    model, scratch = small(), tmp_path / "scratch"
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Publisher(
        model, bucket, optimizer=optimizer, anchors=Every(0), scratch=scratch
    ) as publisher:
        for step in range(1, 30):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            optimizer.step()
            wait_for(lambda s=step: publisher.last and publisher.last.step == s)
        wait_for(lambda: len(list((scratch / "deltas").iterdir())) < 10)
    assert list(read_chain(bucket).anchors) == [1]


def test_a_step_without_changes_is_an_empty_link(tmp_path: Path, bucket: MoodyBucket) -> None:
    model = small()
    with Publisher(model, bucket) as publisher:
        publisher.publish()
        publisher.publish()
    assert records(bucket, 2) == {}
    assert_chain(bucket, dict.fromkeys((1, 2), bits_of(model.state_dict())), tmp_path)


def test_nan_minus_zero_and_infinity(tmp_path: Path, bucket: MoodyBucket) -> None:
    model = small()
    weight = model[0].weight
    expected = {}
    with Publisher(model, bucket) as publisher, torch.no_grad():
        for step, value in enumerate((0.0, -0.0, float("nan"), float("-inf"), 0.0), 1):
            weight[3, 3:9] = value
            publisher.publish()
            expected[step] = bits_of(model.state_dict())
    assert_chain(bucket, expected, tmp_path)
    assert [records(bucket, step)["0.weight"].changed for step in (2, 3, 4, 5)] == [6] * 4


def test_masters_are_published_rounded(tmp_path: Path, bucket: MoodyBucket) -> None:
    model = small(torch.float32)
    model.register_buffer("count", torch.arange(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    expected = {}
    with Publisher(model, bucket, optimizer=optimizer, dtype="bfloat16"):
        for step in range(1, 5):
            update(model, optimizer, step)
            rounded = {
                name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
                for name, tensor in model.state_dict().items()
            }
            expected[step] = bits_of(rounded)
    assert_chain(bucket, expected, tmp_path)


def test_gradient_accumulation_groups_and_frozen_parameters(
    tmp_path: Path, bucket: MoodyBucket
) -> None:
    model = small()
    model[0].weight.requires_grad_(False)
    groups = [{"params": [model[0].bias], "lr": 1e-2}, {"params": list(model[1].parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    expected = {}
    with Publisher(model, bucket, optimizer=optimizer):
        for batch in range(8):
            model(torch.full((2, 24), 0.1 * batch).bfloat16()).float().sum().backward()
            if batch % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
                expected[batch // 4 + 1] = bits_of(model.state_dict())
    assert_chain(bucket, expected, tmp_path)
    assert "0.weight" not in records(bucket, 2)


def test_what_is_frozen_and_changed_all_the_same_is_found(
    tmp_path: Path, bucket: MoodyBucket
) -> None:
    model = small()
    with Publisher(model, bucket) as publisher:
        publisher.publish()
        model[0].weight.requires_grad_(False)
        model[0].weight.data[0, 0] = 3.0  # without a trace in the tensor's version
        publisher.publish()
    assert records(bucket, 2)["0.weight"].changed == 1


def test_tied_parameters_are_there_once(tmp_path: Path, bucket: MoodyBucket) -> None:
    model = small()
    model[1].weight = model[0].weight
    optimizer = adamw(model)
    expected = {}
    with Publisher(model, bucket, optimizer=optimizer):
        for step in (1, 2):
            update(model, optimizer, step)
            state = bits_of(model.state_dict())
            del state["1.weight"]
            expected[step] = state
    assert_chain(bucket, expected, tmp_path)


def test_parameters_that_appear_late_and_leave(tmp_path: Path, bucket: MoodyBucket) -> None:
    model = small()
    optimizer = adamw(model)
    with Publisher(model, bucket, optimizer=optimizer) as publisher:
        expected = train(None, model, optimizer, range(1, 2))
        model.append(torch.nn.Linear(24, 24).bfloat16())
        optimizer.add_param_group({"params": list(model[2].parameters())})
        expected |= train(None, model, optimizer, range(2, 4))
        model[0].weight = torch.nn.Parameter(model[0].weight.detach().float())
        publisher.publish()
        expected[4] = bits_of(model.state_dict())
        model.pop(2)
        publisher.publish()
        expected[5] = bits_of(model.state_dict())
    assert_chain(bucket, expected, tmp_path)
    assert records(bucket, 2)["2.weight"].kind == "added"
    assert records(bucket, 4)["0.weight"].base_dtype == "BF16"
    assert records(bucket, 5)["2.weight"].kind == "removed"


def test_names_may_be_given(tmp_path: Path, bucket: MoodyBucket) -> None:
    model = small()
    state = bits_of(model.state_dict())
    with Publisher(model, bucket, names={"0.weight": "first", "0.bias": None}) as publisher:
        publisher.publish()
    expected = {
        "first": state["0.weight"],
        "1.weight": state["1.weight"],
        "1.bias": state["1.bias"],
    }
    assert_chain(bucket, {1: expected}, tmp_path)
    with pytest.raises(UsageError, match="one name"):
        Publisher(model, tmp_path / "other", names=lambda name: "same")


# Runs after runs.


def test_the_next_run_goes_on_with_the_chain(tmp_path: Path, bucket: MoodyBucket) -> None:
    model = small()
    optimizer = adamw(model)
    with Publisher(model, bucket, optimizer=optimizer):
        expected = train(None, model, optimizer, range(1, 4))
    update(model, optimizer, 99)  # a step that nobody published
    with Publisher(model, bucket, optimizer=optimizer):
        expected |= train(None, model, optimizer, range(4, 6))
    assert_chain(bucket, expected, tmp_path)
    assert list(read_chain(bucket).anchors) == [1]


def test_the_next_run_goes_on_without_anything_local(tmp_path: Path, bucket: MoodyBucket) -> None:
    model = small()
    with Publisher(model, bucket, scratch=tmp_path / "one") as publisher:
        expected = train(publisher, model, adamw(model), range(1, 4))
    with Publisher(model, bucket, scratch=tmp_path / "two") as publisher:
        expected |= train(publisher, model, adamw(model), range(4, 5))
    assert_chain(bucket, expected, tmp_path)
    (tmp_path / "two" / "base").mkdir(exist_ok=True)
    flip_bit(tmp_path / "two" / "base" / "model.safetensors", -1)  # not believed
    with Publisher(model, bucket, scratch=tmp_path / "two") as publisher:
        expected |= train(publisher, model, adamw(model), range(5, 6))
    assert_chain(bucket, expected, tmp_path)


def test_training_that_went_on_from_an_earlier_step_is_numbered_on(
    tmp_path: Path, bucket: MoodyBucket, caplog: pytest.LogCaptureFixture
) -> None:
    model = small()
    optimizer = adamw(model)
    with Publisher(model, bucket, optimizer=optimizer):
        expected = train(None, model, optimizer, range(1, 5))
    caplog.clear()
    with Publisher(model, bucket, optimizer=optimizer, step=2) as publisher:
        again = train(None, model, optimizer, range(3, 6))
    expected |= {step + 2: bits for step, bits in again.items()}
    assert_chain(bucket, expected, tmp_path)
    found = [(p.step, p.training_step) for p in publisher.history]
    assert found == [(5, 3), (6, 4), (7, 5)]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "training step 3 is published as step 5" in warning


def test_steps_rise_also_within_a_run(tmp_path: Path, bucket: MoodyBucket) -> None:
    model = small()
    with Publisher(model, bucket, anchors=Every(0)) as publisher:
        for step in (5, 3, 4, 9, 9):
            publisher.publish(step)
    found = [(p.training_step, p.step) for p in publisher.history]
    assert found == [(5, 5), (3, 6), (4, 7), (9, 12), (9, 13)]


def test_a_tensor_that_cannot_be_published_stops_no_training(
    tmp_path: Path, bucket: MoodyBucket
) -> None:
    model = small()
    with Publisher(model, bucket) as publisher:
        publisher.publish(1)
        model.register_buffer("odd", torch.empty(3, device="meta"))
        publisher.publish(2)
        assert isinstance(publisher.error, Unsupported)
        del model.odd
        publisher.publish(3)
    assert publisher.error is None
    assert [(p.step, p.merged_steps) for p in publisher.history] == [(1, 0), (3, 1)]


def test_a_damaged_chain_gets_an_anchor(
    tmp_path: Path, bucket: MoodyBucket, caplog: pytest.LogCaptureFixture
) -> None:
    model = small()
    with Publisher(model, bucket, scratch=tmp_path / "one") as publisher:
        train(publisher, model, adamw(model), range(1, 4))
    flip_bit(tmp_path / "bucket" / "deltas" / "step_000003.safetensors", -1)
    with Publisher(model, bucket, scratch=tmp_path / "two") as publisher:
        expected = train(publisher, model, adamw(model), range(4, 6))
    assert "an anchor begins anew" in caplog.text
    chain = read_chain(bucket)
    assert sorted(chain.anchors) == [1, 4]
    assert chain.tip == 5
    for step, bits in expected.items():
        pull(bucket, tmp_path / str(step), step=step)
        assert len(bits) == 4


def test_what_an_anchor_left_unfinished_is_not_in_the_way(
    tmp_path: Path, bucket: MoodyBucket
) -> None:
    leftover = tmp_path / "bucket" / "anchors" / "step_000001" / "model.safetensors"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"half")
    model = small()
    with Publisher(model, bucket) as publisher:
        publisher.publish(1)
    assert publisher.history[0].step == 2
    assert publisher.error is None


def test_another_models_chain_is_refused(tmp_path: Path, bucket: MoodyBucket) -> None:
    with Publisher(small(), bucket) as publisher:
        publisher.publish()
    with pytest.raises(Conflict, match="another model"):
        Publisher(torch.nn.Linear(3, 4), bucket)
    with Publisher(small(), bucket) as publisher:  # the lock was given back
        publisher.publish()


def test_a_model_of_another_width_is_refused_though_a_tensor_fits(
    tmp_path: Path, bucket: MoodyBucket
) -> None:
    def layers(width: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 3))

    with Publisher(layers(8), bucket) as publisher:
        publisher.publish()
    with pytest.raises(Conflict, match="another model") as caught:
        Publisher(layers(16), bucket)
    assert "[8" in str(caught.value.expected)  # the chain's
    assert "[16" in str(caught.value.found)


def test_another_model_that_is_meant_gets_an_anchor(tmp_path: Path, bucket: MoodyBucket) -> None:
    with Publisher(small(), bucket) as publisher:
        publisher.publish()
    expected = {1: bits_of(small().state_dict())}
    other = torch.nn.ModuleDict({"policy": small(seed=1)})
    with Publisher(other, bucket, allow_other_model=True) as publisher:
        publisher.publish()
    assert [(p.step, p.kind) for p in publisher.history] == [(2, "anchor")]
    assert_chain(bucket, expected | {2: bits_of(other.state_dict())}, tmp_path)


def test_another_architecture_is_refused_though_its_tensors_fit(
    tmp_path: Path, bucket: MoodyBucket
) -> None:
    def files(model_type: str) -> Path:
        place = tmp_path / model_type
        place.mkdir()
        (place / "config.json").write_text(json.dumps({"model_type": model_type}))
        return place

    with Publisher(small(), bucket, files=files("llama")) as publisher:
        publisher.publish()
    with pytest.raises(Conflict, match="llama became qwen3") as caught:
        Publisher(small(), bucket, files=files("qwen3"))
    assert "allow_other_model=True" in str(caught.value.hint)


def test_an_adapter_alone_begins_no_chain(bucket: MoodyBucket) -> None:
    adapter = torch.nn.ModuleDict({"lora_A": torch.nn.Linear(2, 3, bias=False)})
    with pytest.raises(Conflict, match="no whole model"):
        Publisher(adapter, bucket)


def test_a_model_that_becomes_another_one_in_a_run_is_not_published(
    tmp_path: Path, bucket: MoodyBucket, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.ModuleDict({"policy": small()})
    with Publisher(model, bucket) as publisher:
        publisher.publish()
        expected = {1: bits_of(model.state_dict())}
        model["actor"] = model.pop("policy")
        publisher.publish()
        assert isinstance(publisher.error, Conflict)
        assert "4 of 4 names are gone" in str(publisher.error)
        model["policy"] = model.pop("actor")
        model["head"] = torch.nn.Linear(3, 1)
        publisher.publish()
        expected[3] = bits_of(model.state_dict())
    assert publisher.error is None
    assert "2 tensors are new: head.bias" in caplog.text
    assert_chain(bucket, expected, tmp_path)


def to_bfloat16(model: torch.nn.Module) -> None:
    model.bfloat16()


def to_meta(model: torch.nn.Module) -> None:
    model[1].to("meta")


@pytest.mark.parametrize(
    ("spoil", "refusal", "says"),
    [(to_bfloat16, Conflict, "F32 became BF16"), (to_meta, Unsupported, "on the meta device")],
)
def test_a_run_whose_model_is_refused_from_some_step_on_is_told_so_once(
    tmp_path: Path, bucket: MoodyBucket, caplog: pytest.LogCaptureFixture,
    spoil: Callable[[torch.nn.Module], None], refusal: type[Exception], says: str,
) -> None:  # fmt: skip
    model = small(torch.float32)
    publisher = Publisher(model, bucket)
    publisher.publish()
    expected = {1: bits_of(model.state_dict())}
    spoil(model)
    for _ in range(4):
        publisher.publish()
    with pytest.raises(refusal, match=says) as caught:
        publisher.close()
    told = [r for r in caplog.records if says in r.getMessage()]
    assert [r.levelno for r in told] == [logging.ERROR]
    assert told[0].getMessage().startswith("nothing more is published of this run")
    assert str(caught.value.hint) in told[0].getMessage()  # type: ignore[attr-defined]
    assert "the next one has its changes" not in caplog.text
    assert "4 of the 5 steps of this run are not in the bucket" in caplog.text
    assert_chain(bucket, expected, tmp_path)


def test_what_fails_again_after_a_step_got_through_is_told_again(
    bucket: MoodyBucket, caplog: pytest.LogCaptureFixture
) -> None:
    model = small(torch.float32)
    with Publisher(model, bucket) as publisher:
        publisher.publish()
        for _ in range(2):
            model.bfloat16()
            publisher.publish()
            publisher.publish()
            model.float()
            publisher.publish()
    told = [r for r in caplog.records if "F32 became BF16" in r.getMessage()]
    assert len(told) == 2
    assert publisher.error is None


def test_another_model_is_refused_though_the_tip_is_damaged(
    tmp_path: Path, bucket: MoodyBucket
) -> None:
    with Publisher(small(), bucket, scratch=tmp_path / "one") as publisher:
        publisher.publish()
        publisher.publish()
    flip_bit(next((tmp_path / "bucket" / "anchors").rglob("model*.safetensors")), -1)
    with pytest.raises(Conflict, match="another model"):
        Publisher(torch.nn.Linear(3, 4), bucket, scratch=tmp_path / "two")


def test_a_directory_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(NotAllowed, match="the bucket cannot be written"):
        Publisher(small(), tmp_path / "file" / "bucket")


def test_a_run_that_begins_with_other_weights_is_warned(
    tmp_path: Path, bucket: MoodyBucket, caplog: pytest.LogCaptureFixture
) -> None:
    asked = "was the checkpoint loaded"
    model = small()
    with Publisher(model, bucket) as publisher:
        publisher.publish()
    with Publisher(model, bucket) as publisher:
        publisher.publish()
    assert asked not in caplog.text
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    with Publisher(model, bucket) as publisher:
        publisher.publish()
    assert asked in caplog.text


def test_one_publisher_a_directory(tmp_path: Path, bucket: MoodyBucket) -> None:
    with Publisher(small(), bucket), pytest.raises(Conflict, match="another publisher"):
        Publisher(small(), bucket)


def test_a_long_chain_is_read_once(bucket: MoodyBucket) -> None:
    model = small()
    with Publisher(model, bucket, anchors=Every(0)) as publisher:
        train(publisher, model, adamw(model), range(1, 8))
        wait_for(lambda: publisher.last and publisher.last.step == 7)
        reads, lists = bucket.reads, bucket.lists
        train(publisher, model, adamw(model), range(8, 12))
    assert (bucket.reads, bucket.lists) == (reads, lists)


# What may be wrong with a request.


def test_an_optimizer_of_other_tensors_is_refused(bucket: MoodyBucket) -> None:
    with pytest.raises(UsageError, match="none of the model's"):
        Publisher(small(), bucket, optimizer=adamw(small()))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"encoding": "zip"}, "encoding"),
        ({"when_busy": "drop"}, "wait or merge"),
        ({"dtype": "int8"}, "bfloat16"),
        ({"mirror": "tape"}, "memory or disk"),
        ({"step": -1}, "range"),
        ({"files": "/nowhere"}, "directory"),
    ],
)
def test_requests_that_make_no_sense(
    bucket: MoodyBucket, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        Publisher(small(), bucket, **options)


@pytest.mark.parametrize(
    "step", [1.5, 4.0, "4", True, np.bool_(True), torch.tensor(True), [4]], ids=repr
)
def test_what_is_no_number_of_a_step_is_refused_at_once(
    tmp_path: Path, bucket: MoodyBucket, step: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match="a step is a whole number") as caught:
        Publisher(small(), bucket, step=step)
    assert type(step).__name__ in str(caught.value.found)
    with Publisher(small(), bucket) as publisher:
        with pytest.raises(UsageError, match="a step is a whole number"):
            publisher.publish(step)
        publisher.publish()
    assert [p.step for p in publisher.history] == [1]
    assert caplog.records == []


@pytest.mark.parametrize("step", [np.int64(4), np.uint8(4), torch.tensor(4)], ids=repr)
def test_a_step_may_be_any_whole_number(tmp_path: Path, bucket: MoodyBucket, step: Any) -> None:
    model = small()
    with Publisher(model, bucket, step=step) as publisher:
        publisher.publish()
        publisher.publish(step + 2)
    assert [p.step for p in publisher.history] == [5, 6]
    assert all(type(p.training_step) is int for p in publisher.history)


@pytest.mark.parametrize("model", [None, "Qwen/Qwen3-0.6B", {}, small])
def test_what_is_no_model_is_refused(tmp_path: Path, bucket: MoodyBucket, model: Any) -> None:
    with pytest.raises(UsageError, match=r"a torch\.nn\.Module") as caught:
        Publisher(model, bucket)
    assert caught.value.found == type(model).__name__
    assert not (tmp_path / "bucket").exists()


def test_closed_is_closed(bucket: MoodyBucket) -> None:
    model = small()
    optimizer = adamw(model)
    publisher = Publisher(model, bucket, optimizer=optimizer)
    publisher.close()
    publisher.close()
    with pytest.raises(UsageError, match="closed"):
        publisher.publish()
    update(model, optimizer)  # its hook is gone


def test_a_file_that_was_not_fetched_does_not_travel(tmp_path: Path, bucket: MoodyBucket) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "tokenizer.json").write_text(LFS)
    with pytest.raises(Unsupported, match="Git LFS pointer"):
        Publisher(small(), bucket, files=files)


def test_the_files_of_a_directory_travel_with_anchors(tmp_path: Path, bucket: MoodyBucket) -> None:
    files = tmp_path / "files"
    (files / "sub").mkdir(parents=True)
    (files / "config.json").write_text('{"model_type": "tiny"}')
    (files / "sub" / "vocab.txt").write_text("a\n")
    (files / "model.safetensors").write_bytes(b"old weights")
    with Publisher(small(), bucket, files=files) as publisher:
        publisher.publish()
    pull(bucket, tmp_path / "pulled")
    assert json.loads((tmp_path / "pulled" / "config.json").read_text()) == {"model_type": "tiny"}
    assert (tmp_path / "pulled" / "sub" / "vocab.txt").read_text() == "a\n"


# A bucket that fails, or is slow.


@pytest.fixture
def quick_tries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("deltactl.trainer.upload.worker.FIRST_WAIT", 0.001)
    return


def failing(times: int, error: Exception, on: str = "") -> Any:
    left = [times]

    def act(name: str) -> None:
        if on in name and left[0]:
            left[0] -= 1
            raise error

    return act


@pytest.mark.parametrize("lost", [False, True], ids=["refused", "answer lost"])
@pytest.mark.parametrize("on", ["deltas/", "anchors/"])
def test_a_link_that_fails_is_tried_until_it_is_there(
    tmp_path: Path, bucket: MoodyBucket, quick_tries: None, on: str, lost: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    fault = failing(3, OSError(28, "No space left on device"), on)
    bucket.after, bucket.before = (fault, bucket.before) if lost else (bucket.after, fault)
    model = small()
    with Publisher(model, bucket, anchors=Every(2)) as publisher:
        expected = train(publisher, model, adamw(model), range(1, 5))
        wait_for(lambda: "No space left" in caplog.text and publisher.error is None)
    published = {publication.step for publication in publisher.history}
    assert {1, 4} <= published  # while the line is full steps are merged, the last one never away
    assert_chain(bucket, {step: expected[step] for step in published}, tmp_path)
    assert publisher.error is None
    assert "No space left" in caplog.text


def test_a_bucket_that_fails_for_good_is_said_in_the_end_and_the_next_run_has_it_all(
    tmp_path: Path, bucket: MoodyBucket, quick_tries: None
) -> None:
    model = small()
    publisher = Publisher(model, bucket)
    expected = train(publisher, model, adamw(model), range(1, 3))
    wait_for(lambda: publisher.last and publisher.last.step == 2)
    bucket.before = failing(-1, NotAllowed("permission denied"))
    train(publisher, model, adamw(model), range(3, 12))  # goes on, though the line is full
    assert isinstance(publisher.error, NotAllowed)
    with pytest.raises(NotAllowed):
        publisher.close()
    bucket.before = lambda name: None
    assert_chain(bucket, expected, tmp_path)
    with Publisher(model, bucket) as again:
        again.publish(12)
    assert_chain(bucket, expected | {12: bits_of(model.state_dict())}, tmp_path / "again")


def test_a_step_that_somebody_else_published_ends_it(
    tmp_path: Path, bucket: MoodyBucket, quick_tries: None
) -> None:
    model = small()
    publisher = Publisher(model, bucket)
    expected = train(publisher, model, adamw(model), range(1, 2))
    wait_for(lambda: publisher.last is not None)
    with Publisher(small(seed=1), bucket, scratch=tmp_path / "other") as other:
        other.publish()
    wait_for(lambda: 2 in read_chain(bucket).steps)
    train(publisher, model, adamw(model), range(2, 6))
    with pytest.raises(Conflict, match="somebody else"):
        publisher.close()
    assert_chain(bucket, expected | {2: bits_of(small(seed=1).state_dict())}, tmp_path)


def test_a_step_that_cannot_be_written_is_in_the_next_link(
    tmp_path: Path, bucket: MoodyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    optimizer = adamw(model)
    with Publisher(model, bucket) as publisher:
        expected = train(publisher, model, optimizer, range(1, 3))
        publisher._await_encoding()
        with monkeypatch.context() as patch:
            patch.setattr("deltactl.trainer.upload.line.write_delta", raiser(OSError(28, "full")))
            train(publisher, model, optimizer, range(3, 5))
            publisher._await_encoding()
            assert isinstance(publisher.error, OSError)
        expected |= train(publisher, model, optimizer, range(5, 6))
    assert publisher.error is None
    assert publisher.last is not None and publisher.last.merged_steps == 2
    assert_chain(bucket, expected, tmp_path)


def raiser(error: Exception) -> Any:
    def act(*_: Any, **__: Any) -> None:
        raise error

    return act


def test_the_last_step_is_tried_again_when_all_is_closed(
    tmp_path: Path, bucket: MoodyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    with Publisher(model, bucket) as publisher:
        expected = train(publisher, model, adamw(model), range(1, 3))
        publisher._await_encoding()
        with monkeypatch.context() as patch:
            patch.setattr("deltactl.trainer.upload.line.write_delta", raiser(OSError(28, "full")))
            expected |= train(publisher, model, adamw(model), range(3, 4))
            publisher._await_encoding()
    assert_chain(bucket, expected, tmp_path)


class Gate:
    """Holds puts of deltas until it is opened."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()

    def __call__(self, name: str) -> None:
        if name.startswith("deltas/"):
            self.reached.set()
            assert self.opened.wait(60)


def test_a_slow_bucket_has_training_wait(tmp_path: Path, bucket: MoodyBucket) -> None:
    gate, model, steps = Gate(), small(), []
    bucket.before = gate
    publisher = Publisher(model, bucket)
    expected: dict[int, Bits] = {}

    def training() -> None:
        optimizer = adamw(model)
        for step in range(1, 12):
            expected.update(train(publisher, model, optimizer, range(step, step + 1)))
            steps.append(step)

    thread = threading.Thread(target=training)
    thread.start()
    wait_for(lambda: len(steps) == 5)  # the anchor, and the four that may wait
    assert gate.reached.wait(60)
    thread.join(0.2)
    assert thread.is_alive()
    assert steps == [1, 2, 3, 4, 5]
    gate.opened.set()
    thread.join()
    publisher.close()
    assert_chain(bucket, expected, tmp_path)
    assert all(p.merged_steps == 0 for p in publisher.history)


def test_a_slow_bucket_merges_steps_and_drops_no_change(
    tmp_path: Path, bucket: MoodyBucket
) -> None:
    gate, model = Gate(), small()
    bucket.before = gate
    publisher = Publisher(model, bucket, when_busy="merge")
    expected = train(publisher, model, adamw(model), range(1, 2))
    wait_for(lambda: publisher.last is not None)
    expected |= train(publisher, model, adamw(model), range(2, 6))
    assert gate.reached.wait(60)
    train(publisher, model, adamw(model), range(6, 10))  # none of these waits
    gate.opened.set()
    wait_for(lambda: publisher.last and publisher.last.step == 5)
    expected |= train(publisher, model, adamw(model), range(10, 11))
    publisher.close()
    assert_chain(bucket, expected, tmp_path)
    deltas = [p for p in publisher.history if p.kind == "delta"]
    assert [(p.step, p.merged_steps) for p in deltas[-2:]] == [(5, 0), (10, 4)]


def test_steps_that_were_merged_last_are_published_when_it_ends(
    tmp_path: Path, bucket: MoodyBucket
) -> None:
    gate, model = Gate(), small()
    bucket.before = gate
    publisher = Publisher(model, bucket, when_busy="merge")
    expected = train(publisher, model, adamw(model), range(1, 2))
    wait_for(lambda: publisher.last is not None)
    expected |= train(publisher, model, adamw(model), range(2, 6))
    last = train(publisher, model, adamw(model), range(6, 9))
    threading.Timer(0.05, gate.opened.set).start()
    publisher.close()
    assert_chain(bucket, expected | {8: last[8]}, tmp_path)


def test_an_error_of_training_is_not_covered_up(
    bucket: MoodyBucket, caplog: pytest.LogCaptureFixture
) -> None:
    model = small()
    bucket.before = failing(-1, NotAllowed("permission denied"))

    def training() -> None:
        with Publisher(model, bucket) as publisher:
            publisher.publish()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        training()
    assert "not everything was published" in caplog.text


# Whom it tells.


def test_notify_hears_of_confirmed_steps_and_may_fail(
    bucket: MoodyBucket, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[tuple[str, int, bool]] = []

    def notify(url: str, step: int) -> None:
        heard.append((url, step, step in read_chain(bucket).steps))
        if step == 2:
            raise ConnectionError("no such server")

    model = small()
    with Publisher(model, bucket, notify=notify) as publisher:
        for step in range(1, 4):
            publisher.publish()
            wait_for(lambda s=step: heard and heard[-1][1] == s)
    assert heard == [(bucket.url, step, True) for step in (1, 2, 3)]
    assert publisher.error is None
    assert "no such server" in caplog.text


def test_slow_listeners_hear_of_the_newest_step_only(bucket: MoodyBucket) -> None:
    begun, go_on, heard = threading.Event(), threading.Event(), []

    def notify(url: str, step: int) -> None:
        begun.set()
        assert go_on.wait(60)
        heard.append(step)

    with Publisher(small(), bucket, notify=notify) as publisher:
        publisher.publish()
        assert begun.wait(60)
        for _ in range(5):
            publisher.publish()
        wait_for(lambda: publisher.last and publisher.last.step == 6)
        go_on.set()
    assert heard == [1, 6]


def test_a_line_in_the_log_for_each_link(
    bucket: MoodyBucket, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "deltactl.trainer")
    model = small()
    with Publisher(model, bucket) as publisher:
        publisher.publish()
        model[0].weight.data[0, 0] += 1
        publisher.publish()
    first, second = (r.getMessage() for r in caplog.records if r.levelno == logging.INFO)
    assert first.startswith("step 1: anchor of 1,200 elements, ")
    assert second.startswith("step 2: 1 of 1,200 elements changed (sparsity 0.999167), ")
    assert "training blocked" in second and second.endswith(", ulp")
    assert publisher.last is not None
    assert 0 < publisher.last.blocked_seconds <= publisher.last.seconds
