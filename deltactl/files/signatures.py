"""What a file that is no checkpoint is, by its first bytes: so that an error can name it."""

from __future__ import annotations

import re
from pathlib import Path

from deltactl.core.errors import DeltactlError, Malformed, Unsupported
from deltactl.files.untrusted import open_regular

SAMPLE = 512
"""First bytes of a file that are enough to tell."""

READABLE = "*.safetensors, *.bin, *.pt, *.pth or a Hugging Face directory"

_LFS = b"version https://git-lfs"
_SAVE = "take the model's safetensors, or save it anew with save_pretrained"
_UNPACK = "unpack it, and name what is inside"

_FORMATS = (
    (0, b"GGUF", "a GGUF file of llama.cpp", _SAVE),
    (0, b"\x93NUMPY", "a NumPy array", _SAVE),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras and TensorFlow write", _SAVE),
    (4, b"TFL3", "a TensorFlow Lite file", _SAVE),
    (0, b"\x1f\x8b\x08", "a gzip archive", _UNPACK),
    (0, b"\x28\xb5\x2f\xfd", "a zstd archive", _UNPACK),
    (0, b"\xfd7zXZ\0", "an xz archive", _UNPACK),
    (0, b"BZh", "a bzip2 archive", _UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK),
)

_SUFFIXES = {
    ".onnx": "an ONNX file",
    ".msgpack": "a file of Flax's",
    ".pb": "a TensorFlow graph",
    ".tflite": "a TensorFlow Lite file",
    ".distcp": "a part of a distributed checkpoint",
    ".npz": "a NumPy archive",
}


def foreign(start: bytes, file: object) -> DeltactlError | None:
    """The error for what a file that begins with ``start`` is, where that can be told.

    Malformed for what came in the place of a file, such as a server's page. Only to be asked where
    a file is not what it should be: any bytes may begin a sound one.
    """
    if not start:
        hint = "copy or download it again, or save it again"
        return Malformed("the file is empty", file=file, hint=hint)
    if start.startswith(_LFS[: max(8, len(start))]):
        return _lfs_pointer(start, file)
    for at, magic, what, hint in _FORMATS:
        if start[at : at + len(magic)] == magic:
            return Unsupported(
                f"{what}, and no checkpoint", file=file, expected=READABLE, hint=hint
            )
    return _text(start, file)


def unknown(file: Path) -> Unsupported:
    """The error for what can only be told by its name, if at all."""
    what = _SUFFIXES.get(file.suffix)
    said = "neither a safetensors nor a PyTorch file" if what is None else f"{what}, no checkpoint"
    return Unsupported(said, file=file, expected=READABLE, hint=None if what is None else _SAVE)


def check_fetched(path: Path) -> None:
    """Raise Unsupported for a file that Git LFS left in the place of another."""
    with open_regular(path) as file:
        start = file.read(SAMPLE)
    if start.startswith(_LFS):
        raise _lfs_pointer(start, path)


def _lfs_pointer(start: bytes, file: object) -> Unsupported:
    size = re.search(rb"^size (\d{1,18})$", start, re.MULTILINE)
    there = f"-C {file.parent} " if isinstance(file, Path) else ""
    return Unsupported(
        "a Git LFS pointer, in the place of the file that was not fetched",
        file=file,
        expected=f"{int(size[1])} bytes" if size else None,
        found=f"a pointer of {len(start)} bytes" if size else None,
        hint=f"git {there}lfs pull",
    )


def _text(start: bytes, file: object) -> DeltactlError | None:
    try:
        text = start.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(start) - 3:  # else it is a letter that the sample cut
            return None
        text = start[: error.start].decode("utf-8")
    if not all(c.isprintable() or c in "\t\r\n" for c in text) or len(text) < 8:
        return None
    begin = text.strip().lower() or "?"
    if begin.startswith(("<!doct", "<html", "<?xml")):
        what = "a page of a web server, in the place of the file"
        return Malformed(what, file=file, found=_line(text), hint="download it again")
    if str(file).endswith(".index.json"):
        hint = f"name its directory: {file.parent}" if isinstance(file, Path) else None
        return Unsupported("an index, and not the weights that it names", file=file, hint=hint)
    kind = "a JSON file" if begin[0] in "{[" else "a text file"
    what = f"{kind}, in the place of weights"
    return Malformed(
        what, file=file, expected=READABLE, found=_line(text), hint=f"head -c 300 {file}"
    )


def _line(text: str) -> str:
    line = text.strip().split("\n", 1)[0].strip()
    return ascii(line[:60])
