"""A reader written from man/deltactl-format.5 alone: it imports nothing of deltactl.

The part between the two marks is the page's example, letter for letter. What comes after it,
anchors and chains, is written from the page's words.
"""

# The page's example begins.
import io
import json
import pathlib

import numpy as np
import zstandard
from blake3 import blake3

BLOCK = 1 << 23
BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
    "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32,
    "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
MANTISSA = {
    "F8_E5M2": 2, "F8_E4M3": 3, "F8_E5M2FNUZ": 2, "F8_E4M3FNUZ": 3,
    "F16": 10, "BF16": 7, "F32": 23, "F64": 52,
}  # fmt: skip


def check(good, what):
    if not good:
        raise ValueError(what)


def hexdigest(data):
    return blake3(data).hexdigest()


def u64(number):
    return number.to_bytes(8, "little")


def width(dtype):
    return max(BITS[dtype] // 8, 1)


def state_digest(state):
    """state: {name: (dtype, shape, bytes)}"""
    records = b""
    for name in sorted(state, key=str.encode):
        dtype, shape, data = state[name]
        for text in (name.encode(), dtype.encode()):
            records += u64(len(text)) + text
        records += u64(len(shape)) + b"".join(map(u64, shape))
        records += blake3(data).digest()
    return hexdigest(records)


def touch_sum(positions, bits):
    z = positions.astype("u8") * np.uint64(0x9E3779B97F4A7C15)
    z += bits.astype("u8")
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return f"{int(z.sum(dtype='u8')):016x}"


def check_header(raw, metadata):
    """raw: all bytes before the payload; of an index, the file"""
    digest = metadata["deltactl.header_digest"]
    place = f'"deltactl.header_digest":"{digest}"'.encode()
    zeros = f'"deltactl.header_digest":"{64 * "0"}"'.encode()
    check(len(digest) == 64 and raw.count(place) == 1, "no header digest")
    check(hexdigest(raw.replace(place, zeros)) == digest, "header")
    check(metadata["deltactl.format"] == "1", "a later format")


def read_container(path):
    """metadata, {name: (dtype, shape, bytes)}, header, payload"""
    raw = pathlib.Path(path).read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header, payload = raw[:start], raw[start:]
    check(len(raw) >= max(start, 8), "truncated")
    entries = json.loads(header[8:])
    metadata = entries.pop("__metadata__", {})
    tensors, at = {}, 0
    for name in sorted(entries, key=lambda n: entries[n]["data_offsets"]):
        dtype, shape = entries[name]["dtype"], entries[name]["shape"]
        begin, end = entries[name]["data_offsets"]
        bits = BITS[dtype]
        for n in shape:
            bits *= n
        check(begin == at and 8 * (end - begin) == bits, "offsets")
        tensors[name] = (dtype, tuple(shape), payload[begin:end])
        at = end
    check(at == len(payload), "truncated, or longer than its tensors")
    return metadata, tensors, header, payload


def absolute(row, parts, encoding):
    """raw and gap_delta: positions and new bits"""
    dtype, _, indices = parts[row["name"] + ".idx"]
    numpy = {"I32": "<i4", "I64": "<i8"}
    if encoding == "gap_delta":
        numpy = {"U16": "<u2", "U32": "<u4", "U64": "<u8"}
    positions = np.frombuffer(indices, numpy[dtype]).astype("i8")
    if encoding == "gap_delta":
        positions = np.cumsum(positions + 1) - 1
    dtype, _, values = parts[row["name"] + ".val"]
    packed = BITS[row["dtype"]] < 8
    check(dtype == ("U8" if packed else row["dtype"]), "dtype")
    return positions, np.frombuffer(values, f"<u{width(row['dtype'])}")


def take(block, count):
    """the next bytes of a block"""
    data = block.read(count)
    check(len(data) == count, "a block ends early")
    return data


def flags(block, count):
    """the next bits of a block, the lowest of each byte first"""
    data = np.frombuffer(take(block, -(-count // 8)), "u1")
    bits = np.unpackbits(data, bitorder="little")
    check(not bits[count:].any(), "padding")
    return bits[:count]


def integers(block, count, depth=0):
    """the next stream of a block, of count integers"""
    if count == 0:
        return np.zeros(0, "u8")
    (k,) = take(block, 1)
    check(k < 64 and depth < 16, "a hostile stream")
    values = np.zeros(count, "u8")
    for bit in range(k):
        values |= flags(block, count).astype("u8") << np.uint64(bit)
    high = take(block, int.from_bytes(take(block, 4), "little"))
    if len(high) != count:
        check(zstandard.frame_content_size(high) == count, "zstd frame")
        high = zstandard.decompress(high)
    high = np.frombuffer(high, "u1")
    values += high.astype("u8") << np.uint64(k)
    more = np.flatnonzero(high == 255)
    values[more] += integers(block, len(more), depth + 1) << np.uint64(k)
    return values


def rising(gaps, length):
    """the positions, below length, that have these gaps"""
    check((gaps < length).all(), "out of range")
    positions = np.cumsum(gaps.astype("i8") + 1) - 1
    check((positions < length).all(), "out of range")
    return positions


def by_gaps(block, count, base, dtype):
    """a block of ulp: positions, which steps are down, and lengths"""
    check(count <= len(base), "more changes than elements")
    positions = rising(integers(block, count), len(base))
    down = flags(block, count)
    longer = int.from_bytes(take(block, 4), "little")
    check(longer <= count, "more long steps than steps")
    longer = rising(integers(block, longer), count)
    steps = np.ones(count, "u8")
    steps[longer] += integers(block, len(longer)) + np.uint64(1)
    return positions, down, steps


def number(block):
    """the next LEB128 of a block"""
    value = 0
    for shift in range(0, 63, 7):
        (byte,) = take(block, 1)
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise ValueError("a number of more than 9 bytes")


def golomb(block, count, bound):
    """the next Golomb stream of a block: count integers below bound"""
    if count == 0:
        return np.zeros(0, "u8")
    m, total = number(block), number(block)
    check(0 < m <= 2 * bound and total <= 2 * count, "a hostile stream")
    ones = np.flatnonzero(flags(block, count + total))
    check(len(ones) == count and ones[-1] == count + total - 1, "unary")
    quotients = np.diff(ones, prepend=-1) - 1
    check(int(quotients.max()) * m < bound, "out of range")
    values = quotients.astype("u8") * np.uint64(m)
    b = (m - 1).bit_length()
    if b:
        bits = flags(block, count * (b - 1)).reshape(count, b - 1)
        rest = np.zeros(count, "u8")
        for i in range(b - 1):
            rest |= bits[:, i].astype("u8") << np.uint64(i)
        cut = np.uint64((1 << b) - m)
        long = np.flatnonzero(rest >= cut)
        rest[long] += rest[long] + flags(block, len(long)) - cut
        values += rest
    check((values < bound).all(), "out of range")
    return values


def members(block, count, total):
    """the next set of a block: count rising integers below total"""
    check(0 <= count <= total, "a set of more than all")
    if 2 * count <= total:
        return rising(golomb(block, count, total + 1), total)
    others = rising(golomb(block, total - count, total + 1), total)
    return np.setdiff1d(np.arange(total), others)


def by_classes(block, form, count, base, dtype):
    """forms 1 and 2 of ulp_ctx, as by_gaps"""
    check(form in (1, 2) and dtype in MANTISSA, "form")
    active = np.ones(-(-len(base) // 1024), bool)
    if form == 2:
        active[members(block, number(block), len(active))] = False
    active = np.repeat(active, 1024)[: len(base)]
    borders = number(block)
    check(borders < 256, "too many classes")
    borders = [number(block) for _ in range(borders)]
    bits = BITS[dtype] - 1 - MANTISSA[dtype]
    check((np.diff([0, *borders, 1 << bits]) > 0).all(), "borders")
    exponents = base >> MANTISSA[dtype] & ((1 << bits) - 1)
    found = np.searchsorted(borders, exponents, side="right")
    classes = range(len(borders) + 1)
    classes = [np.flatnonzero((found == k) & active) for k in classes]
    counts = []
    for of_class in classes[:-1]:
        check(number(block) == len(of_class), "another base")
        counts.append(number(block))
    counts.append(count - sum(counts))
    check(counts[-1] >= 0, "more changes than there are")
    down = flags(block, count)
    steps = np.ones(count, "u8")
    at = 0
    for n in counts:
        if n:
            longer = members(block, number(block), n)
            bound = (1 << (BITS[dtype] - 1)) - 1
            lengths = golomb(block, len(longer), bound)
            steps[at + longer] += lengths + np.uint64(1)
        at += n
    sets = zip(counts, classes, strict=True)
    positions = [c[members(block, n, len(c))] for n, c in sets]
    positions = np.concatenate(positions)
    order = np.argsort(positions)
    return positions[order], down[order], steps[order]


def ordered(bits, dtype):
    """bits to numbers that rise with the value"""
    if dtype not in MANTISSA:
        return bits
    top = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return np.where(bits & top, ~bits, bits | top)


def unordered(order, dtype):
    if dtype not in MANTISSA:
        return order
    top = order.dtype.type(1 << (8 * order.itemsize - 1))
    return np.where(order & top, order ^ top, ~order)


def ulp(row, parts, old, encoding):
    """ulp and ulp_ctx: positions and new bits"""
    dtype, _, data = parts[row["name"] + "." + encoding]
    blocks = -(-len(old) // BLOCK)
    check(dtype == "U8" and len(data) >= 8 * blocks, "directory")
    directory = np.frombuffer(data, "<u4", 2 * blocks).tolist()
    end, dtype = 8 * blocks, row["dtype"]
    positions, new = [], []
    for place in range(blocks):
        count, size = directory[2 * place : 2 * place + 2]
        base = old[place * BLOCK : (place + 1) * BLOCK]
        block, end = io.BytesIO(data[end : end + size]), end + size
        if count:
            form = take(block, 1)[0] if encoding == "ulp_ctx" else 0
            if form:
                found = by_classes(block, form, count, base, dtype)
            else:
                found = by_gaps(block, count, base, dtype)
            found, down, steps = found
            check((steps <= 1 << (8 * old.itemsize - 1)).all(), "step")
            steps = np.where(down, 0 - steps, steps).astype(old.dtype)
            positions.append(found + place * BLOCK)
            new.append(unordered(ordered(base[found], dtype) + steps, dtype))
        check(not block.read(), "bytes after the last stream of a block")
    check(end == len(data), "the blocks do not fill the entry")
    return np.concatenate(positions), np.concatenate(new)


def sparse(row, parts, encoding, data):
    """the bytes of a sparse tensor after the delta"""
    old = np.frombuffer(data, f"<u{width(row['dtype'])}")
    if encoding in ("ulp", "ulp_ctx"):
        positions, new = ulp(row, parts, old, encoding)
    else:
        check(encoding in ("raw", "gap_delta"), "an unknown encoding")
        positions, new = absolute(row, parts, encoding)
    check(len(positions) == len(new) == row["changed"], "count")
    check(positions[0] >= 0 and (np.diff(positions) > 0).all(), "order")
    check(positions[-1] < len(old), "out of range")
    check(touch_sum(positions, old[positions]) == row["old"], "another base")
    check(touch_sum(positions, new) == row["new"], "new bits")
    result = old.copy()
    result[positions] = new
    return result.tobytes()


def read_delta(path):
    """metadata and entries of a delta, a file or a directory"""
    if not path.is_dir():
        metadata, entries, header, payload = read_container(path)
        check_header(header, metadata)
        payload_digest = metadata["deltactl.payload_digest"]
        check(hexdigest(payload) == payload_digest, "payload")
        return metadata, entries
    header = (path / "delta.safetensors.index.json").read_bytes()
    index = json.loads(header)
    metadata, homes = index["metadata"], index["weight_map"]
    check_header(header, metadata)
    entries, sizes = {}, {}
    for row in json.loads(metadata["deltactl.files"]):
        plain = pathlib.PurePath(row["name"]).parts == (row["name"],)
        check(plain and row["name"] != "..", "a hostile name")
        _, part, header, payload = read_container(path / row["name"])
        check(len(header) + len(payload) == row["bytes"], "size")
        check(hexdigest(header) == row["header"], "a part's header")
        check(hexdigest(payload) == row["payload"], "payload")
        for key, entry in part.items():
            name = key.rpartition(".")[0]
            check(homes.get(name) == row["name"], "weight_map")
            sizes[name] = sizes.get(name, 0) + len(entry[2])
        entries |= part
    table = json.loads(metadata["deltactl.tensors"])
    expected = {r["name"]: r["bytes"] for r in table if "bytes" in r}
    check(sizes == expected and sizes.keys() == homes.keys(), "bytes")
    return metadata, entries


def apply_delta(path, base):
    """The state that a delta leads to from the state base."""
    metadata, parts = read_delta(pathlib.Path(path))
    check(metadata["sparse"] == "True", "no delta")
    base_state = metadata["deltactl.base_state"]
    result_state = metadata["deltactl.result_state"]
    check(state_digest(base) == base_state, "another base")
    result, used = dict(base), set()
    for row in json.loads(metadata["deltactl.tensors"]):
        name, kind, shape = row["name"], row["kind"], tuple(row["shape"])
        before = row.get("base", row)
        before = (before["dtype"], tuple(before["shape"]))
        found = base[name][:2] if name in base else None
        check(found == (None if kind == "added" else before), "another base")
        if kind == "removed":
            del result[name]
            continue
        if kind == "sparse":
            data = sparse(row, parts, metadata["encoding"], base[name][2])
            used |= {name + s for s in (".idx", ".val", ".ulp", ".ulp_ctx")}
        else:
            check(kind in ("dense", "added"), "an unknown kind")
            *described, data = parts[name + ".dense"]
            check(described == [row["dtype"], shape], "dtype or shape")
            used.add(name + ".dense")
        check(hexdigest(data) == row["digest"], "the new tensor")
        result[name] = (row["dtype"], shape, data)
    check(parts.keys() <= used, "an entry that the table does not name")
    check(state_digest(result) == result_state, "another result")
    return result


# The page's example ends.


INDEX = "model.safetensors.index.json"
DELTA_INDEX = "delta.safetensors.index.json"


def read_anchor(path):
    """The state of an anchor, a file or a directory."""
    if not path.is_dir():
        metadata, state, header, _ = read_container(path)
        check_header(header, metadata)
    else:
        header = (path / INDEX).read_bytes()
        index = json.loads(header)
        metadata = index["metadata"]
        check_header(header, metadata)
        state, shards = {}, {}
        for row in json.loads(metadata["deltactl.files"]):
            file = path / row["name"]
            check(".." not in file.parts and not row["name"].startswith("/"), "a hostile path")
            check(file.stat().st_size == row["bytes"], "size")
            if "digest" in row:
                check(hexdigest(file.read_bytes()) == row["digest"], "a file")
                continue
            _, tensors, shard_header, _ = read_container(file)
            check(hexdigest(shard_header) == row["header"], "a shard's header")
            check(not state.keys() & tensors.keys(), "a tensor in two shards")
            state |= tensors
            shards |= dict.fromkeys(tensors, row["name"])
        check(shards == index["weight_map"], "weight_map")
        check(metadata["total_size"] == sum(len(data) for _, _, data in state.values()), "size")
    check(metadata["sparse"] == "False", "no anchor")
    table = json.loads(metadata["deltactl.tensors"])
    check([row["name"] for row in table] == sorted(state, key=str.encode), "table")
    for row in table:
        dtype, shape, data = state[row["name"]]
        check((row["dtype"], tuple(row["shape"])) == (dtype, shape), "dtype or shape")
        check(hexdigest(data) == row["digest"], "a tensor")
    check(state_digest(state) == metadata["deltactl.result_state"], "state")
    return state


def read_chain(bucket):
    """Every step's state, {step: state}, replayed through every link."""
    states = {}
    deltas = {int(path.stem[5:]): path for path in bucket.glob("deltas/step_*")}
    deltas = {n: d for n, d in deltas.items() if not d.is_dir() or (d / DELTA_INDEX).exists()}
    anchors = {int(path.stem[5:]): path for path in bucket.glob("anchors/step_*")}
    for step in sorted(deltas.keys() | anchors.keys()):
        if step in deltas:
            metadata, _ = read_delta(deltas[step])
            check(metadata["model_version"] == str(step), "step")
            suffix = "" if deltas[step].is_dir() else ".safetensors"
            check(deltas[step].name == f"step_{step:06d}{suffix}", "name")
            states[step] = apply_delta(deltas[step], states[int(metadata["prev_model_version"])])
        if step in anchors:
            found = read_anchor(anchors[step])
            check(states.setdefault(step, found) == found, "the anchor is another state")
    return states
