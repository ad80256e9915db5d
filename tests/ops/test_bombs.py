"""Small files that claim much: what a refused one takes of memory, above itself and its base.

In a process of its own each, as the system counts its peak (VmHWM), against that of one which is
given a sound file of the same kind.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import zstandard

from deltactl.codec.base import BLOCK
from deltactl.codec.golomb import leb128
from deltactl.core.dtypes import nbytes_of
from tests.support.chains import make_delta
from tests.support.checkpoints import Spec, write_safetensors
from tests.support.lies import Header, rewrite, rows, set_rows

BOUND = 100_000  # kB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")

CODE = textwrap.dedent("""
    import sys
    from deltactl.cli.app import main
    try:
        main()
    except SystemExit as end:
        code = end.code
    status = open("/proc/self/status").read()
    print(code, status.split("VmHWM:")[1].split()[0])
""")


def peak(*arguments: object) -> tuple[int, int]:
    """Exit status, and kB."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert "Traceback" not in done.stderr
    code, size = done.stdout.split()[-2:]
    return int(code), int(size)


# Deltas.


def u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def level(count: int, byte: bytes) -> bytes:
    """A stream of one byte again and again, a few hundred bytes for millions."""
    frame = zstandard.ZstdCompressor().compress(byte * count)
    return b"\0" + u32(len(frame)) + frame


def nested(count: int) -> bytes:
    return level(count, b"\xff") * 15 + level(count, b"\1")


@dataclass(frozen=True)
class Bomb:
    """A block of BLOCK changes, as many times as there are blocks; ``sound``: that it is one."""

    block: bytes
    dtype: str = "BF16"
    encoding: str = "ulp"
    blocks: int = 1
    sound: bool = False
    bound: int = BOUND


DOWN = bytes(BLOCK // 8)
EVERY = level(BLOCK, b"\0") + DOWN  # each element changes
LONG = EVERY + u32(BLOCK) + level(BLOCK, b"\0") + level(BLOCK, b"\1")
LEFT = b"left over"
IN_ONE_CLASS = b"\1" + leb128(0) + DOWN  # and of the set of all of them nothing is stored
ONES = leb128(1) + leb128(0) + b"\xff" * (BLOCK // 8)
BOMBS = {
    "gaps in gaps": Bomb(nested(BLOCK)),
    "gaps without end": Bomb(level(BLOCK, b"\xff") * 40),
    "every element by one": Bomb(EVERY + u32(0) + LEFT),
    "every element by one, told at the end": Bomb(EVERY + u32(0), sound=True),
    "every element by three": Bomb(LONG + LEFT),
    "every element by three, told at the end": Bomb(LONG, sound=True),
    "by three, F32": Bomb(LONG + LEFT, "F32"),
    "by three, F64": Bomb(LONG + LEFT, "F64"),
    "longer in longer": Bomb(
        EVERY + u32(BLOCK) + level(BLOCK, b"\0") + nested(BLOCK), "F64", sound=True, bound=2 * BOUND
    ),
    # A step takes as much as an element, eight bytes.
    "by three, F64, told at the end": Bomb(LONG, "F64", sound=True, bound=2 * BOUND),
    "three blocks": Bomb(LONG, blocks=3, sound=True),
    "a class of all": Bomb(IN_ONE_CLASS + leb128(0) + LEFT, encoding="ulp_ctx"),
    "a class of all, by two": Bomb(IN_ONE_CLASS + leb128(BLOCK) + ONES + LEFT, encoding="ulp_ctx"),
    "by two, told at the end": Bomb(
        IN_ONE_CLASS + leb128(BLOCK) + ONES, encoding="ulp_ctx", sound=True
    ),
    "a class of all, F32": Bomb(IN_ONE_CLASS + leb128(BLOCK) + ONES + LEFT, "F32", "ulp_ctx"),
}


def made(path: Path, bomb: Bomb) -> tuple[Path, Path]:
    """A delta of such blocks, and the base that it names, of zeros."""
    count = bomb.blocks * BLOCK
    zeros = bytes(nbytes_of(bomb.dtype, (count,)))
    before: dict[str, Spec] = {"w": (bomb.dtype, (count,), zeros)}
    after: dict[str, Spec] = {"w": (bomb.dtype, (count,), b"\1" + zeros[1:])}
    delta = make_delta(path, before, after, encoding=bomb.encoding)
    body = (u32(BLOCK) + u32(len(bomb.block))) * bomb.blocks + bomb.block * bomb.blocks

    def change(header: Header, payload: bytearray) -> None:
        payload[:] = body
        header[f"w.{bomb.encoding}"] |= {"shape": [len(body)], "data_offsets": [0, len(body)]}
        table = rows(header)
        table[0]["changed"] = count
        set_rows(header, table)
        told = {"total_changed_elements": str(count), "sparsity": "0.0"}
        header["__metadata__"] |= told

    rewrite(delta, change)
    return delta, write_safetensors(path.with_name("base.safetensors"), before)


@pytest.mark.parametrize("case", BOMBS)
def test_a_delta_that_claims_blocks_of_changes(tmp_path: Path, case: str) -> None:
    """The first took 3.3 GB, in a file of 6 kB."""
    bomb = BOMBS[case]
    small: dict[str, Spec] = {"w": ("BF16", (4,), bytes(8))}
    sound = make_delta(tmp_path / "s.safetensors", small, {"w": ("BF16", (4,), b"\1" * 8)})
    delta, base = made(tmp_path / "bomb.safetensors", bomb)
    _, least = peak("verify", sound)
    for arguments, inputs, refused in (
        (("verify", delta), [delta], not bomb.sound),
        (("stats", delta), [delta], not bomb.sound),
        (("apply", delta, base, "-o", tmp_path / "out.safetensors"), [delta, base], True),
    ):
        code, size = peak(*arguments)
        assert code in ((3, 11) if refused else (0,))
        above = size - least - sum(path.stat().st_size for path in inputs) // 1000
        assert above < bomb.bound
    assert not (tmp_path / "out.safetensors").exists()


# Headers.


MILLIONS = 1_500_000
EMPTY = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
SOUND_ROW = '{"name":"%x","kind":"removed","dtype":"U8","shape":[0]}'


def members(values: Iterable[bytes]) -> bytes:
    return b"{" + b",".join(b'"%x":%b' % pair for pair in enumerate(values)) + b"}"


HEADERS: dict[str, Callable[[], bytes]] = {
    "objects": lambda: members([b"{}"] * MILLIONS),
    "entries": lambda: members([EMPTY] * 350_000),
    "entries, the last of them wrong": lambda: members([*[EMPTY] * 299_000, b"0"]),
    "keys of metadata": lambda: b'{"__metadata__":' + members([b'""'] * MILLIONS) + b"}",
    "lists in a shape": lambda: EMPTY.replace(b"[0]", b"[" + b"[]," * 5 * MILLIONS + b"0]", 1),
    "lists in lists": lambda: b'{"a":' + b"[" * 500 + b"[[]]," * 4 * MILLIONS + b"0" + b"]" * 500,
    "dimensions": lambda: members([EMPTY.replace(b"[0]", b"[" + b"1000," * 4 * MILLIONS + b"0]")]),
    "names": lambda: members([b'"' + b"x" * 5 + b'"'] * MILLIONS),
    "escapes": lambda: members([rb'"\u0061\"{["'] * MILLIONS),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_of_millions(tmp_path: Path, case: str) -> None:
    """Lists took 600 MB for 20, keys 770 MB for 23."""
    sound = write_safetensors(tmp_path / "s.safetensors", {"w": ("U8", (4,), bytes(4))})
    path = tmp_path / "bomb.safetensors"
    text = HEADERS[case]()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    _, least = peak("stats", sound, sound)
    code, size = peak("stats", path, path)
    assert code == 3
    assert size - least - len(text) // 1000 < BOUND


TABLES: dict[str, Callable[[], str]] = {
    "lists": lambda: "[" + "[]," * 5 * MILLIONS + "0]",
    "objects": lambda: "[" + "{}," * 5 * MILLIONS + "0]",
    "rows without a key": lambda: "[" + '{"name":"a"},' * MILLIONS + "0]",
    "rows of keys": lambda: "[{" + ",".join(f'"{n}":0' for n in range(MILLIONS)) + "}]",
    "shapes": lambda: "[" + SOUND_ROW.replace("[0]", "[" + "1000," * 2 * MILLIONS + "0]") + "]",
}


@pytest.mark.parametrize("case", TABLES)
def test_a_table_of_millions(tmp_path: Path, case: str) -> None:
    """Within a string of the metadata, as a delta has it; and in an index of several files."""
    small: dict[str, Spec] = {"w": ("BF16", (4,), bytes(8))}
    delta = make_delta(tmp_path / "d.safetensors", small, {"w": ("BF16", (4,), b"\1" * 8)})
    _, least = peak("verify", delta)

    def change(header: Header, payload: bytearray) -> None:
        header["__metadata__"]["deltactl.tensors"] = TABLES[case]()

    rewrite(delta, change)
    code, size = peak("verify", delta)
    assert code == 3
    assert size - least - delta.stat().st_size // 1000 < BOUND


INDICES: dict[str, Callable[[], bytes]] = {
    "lists": lambda: b'{"metadata":{},"weight_map":' + b"[" + b"[]," * 5 * MILLIONS + b"0]}",
    "keys": lambda: b'{"metadata":{},"weight_map":' + members([b'""'] * MILLIONS) + b"}",
    "objects": lambda: b'{"metadata":' + members([b"{}"] * MILLIONS) + b',"weight_map":{}}',
}


@pytest.mark.parametrize("name", ["model", "delta"])
@pytest.mark.parametrize("case", INDICES)
def test_an_index_of_millions(tmp_path: Path, case: str, name: str) -> None:
    sound = write_safetensors(tmp_path / "s.safetensors", {"w": ("U8", (4,), bytes(4))})
    index = tmp_path / "model" / f"{name}.safetensors.index.json"
    index.parent.mkdir()
    index.write_bytes(INDICES[case]())
    _, least = peak("stats", sound, sound)
    given = ("stats", sound, index.parent) if name == "model" else ("verify", index.parent)
    code, size = peak(*given)
    assert code == 3
    assert size - least - index.stat().st_size // 1000 < BOUND


# PyTorch files.

MANY = 10_000_000


def zipped(path: Path, pickled: bytes, method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")


LISTS, A_GIGABYTE = b"\x80\x02" + b"]" * MANY + b".", b"J\xff\xff\xff\x3f\x85R."
TORCH: dict[str, Callable[[Path], object]] = {
    "a list a byte": lambda path: zipped(path, LISTS),
    "the same, compressed": lambda path: zipped(path, LISTS, zipfile.ZIP_DEFLATED),
    "a gigabyte of zeros": lambda path: zipped(
        path, b"\x80\x02cbuiltins\nbytearray\n" + A_GIGABYTE
    ),
    "a dict a byte, in the older form": lambda path: path.write_bytes(b"\x80\x02" + b"}" * MANY),
    "and with its magic": lambda path: path.write_bytes(
        b"\x80\x02" + bytes.fromhex("8a0a6cfc9c46f9206aa850192e") + b"\x80\x02" + b"}" * MANY
    ),
    "a string of a terabyte": lambda path: path.write_bytes(
        b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + bytes(1000)
    ),
}


@pytest.mark.parametrize("case", TORCH)
def test_a_torch_file_that_makes_much(tmp_path: Path, case: str) -> None:
    torch = pytest.importorskip("torch")
    sound, path = tmp_path / "sound.pt", tmp_path / "bomb.pt"
    torch.save({"w": torch.zeros(4)}, sound)
    TORCH[case](path)
    _, least = peak("stats", sound, sound)
    code, size = peak("stats", path, path)
    assert code in (1, 3)
    assert size - least - path.stat().st_size // 1000 < BOUND
