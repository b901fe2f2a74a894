"""The header of a safetensors file: which tensors it holds, and at which bytes. Nothing in it is taken on trust."""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from tpplan.checkpoint.files import CheckpointError, problem, unreadable
from tpplan.checkpoint.meter import Meter
from tpplan.checkpoint.strict_json import NotStrict, kind_of, read_object

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip
_OF_TORCH = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_LONGEST = 100_000_000  # what the library accepts as well
_LFS = b"version https://git-lfs"
_NOTES = 10


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A part of a tensor that torch.distributed.checkpoint has saved by itself.

    Attributes:
        path: the file.
        start, bytes: where it begins in the file, and how many bytes it is, as `torch.save` has written it.
        offsets, sizes: which part of the whole tensor it is.
    """

    path: Path
    start: int
    bytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, or in several.

    Attributes:
        name: its name there.
        path: the file.
        dtype: as safetensors calls it, such as `BF16`.
        shape: of the whole tensor.
        start, bytes: where its numbers begin in the file, and how many bytes they are.
        chunks: in which it lies, if not in one piece.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    bytes: int
    chunks: tuple[StoredChunk, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """Torch's dtype; None for those that it hasn't."""
        return getattr(torch, _OF_TORCH.get(self.dtype, self.dtype), None)


def dtype_name(dtype: torch.dtype) -> str:
    """What safetensors calls a dtype; of those that it hasn't, torch's name."""
    name = str(dtype).removeprefix("torch.")
    return next((key for key, value in _OF_TORCH.items() if value == name), name)


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds: its tensors in the order of their bytes, the header's own length, and the file's."""

    tensors: tuple[Stored, ...]
    length: int
    size: int


class _Lies(Exception):
    """A header can't be right; its reasons."""


def read_header(path: Path, meter: Meter) -> Header:
    """The checked header of a safetensors file.

    Raises:
        CheckpointError: TP121, with all that is wrong with it.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise problem(f"`{path}` is no file", "name a safetensors file")
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            text = _text_of(file, size, path, meter)
        return Header(_tensors(path, read_object(text), len(text) + 8, size), len(text) + 8, size)
    except (OSError, ValueError) as error:
        if isinstance(error, NotStrict):
            raise _no_safetensors(path, f"of its header, {error}") from None
        raise unreadable(path, error) from None
    except _Lies as error:
        raise _no_safetensors(path, *error.args) from None


def _text_of(file: Any, size: int, path: Path, meter: Meter) -> bytes:
    begin: bytes = file.read(len(_LFS))
    meter.add(len(begin))
    if begin == _LFS:
        raise problem(f"`{path}` is a pointer of git-lfs, not the file itself", "run `git lfs pull` in its repository")
    if len(begin) < 8:
        raise _Lies(f"it has {size} bytes, which is less than the length of a header" if size else "it is empty")
    length = int.from_bytes(begin[:8], "little")
    if length > min(size - 8, _LONGEST):
        raise _Lies(f"its first bytes promise a header of {length} bytes, but the file has {size}")
    text = begin[8 : 8 + length]
    while len(text) < length:
        more: bytes = file.read(length - len(text))
        if not more:
            raise _Lies("it ends inside its header")
        meter.add(len(more))
        text += more
    return text


def _tensors(path: Path, table: dict[str, Any], begin: int, size: int) -> tuple[Stored, ...]:
    reasons: list[str] = []
    stored: list[Stored] = []
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        reasons.append(f"its `__metadata__` is {kind_of(metadata)}, not an object")
    for name, entry in table.items():
        try:
            dtype, shape, first, last = _entry(name, entry)
            stored.append(Stored(name, path, dtype, shape, begin + first, last - first))
        except _Lies as error:
            reasons += error.args
    stored.sort(key=lambda tensor: (tensor.start, tensor.bytes))
    if not reasons:
        reasons = _misplaced(stored, begin, size)
    if reasons:
        raise _Lies(*reasons)
    return tuple(stored)


def _entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict):
        raise _Lies(f"`{name}` is {kind_of(entry)}, not an object")
    fields = cast("dict[str, Any]", entry)
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _Lies(f"`{name}` has the dtype {dtype!r}, which isn't one of safetensors")
    sizes, ends = _counts(shape), _counts(offsets)
    if sizes is None:
        raise _Lies(f"`{name}` has the shape {shape!r}, which isn't a list of sizes")
    if ends is None or len(ends) != 2 or ends[0] > ends[1]:
        raise _Lies(f"`{name}` has the offsets {offsets!r}, which aren't a begin and an end")
    bits, count = math.prod(sizes) * BITS[dtype], ends[1] - ends[0]
    if bits != count * 8:
        expected = f"{dtype} of shape {list(sizes)}, which is {-(-bits // 8)} bytes"
        raise _Lies(f"`{name}` is {expected}, but its offsets hold {count}")
    return dtype, sizes, ends[0], ends[1]


def _counts(value: Any) -> tuple[int, ...] | None:
    """A list of whole numbers of at least zero; None if it isn't one."""
    items: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [None]
    return tuple(items) if all(type(item) is int and item >= 0 for item in items) else None


def _misplaced(stored: list[Stored], begin: int, size: int) -> list[str]:
    """How tensors lie that don't fill the file one after the other."""
    reasons: list[str] = []
    edge, last = begin, "the header"
    for tensor in stored:
        if tensor.start < edge:
            reasons.append(f"`{tensor.name}` overlaps {last}")
        elif tensor.start > edge:
            reasons.append(f"{tensor.start - edge} bytes before `{tensor.name}` belong to no tensor")
        if tensor.start + tensor.bytes >= edge:
            edge, last = tensor.start + tensor.bytes, f"`{tensor.name}`"
    beyond = next((tensor for tensor in stored if tensor.start + tensor.bytes > size), None)
    if beyond is not None:
        reasons.append(
            f"`{beyond.name}` ends at byte {beyond.start + beyond.bytes}, but the file has {size}: it was cut off"
        )
    elif edge < size:
        reasons.append(f"its last {size - edge} bytes belong to no tensor")
    return reasons


def _no_safetensors(path: Path, reason: str, *more: str) -> CheckpointError:
    return problem(
        f"`{path}` can't be read as safetensors: {reason}",
        "copy or download the file again, or convert the checkpoint to safetensors",
        *more[:_NOTES],
    )


__all__ = ["BITS", "Header", "Stored", "StoredChunk", "dtype_name", "read_header"]
