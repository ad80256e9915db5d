"""What a PyTorch file may make of memory, before torch makes it.

Its unpickler runs no code, but builds whatever a pickle spells: an empty list a byte, or a gigabyte
of zeros in twenty. So the opcodes are counted first, without building anything; records that are
compressed, as torch never writes them, are not opened at all.
"""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path
from typing import IO

from deltactl.core.errors import Malformed, Unsupported
from deltactl.files.untrusted import open_regular

_ALLOWANCE = 1 << 20  # opcodes; a tensor's take about fifty
_BYTES_FOR_ONE = 8  # of the file, for each opcode beyond
_PICKLES = 5  # that a file older than torch 1.6 begins with
_MAGIC = bytes.fromhex("8a0a6cfc9c46f9206aa850192e")  # the first of them, after its protocol


def check_torch(path: Path) -> None:
    """Raise Malformed or Unsupported for a file that would take far more memory than its size."""
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        start = file.read(32)
        file.seek(0)
        limit = _ALLOWANCE + size // _BYTES_FOR_ONE
        if start[:4] == b"PK\x03\x04":
            _check_zip(file, path, limit)
        elif start[:1] == b"\x80" and _MAGIC not in start:
            raise Malformed("not a PyTorch file", file=path, hint="copy or download the file again")
        elif start[:1] == b"\x80":
            for _ in range(_PICKLES):
                limit = _check_pickle(file, path, limit)


def _check_zip(file: IO[bytes], path: Path, limit: int) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                return  # of TorchScript, which torch refuses by its name
            for record in archive.infolist():
                if record.compress_type != zipfile.ZIP_STORED:
                    what = "a record of the file is compressed, as torch writes none"
                    raise Unsupported(what, file=path, found=ascii(record.filename)[:200])
                if record.filename.endswith(".pkl"):
                    with archive.open(record) as pickle:
                        _check_pickle(pickle, path, limit)
    except (zipfile.BadZipFile, NotImplementedError, OSError, EOFError, RuntimeError):
        return  # torch says what is wrong with it


def _check_pickle(stream: IO[bytes], path: Path, limit: int) -> int:
    """How many opcodes are left of ``limit`` after the next pickle."""
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            limit -= 1
            if limit < 0:
                what = "the file's pickle holds far more objects than a file of this size has"
                raise Malformed(what, file=path)
            if opcode.name == "GLOBAL" and argument == "builtins bytearray":
                what = "the file holds more than tensors"
                raise Unsupported(what, file=path, found="builtins.bytearray")
    except (ValueError, MemoryError, OverflowError):
        pass  # torch says what is wrong with it
    return limit
