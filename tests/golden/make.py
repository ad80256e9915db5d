"""Makes the golden files: ``python -m tests.golden.make``. They are committed.

Later versions have to go on reading every file here. So what is here is only added to; a file is
made anew only while no release has written its like.

    base, result            a pair of checkpoints with every dtype, and what can happen to a tensor
    raw, gap_delta, ulp, ulp_ctx    the deltas between them
    empty                   the delta between equal checkpoints
    chain/                  a chain of five steps and two anchors, which have shards
    single/                 a chain whose anchor is one file
    classes/                a chain of deltas in ulp_ctx, with blocks of every form
    parts/                  a chain of deltas of several files
    trl-1/, trl-2/          chains as TRL writes them, not by our code
    expected.json           states and digests, not by our code either
    expected_classes.json, expected_parts.json    those of classes/ and parts/
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np
from blake3 import blake3

from deltactl.bucket import open_bucket
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.format.link_names import delta_directory
from deltactl.ops.diff import diff
from deltactl.ops.push import push
from tests.support.checkpoints import (
    BITS,
    Spec,
    changed,
    random_tensor,
    write_hf_directory,
    write_safetensors,
)
from tests.support.page_reader import MANTISSA, state_digest
from tests.support.several import write_parts

GOLDEN = Path(__file__).parent
ENCODINGS = ("raw", "gap_delta", "ulp", "ulp_ctx")
AUX = {"config.json": b'{"model_type": "golden"}\n', "tokenizer/vocab.txt": b"a\nb\n"}

STRANGE = 'überall \u2603 "quoted"\\'

State = dict[str, Spec]


# A pair of checkpoints.


def base() -> State:
    """Every dtype, 240 units of each, and tensors to be removed, replaced, and kept."""
    shapes = {"F4": (480,), "F6_E2M3": (320,), "F6_E3M2": (4, 80)}
    state = {
        f"dtype.{dtype}": random_tensor(dtype, shapes.get(dtype, (12, 20)), seed=number)
        for number, dtype in enumerate(BITS)
    }
    return state | {
        "all": random_tensor("BF16", (8, 5), seed=100),
        "empty": ("BF16", (0, 7), b""),
        "kept": random_tensor("BF16", (3, 3), seed=101),
        "kept.scalar": ("F64", (), bytes(8)),
        "odd.idx": random_tensor("F16", (200,), seed=102),
        "removed": random_tensor("I64", (5,), seed=103),
        "removed.empty": ("F8_E4M3", (2, 0), b""),
        "reshaped": random_tensor("BF16", (4, 6), seed=104),
        "retyped": random_tensor("F32", (8,), seed=105),
        "scalar": ("F32", (), bytes(4)),
        STRANGE: random_tensor("BF16", (150,), seed=106),
    }


def result() -> State:
    """What the base leads to."""
    state = base()
    for name, spec in state.items():
        if name.startswith("dtype."):
            state[name] = special(spec)
    del state["removed"], state["removed.empty"]
    return state | {
        "added": random_tensor("F32", (2, 3), seed=200),
        "added.empty": ("F4", (0,), b""),
        "added.scalar": ("BF16", (), b"\x80\x3f"),
        "all": random_tensor("BF16", (8, 5), seed=201),
        "odd.idx": changed(state["odd.idx"], 0.02, seed=202),
        "reshaped": ("BF16", (6, 4), state["reshaped"][2]),
        "retyped": ("F16", (8,), bytes(16)),
        "scalar": ("F32", (), b"\x00\x00\x00\x80"),
        STRANGE: changed(state[STRANGE], 0.05, seed=203),
    }


def special(spec: Spec) -> Spec:
    """Change the first and the last unit and a few between: one up and down, signs, zeros, NaNs."""
    dtype, shape, data = spec
    bits = np.frombuffer(data, f"<u{max(BITS[dtype] // 8, 1)}").copy()
    if dtype == "BOOL":
        bits[[0, 7, -1]] ^= 1
        return dtype, shape, bits.tobytes()
    top = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    bits[0] += bits.dtype.type(1)
    bits[1] -= bits.dtype.type(1)
    bits[17] ^= top
    bits[100] = top if bits[100] != top else 0  # the float -0.0
    bits[101] = ~bits.dtype.type(0)  # a NaN of most floats
    bits[102] = ~top  # another, or the largest integer
    bits[200:203] += bits.dtype.type(3)
    bits[-1] ^= bits.dtype.type(1)
    return dtype, shape, bits.tobytes()


# The steps of a chain.


def steps() -> dict[int, State]:
    """Five steps; the third is as the second, the fifth adds, removes and replaces."""
    first = {
        "model.embed.weight": random_tensor("BF16", (16, 12), seed=1),
        "model.layer.0.bias": random_tensor("F32", (6,), seed=2),
        "model.layer.0.weight": random_tensor("BF16", (12, 12), seed=3),
        "model.layer.1.weight": random_tensor("F8_E4M3", (12, 12), seed=4),
        "model.norm": ("BF16", (12,), b"\x80\x3f" * 12),
    }
    second = moved(first, 2)
    fourth = moved(second, 4)
    fifth = moved(fourth, 5)
    del fifth["model.layer.0.bias"]
    fifth["model.layer.2.weight"] = random_tensor("BF16", (2, 12), seed=6)
    fifth["model.norm"] = ("F32", (12,), b"\x00\x00\x80\x3f" * 12)
    return {1: first, 2: second, 3: second, 4: fourth, 5: fifth}


def moved(state: State, seed: int) -> State:
    weights = (name for name in state if name.endswith("weight"))
    return state | {name: changed(state[name], 0.05, seed) for name in weights}


# The steps of a chain whose blocks are by classes.

TRAINED = {"F8_E4M3": 6000, "F8_E5M2": 6000, "F16": 2048, "BF16": 8192, "F32": 1500, "F64": 900}
"""Elements of the tensors that are moved as weights are, by dtype."""


def class_steps() -> dict[int, State]:
    """Three steps; the third also removes and adds, and moves most of one tensor's elements."""
    first = {f"trained.{dtype}": weights(dtype, count) for dtype, count in TRAINED.items()}
    first["rows"] = weights("F8_E4M3", 24 * 1024)
    first["integers"] = random_tensor("I16", (300,), seed=9)
    first["removed"] = random_tensor("BF16", (7,), seed=10)
    second = class_step(first, 2, far=0)
    third = class_step(second, 3, far=5)
    del third["removed"]
    third["added"] = random_tensor("F32", (5,), seed=11)
    return {1: first, 2: second, 3: third}


def class_step(state: State, seed: int, far: int) -> State:
    after = {
        name: trained(spec, seed, far) if name.startswith("trained") else spec
        for name, spec in state.items()
    }
    dtype, shape, data = state["rows"]
    begin, end = 3000 * seed, 3000 * seed + 500  # the rest is silent
    _, _, row = trained((dtype, shape, data[begin:end]), seed, far)
    after["rows"] = (dtype, shape, data[:begin] + row + data[end:])
    after["integers"] = changed(state["integers"], 0.1, seed)
    return after


def weights(dtype: str, count: int) -> Spec:
    """Elements whose exponents are spread about the middle one, as those of weights are."""
    random, mantissa = Random(count), MANTISSA[dtype]
    width = BITS[dtype] // 8
    middle = (1 << (BITS[dtype] - 2 - mantissa)) - 2
    data = b""
    for _ in range(count):
        exponent = middle - min(12 - random.getrandbits(12).bit_length(), 5)
        sign = random.getrandbits(1) << (8 * width - 1)
        bits = sign | exponent << mantissa | random.getrandbits(mantissa)
        data += bits.to_bytes(width, "little")
    return dtype, (count,), data


def trained(spec: Spec, seed: int, far: int) -> Spec:
    """Move elements the more often the smaller they are: most of the smallest; some by ``far``."""
    dtype, shape, data = spec
    random, mantissa = Random(seed), MANTISSA[dtype]
    bits = np.frombuffer(data, f"<u{BITS[dtype] // 8}").copy()
    exponents = (bits >> mantissa).astype(np.int64) & ((1 << (BITS[dtype] - 1 - mantissa)) - 1)
    highest = int(exponents.max())
    for at, exponent in enumerate(exponents.tolist()):
        if random.random() < 0.9 / 3 ** (exponent - highest + 5):
            units = 1 + (random.randrange(far) if far and random.random() < 0.2 else 0)
            bits[at] = (int(bits[at]) + random.choice((1, -1)) * units) % (1 << BITS[dtype])
    return dtype, shape, bits.tobytes()


# What our code writes.


def make_pair(out: Path) -> None:
    for name, state in (("base", base()), ("result", result())):
        write_safetensors(out / f"{name}.safetensors", state, {"format": "pt"})
    for encoding in ENCODINGS:
        make_delta(out, "result", encoding, out / f"{encoding}.safetensors")
    make_delta(out, "base", "raw", out / "empty.safetensors")


def make_delta(out: Path, to: str, encoding: str, file: Path) -> None:
    with (
        open_checkpoint(out / "base.safetensors") as before,
        open_checkpoint(out / f"{to}.safetensors") as after,
    ):
        diff(before, after, file, encoding=encoding)


def make_chain(out: Path) -> None:
    """Anchors at 1 and 4, with two shards and other files; a delta of every encoding."""
    bucket = empty_bucket(out / "chain")
    encodings = {1: "raw", 2: "gap_delta", 3: "raw", 4: "ulp", 5: "raw"}
    for step, state in steps().items():
        with tempfile.TemporaryDirectory() as scratch:
            source = write_hf_directory(Path(scratch), state, shards=2, aux=AUX)
            push(source, bucket, step=step, anchor_every=4, encoding=encodings[step])


def make_single(out: Path) -> None:
    """An anchor of one file and a delta, at steps of seven and more digits."""
    bucket = empty_bucket(out / "single")
    for step, state in ((999999, steps()[1]), (1000000, steps()[2])):
        with tempfile.TemporaryDirectory() as scratch:
            source = write_safetensors(Path(scratch) / "model.safetensors", state)
            push(source, bucket, step=step, anchor_every=0, encoding="gap_delta")


def make_classes(out: Path) -> None:
    """An anchor of one file and two deltas in ulp_ctx."""
    bucket = empty_bucket(out / "classes")
    for step, state in class_steps().items():
        with tempfile.TemporaryDirectory() as scratch:
            source = write_safetensors(Path(scratch) / "model.safetensors", state)
            push(source, bucket, step=step, anchor_every=0, encoding="ulp_ctx")


PARTS = {2: ("gap_delta", 2), 3: ("raw", 2), 4: ("raw", 3), 5: ("gap_delta", 7)}
"""By step: the encoding of the delta, and its files. There are fewer tensors than seven."""


def make_parts(out: Path) -> None:
    """The steps of ``chain``, on an anchor of one file."""
    bucket = empty_bucket(out / "parts")
    with tempfile.TemporaryDirectory() as scratch:
        push(write_safetensors(Path(scratch) / "model.safetensors", steps()[1]), bucket, step=1)
    for step, (encoding, count) in PARTS.items():
        before, after = steps()[step - 1], steps()[step]
        place = out / "parts" / delta_directory(step)
        write_parts(place, before, after, count=count, step=step, encoding=encoding)


def empty_bucket(path: Path):
    path.mkdir()
    return open_bucket(str(path))


# What TRL writes, written without our code.


def trl_steps() -> dict[int, State]:
    """Two deltas on an anchor, bf16 alone, as it is there."""
    first = {
        "embed.weight": random_tensor("BF16", (16, 12), seed=1),
        "lm_head.weight": random_tensor("BF16", (16, 12), seed=2),
        "norm.weight": random_tensor("BF16", (12,), seed=3),
    }
    second = first | {"embed.weight": changed(first["embed.weight"], 0.03, seed=2)}
    third = {name: changed(spec, 0.05, seed=3) for name, spec in second.items()}
    return {1: first, 2: second, 3: third}


def make_trl_1(out: Path) -> None:
    chain = trl_steps()
    metadata = trl_metadata(1, "False", chain[1], {}) | {"changed_params": "[]"}
    write_safetensors(out / "trl-1/anchors/step_000001.safetensors", chain[1], metadata)
    for step in (2, 3):
        changes = changes_between(chain[step - 1], chain[step])
        parts: State = {}
        for name, indices in changes.items():
            parts[f"{name}.indices"] = ("I32", indices.shape, indices.astype("<i4").tobytes())
            parts[f"{name}.values"] = values_at(chain[step][name], indices)
        metadata = trl_metadata(step, "True", chain[step], changes) | {
            "prev_model_version": str(step - 1),
            "anchor_step": "1",
            "base_model_id": "",
            "checksum_sha256": "",
            "changed_params": json.dumps(list(changes)),
        }
        write_safetensors(out / f"trl-1/deltas/step_{step:06d}.safetensors", parts, metadata)


def make_trl_2(out: Path) -> None:
    """One delta in raw, one in gap_delta, in which one tensor has gaps of 32 bits."""
    chain = trl_steps()
    metadata = trl_metadata(1, "False", chain[1], {}) | {"encoding": "gap_delta"}
    write_safetensors(out / "trl-2/anchors/step_000001.safetensors", chain[1], metadata)
    for step, encoding in ((2, "raw"), (3, "gap_delta")):
        changes = changes_between(chain[step - 1], chain[step])
        parts: State = {}
        for name, indices in changes.items():
            stored, dtype, numpy = indices, "I32", "<i4"
            if encoding == "gap_delta":
                stored = np.diff(indices, prepend=-1) - 1
                dtype, numpy = ("U32", "<u4") if name == "lm_head.weight" else ("U16", "<u2")
            parts[f"{name}.val"] = values_at(chain[step][name], indices)
            parts[f"{name}.idx"] = (dtype, indices.shape, stored.astype(numpy).tobytes())
        metadata = trl_metadata(step, "True", chain[step], changes) | {"encoding": encoding}
        write_safetensors(out / f"trl-2/deltas/step_{step:06d}.safetensors", parts, metadata)


def changes_between(before: State, after: State) -> dict[str, np.ndarray]:
    found = {}
    for name, (_, _, data) in after.items():
        old, new = (np.frombuffer(bits, "<u2") for bits in (before[name][2], data))
        if (old != new).any():
            found[name] = np.flatnonzero(old != new)
    return found


def values_at(spec: Spec, indices: np.ndarray) -> Spec:
    return "BF16", indices.shape, np.frombuffer(spec[2], "<u2")[indices].tobytes()


def trl_metadata(
    step: int, sparse: str, state: State, changes: Mapping[str, np.ndarray]
) -> dict[str, str]:
    total = sum(len(data) // 2 for _, _, data in state.values())
    touched = sum(map(len, changes.values()))
    return {
        "format": "sparse_weight_patch",
        "version": "1",
        "sparse": sparse,
        "model_version": str(step),
        "num_changed_params": str(len(changes)),
        "total_changed_elements": str(touched),
        "total_elements": str(total),
        "sparsity": str(1 - touched / total),
    }


# What is expected.


def expected() -> dict[str, object]:
    """For every file and step its state, and the digest of every tensor."""
    chain = steps()
    chains = {
        "chain": chain,
        "single": {999999: chain[1], 1000000: chain[2]},
        "trl-1": trl_steps(),
        "trl-2": trl_steps(),
    }
    return {
        "base": described(base()),
        "result": described(result()),
        "chains": {name: described_steps(states) for name, states in chains.items()},
    }


def described_steps(states: Mapping[int, State]) -> dict[str, object]:
    return {str(step): described(state) for step, state in states.items()}


def described(state: State) -> dict[str, object]:
    tensors = {
        name: {"dtype": dtype, "shape": list(shape), "digest": blake3(data).hexdigest()}
        for name, (dtype, shape, data) in sorted(state.items())
    }
    return {"state": state_digest(state), "tensors": tensors}


@contextmanager
def own_cache() -> Iterator[None]:
    """Pushes keep the tip in a cache that nobody else looks into."""
    before = os.environ.get("DELTACTL_CACHE")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["DELTACTL_CACHE"] = scratch
        try:
            yield
        finally:
            del os.environ["DELTACTL_CACHE"]
            if before is not None:
                os.environ["DELTACTL_CACHE"] = before


def make(out: Path) -> None:
    """Make all golden files in a directory that has none."""
    with own_cache():
        make_pair(out)
        make_chain(out)
        make_single(out)
        make_classes(out)
        make_parts(out)
    make_trl_1(out)
    make_trl_2(out)
    write_json(out / "expected.json", expected())
    chains = {"chains": {"classes": described_steps(class_steps())}}
    write_json(out / "expected_classes.json", chains)
    chains = {"chains": {"parts": described_steps(steps())}}
    write_json(out / "expected_parts.json", chains)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    """Replace the golden files by new ones."""
    with tempfile.TemporaryDirectory() as scratch:
        make(Path(scratch))
        for path in GOLDEN.iterdir():
            if path.is_dir() and path.name != "__pycache__":
                shutil.rmtree(path)
        shutil.copytree(scratch, GOLDEN, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
