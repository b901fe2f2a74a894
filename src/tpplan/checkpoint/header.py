"""The header of a safetensors file: which tensors it holds, and at which bytes. Nothing in it is taken on trust.

in:  a file
out: `Header`: a `Stored` for each tensor, in the order of their bytes

safetensors reads headers as well, but doesn't tell at which bytes a tensor lies, takes a name twice, and of a header
that lies it mostly names neither the tensor nor the statement.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from tpplan.checkpoint.files import CheckpointError, problem, unreadable
from tpplan.checkpoint.meter import Meter
from tpplan.checkpoint.strict_json import NotStrict, kind_of, read_object

_OF_TORCH: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
BITS = {code: dtype.itemsize * 8 for code, dtype in _OF_TORCH.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
CODES = {dtype: code for code, dtype in _OF_TORCH.items()} | {torch.float4_e2m1fn_x2: "F4"}
"""What safetensors calls each dtype that it knows."""
_LONGEST = 100_000_000  # what the library accepts as well
_LFS = b"version https://git-lfs"
_NOTES = 10


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file.

    Attributes:
        name: its name there.
        path: the file.
        dtype: as safetensors calls it, such as `BF16`.
        shape: of the tensor.
        start, bytes: where it begins in the file, and how many bytes it is there.
        pickled: whether `torch.save` has written it, so that it can only be read whole; else the bytes are its numbers.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    bytes: int
    pickled: bool = False

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """Torch's dtype; None for those that it hasn't."""
        return _OF_TORCH.get(self.dtype, getattr(torch, self.dtype, None))

    @property
    def nbytes(self) -> int:
        """The bytes of its numbers."""
        return self.bytes_of(math.prod(self.shape))

    def bytes_of(self, count: int) -> int:
        """The bytes of so many of its numbers."""
        dtype = self.torch_dtype
        return count * (BITS[self.dtype] if dtype is None else dtype.itemsize * 8) // 8


def dtype_name(dtype: torch.dtype) -> str:
    """What safetensors calls a dtype; of those that it hasn't, torch's name."""
    return next((code for code, held in _OF_TORCH.items() if held == dtype), str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds: its tensors in the order of their bytes, the header's own length, the file's, what it says."""

    tensors: tuple[Stored, ...]
    length: int
    size: int
    metadata: Mapping[str, Any]


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
        table = read_object(text)
        metadata: Any = table.get("__metadata__")
        return Header(_tensors(path, table, len(text) + 8, size), len(text) + 8, size, metadata or {})
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


__all__ = ["BITS", "CODES", "Header", "Stored", "dtype_name", "read_header"]
