"""PyTorch files (``torch.save``): the state dict inside, as bytes.

Loaded with ``weights_only=True``, so that no code of the file runs, and mapped where the file is of
the zip kind that torch writes since 1.6. torch is imported when a file is read, not before.
"""

from __future__ import annotations

import math
import pickle
import re
import reprlib
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deltactl.checkpoint.torch_bounds import check_torch
from deltactl.core.dtypes import OF_TORCH
from deltactl.core.errors import Malformed, Unsupported
from deltactl.files.mapped import check_mapped, release_after, watch_memory
from deltactl.files.safetensors import METADATA
from deltactl.files.untrusted import is_text, open_regular, os_errors

if TYPE_CHECKING:
    import torch

_WRAPPERS = ("state_dict", "model", "model_state_dict")
_SAVE_HINT = "torch.save(model.state_dict(), FILE)"
_COPY_ALLOWANCE = 64 << 20


class TorchTensor(NamedTuple):
    """One tensor: safetensors dtype code, shape, 1-D read-only little-endian bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


def read_torch(path: Path) -> list[TorchTensor]:
    """The tensors of a PyTorch file, in the order of its state dict.

    The state dict is the whole file, or stands under ``state_dict``, ``model`` or
    ``model_state_dict``. Plain numbers, strings and None beside the tensors (an epoch, a version)
    are left out; anything else is an error, for it might be weights. Bytes are mapped, but for the
    tensors whose elements do not lie in order and for files older than torch 1.6.

    Raises NotFound, NotAllowed, Malformed; Unsupported where torch is missing or the file holds
    what a checkpoint cannot.
    """
    size, is_mapped, document = _load(path)
    tensors = list(_tensors(_state_dict(document, path), path))
    _check_copies(tensors, size, path)
    span = _mapped_span(tensors, size) if is_mapped else None
    if span is None:
        return [_converted(name, tensor) for name, tensor in tensors]
    with os_errors(path):
        watched = watch_memory(path, span.start, len(span))
    found = [_converted(name, tensor) for name, tensor in tensors]
    check_mapped()  # some may have been copied
    release_after(watched, [t.data.base for t in found if t.data.ctypes.data in span])
    return found


def _mapped_span(tensors: Iterable[tuple[str, torch.Tensor]], size: int) -> range | None:
    """The addresses that the tensors' bytes lie at, if that can be one mapping of the file."""
    storages = (tensor.untyped_storage() for _, tensor in tensors)
    spans = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages if s.nbytes()]
    start, stop = min((s for s, _ in spans), default=0), max((s for _, s in spans), default=0)
    return range(start, stop) if 0 < stop - start <= size else None


def _load(path: Path) -> tuple[int, bool, object]:
    """Size of the file in bytes, whether it is mapped, and what is pickled in it."""
    with open_regular(path) as file:
        is_zip = file.read(4) == b"PK\x03\x04"
        size = file.seek(0, 2)
    try:
        import torch
    except ImportError:
        what = "PyTorch is needed to read this file"
        raise Unsupported(what, file=path, hint="pip install torch") from None
    check_torch(path)
    with os_errors(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
            return size, is_zip, found
        except OSError:
            raise
        except (
            Exception
        ) as error:  # the unpickler raises anything at all on bytes that are no pickle
            raise _load_error(error, path) from error


def _load_error(error: Exception, path: Path) -> Malformed | Unsupported:
    # torch's text is not passed on: it advises to load the file in the way that runs its code
    text = "".join(c if c.isprintable() or c == "\n" else "?" for c in str(error))
    if "TorchScript" in text:
        what = "a TorchScript archive, which is a program and not only weights"
        return Unsupported(what, file=path, hint=_SAVE_HINT)
    named = re.search(r"GLOBAL (\S+)", text)
    if isinstance(error, pickle.UnpicklingError) and named:
        what = "the file holds more than tensors, and loading it could run code"
        return Unsupported(what, file=path, found=named[1], hint=_SAVE_HINT)
    reason = re.search(r"WeightsUnpickler error:\s*(.*)", text)
    found = f"{type(error).__name__}: {reason[1] if reason else text.partition('. ')[0]}"
    hint = "copy or download the file again"
    what = "not a PyTorch file that can be loaded"
    return Malformed(what, file=path, found=found[:200].rstrip(": "), hint=hint)


def _state_dict(document: object, path: Path) -> dict[Any, Any]:
    import torch

    if not isinstance(document, dict):
        raise Unsupported(
            "the file holds no state dict",
            file=path,
            expected="a dict of tensors",
            found=type(document).__name__,
            hint=_SAVE_HINT,
        )
    if {"state", "param_groups"} <= document.keys():
        what = "an optimizer's state, and no weights"
        raise Unsupported(what, file=path, found="state, param_groups", hint=_SAVE_HINT)
    if any(isinstance(value, torch.Tensor) for value in document.values()):
        return document
    wrappers = [key for key in _WRAPPERS if isinstance(document.get(key), dict)]
    if len(wrappers) > 1:
        what = "more than one state dict in the file"
        raise Unsupported(what, file=path, found=", ".join(wrappers), hint=_SAVE_HINT)
    return document[wrappers[0]] if wrappers else document


def _tensors(state: dict[Any, Any], path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    empty = True
    for name, value in state.items():
        if not isinstance(name, str) or not is_text(name) or name == METADATA:
            raise Malformed("a tensor's name is no name", file=path, found=reprlib.repr(name))
        if isinstance(value, torch.Tensor):
            empty = False
            _check_kind(name, value, path)
            yield name, value.detach()
        elif value is not None and not isinstance(value, int | float | str):
            raise Unsupported(
                "the state dict holds what is no tensor",
                file=path,
                tensor=name,
                expected="a tensor",
                found=type(value).__name__,
                hint=_SAVE_HINT,
            )
    if empty:
        raise Malformed("no tensors in the file", file=path, hint=_SAVE_HINT)


def _nbytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()


def _check_copies(tensors: list[tuple[str, torch.Tensor]], size: int, path: Path) -> None:
    """Refuse a small file whose tensors, all elements in one place, would fill the memory."""
    copied = 0
    for name, tensor in tensors:
        copied += 0 if tensor.is_contiguous() else _nbytes(tensor)
        if copied > 2 * size + _COPY_ALLOWANCE:
            raise Unsupported(
                "tensors whose elements share their bytes are too large to write out",
                file=path,
                tensor=name,
                expected=f"{size} bytes, as the file has",
                found=copied,
                hint="save them with .contiguous() if they are meant",
            )


def _check_kind(name: str, tensor: torch.Tensor, path: Path) -> None:
    import torch

    kind = None
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        kind = type(tensor).__name__
    elif tensor.layout != torch.strided or tensor.is_nested:
        kind = str(tensor.layout) if tensor.layout != torch.strided else "nested"
    elif tensor.is_quantized:
        kind = "quantized"
    elif tensor.device.type != "cpu":
        kind = f"on the device {tensor.device.type}, without data"
    elif _dtype(tensor) not in OF_TORCH or (
        _dtype(tensor) == "float4_e2m1fn_x2" and not tensor.dim()
    ):
        kind = f"{_dtype(tensor)} {list(tensor.shape)}"
    if kind is not None:
        what = "a kind of tensor that safetensors cannot hold"
        raise Unsupported(what, file=path, tensor=name, expected="a dense tensor", found=kind)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _converted(name: str, tensor: torch.Tensor) -> TorchTensor:
    import torch

    code, shape = OF_TORCH[_dtype(tensor)], tuple(tensor.shape)
    if code == "F4":  # torch counts pairs, safetensors elements
        shape = (*shape[:-1], 2 * shape[-1])
    # As integers: torch cannot copy every dtype, and bits must not pass through arithmetic.
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.resolve_conj().resolve_neg().view(bits).contiguous()
    # One element is contiguous whatever its stride says, but view() asks for a stride of 1.
    flat = flat.as_strided((flat.numel(),), (1,))
    data = flat.view(torch.uint8).numpy().view()
    data.flags.writeable = False
    return TorchTensor(name, code, shape, data)
