"""Other ways to store a step, where they are installed: each encodes and decodes the same files."""

from __future__ import annotations

import filecmp
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import zstandard

from deltactl.bench.timing import Timed
from deltactl.core.threads import cores


@dataclass(frozen=True, slots=True)
class Peer:
    """``encode(a, b, coded)`` and ``decode(a, coded, back)`` are given and write files.

    ``needs`` is the program, or the Python module, without which it cannot run. ``decode`` is None
    where only the making of a delta is compared.
    """

    name: str
    needs: str
    encode: Callable[[Path, Path, Path], object]
    decode: Callable[[Path, Path, Path], object] | None

    @property
    def installed(self) -> bool:
        return shutil.which(self.needs) is not None or find_spec(self.needs) is not None

    def trial(self, a: Path, b: Path, coded: Path, back: Path) -> str | None:
        """Encode and decode once; returns what is wrong if that does not give ``b`` again."""
        if not self.installed:
            return NOT_INSTALLED
        try:
            self.encode(a, b, coded)
            if self.decode is not None:
                self.decode(a, coded, back)
        except subprocess.CalledProcessError as error:
            return f"failed: {error.stderr.decode(errors='replace').strip()}"
        except Exception as error:  # whatever another's code may raise, the rest goes on
            return f"failed: {type(error).__name__}: {error}"
        same = self.decode is None or filecmp.cmp(b, back, shallow=False)
        return None if same else "failed: what it decodes is not what it was given"


NOT_INSTALLED = "not installed"


def _trl(a: Path, b: Path, coded: Path) -> None:
    """TRL's first dialect: load both, one mask over each whole tensor, nonzero, int32 and values.

    Proves nothing: no digest of base or result is made.
    """
    import torch
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(cores())
    old, new = load_file(a), load_file(b)
    tensors = {}
    for name, tensor in new.items():
        flat = tensor.view(-1)
        index = (flat != old[name].view(-1)).nonzero(as_tuple=True)[0]
        if index.numel():
            tensors[f"{name}.indices"] = index.to(torch.int32)
            tensors[f"{name}.values"] = flat[index]
    save_file(tensors, coded)


def _run(*words: str | Path) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def _zstd_patch(a: Path, b: Path, coded: Path) -> None:
    _run("zstd", "-3", "-T0", "--long=27", "-qf", f"--patch-from={a}", b, "-o", coded)


def _zstd_unpatch(a: Path, coded: Path, back: Path) -> None:
    _run("zstd", "-d", "--long=27", "-qf", f"--patch-from={a}", coded, "-o", back)


def _xdelta(a: Path, b: Path, coded: Path) -> None:
    _run("xdelta3", "-3", "-e", "-f", "-s", a, b, coded)


def _unxdelta(a: Path, coded: Path, back: Path) -> None:
    _run("xdelta3", "-d", "-f", "-s", a, coded, back)


def _zstd(_: Path, b: Path, coded: Path) -> None:
    coded.write_bytes(zstandard.ZstdCompressor(level=3, threads=-1).compress(b.read_bytes()))


def _unzstd(_: Path, coded: Path, back: Path) -> None:
    back.write_bytes(zstandard.ZstdDecompressor().decompress(coded.read_bytes()))


def _zipnn(_: Path, b: Path, coded: Path) -> None:
    coded.write_bytes(_codec().compress(bytearray(b.read_bytes())))


def _unzipnn(_: Path, coded: Path, back: Path) -> None:
    back.write_bytes(_codec().decompress(coded.read_bytes()))


def _zipnn_delta(a: Path, b: Path, coded: Path) -> None:
    codec, base = _codec(delta_compressed_type="byte"), bytearray(a.read_bytes())
    coded.write_bytes(codec.compress(bytearray(b.read_bytes()), delta_second_data=base))


def _unzipnn_delta(a: Path, coded: Path, back: Path) -> None:
    codec, base = _codec(delta_compressed_type="byte"), bytearray(a.read_bytes())
    back.write_bytes(codec.decompress(coded.read_bytes(), delta_second_data=base))


def _codec(**options: str) -> Any:
    from zipnn import ZipNN

    return ZipNN(bytearray_dtype="bfloat16", threads=cores(), **options)


TRL = Peer("TRL's way (torch)", "torch", _trl, None)

PEERS = (
    Peer("zstd -3 --patch-from", "zstd", _zstd_patch, _zstd_unpatch),
    Peer("xdelta3 -3", "xdelta3", _xdelta, _unxdelta),
    Peer("ZipNN, delta", "zipnn", _zipnn_delta, _unzipnn_delta),
    Peer("ZipNN of B alone", "zipnn", _zipnn, _unzipnn),
    Peer("zstd -3 of B alone", "zstandard", _zstd, _unzstd),
)
"""Those that take any file, and so can be given a sample."""


@dataclass(frozen=True, slots=True)
class Files:
    """What a peer is given: two files, one step apart, and how many elements change."""

    a: Path
    b: Path
    changed_elements: int
    is_sample: bool


@dataclass(frozen=True, slots=True)
class PeerRow:
    """What a peer makes of ``files``: bytes, and seconds. ``problem``: why there is nothing, else
    None; ``nbytes``: of file ``b``."""

    name: str
    files: Files
    nbytes: int
    problem: str | None
    coded_bytes: int | None
    encode: float | None
    decode: float | None


class MeasuredPeer:
    """A peer on two files; tried once when it is made."""

    def __init__(self, peer: Peer, files: Files, scratch: Path) -> None:
        self._peer, self._files = peer, files
        self._coded, self._back = scratch / "peer", scratch / "back"
        self._problem = peer.trial(files.a, files.b, self._coded, self._back)
        self._coded_bytes = None if self._problem else self._coded.stat().st_size

    def works(self) -> dict[str, Timed]:
        """Encode and decode, if it works here."""
        if self._problem is not None:
            return {}
        name, peer, files = self._peer.name, self._peer, self._files
        works = {f"{name} encode": Timed(partial(peer.encode, files.a, files.b, self._coded))}
        if peer.decode is not None:
            works[f"{name} decode"] = Timed(partial(peer.decode, files.a, self._coded, self._back))
        return works

    def row(self, seconds: Mapping[str, float]) -> PeerRow:
        """What was measured, given the works' seconds by name."""
        return PeerRow(
            name=self._peer.name,
            files=self._files,
            nbytes=self._files.b.stat().st_size,
            problem=self._problem,
            coded_bytes=self._coded_bytes,
            encode=seconds.get(f"{self._peer.name} encode"),
            decode=seconds.get(f"{self._peer.name} decode"),
        )
