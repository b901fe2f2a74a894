"""How work is divided among programs: tiles of rows and columns, and how many programs stay resident.

Nothing here depends on the number of rows other than the size of the grid, so that a new batch size compiles nothing.
The sizes are chosen so that no kernel spills registers on Hopper, which the tests hold; they are not tuned on a GPU.
"""

from __future__ import annotations

import functools
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpplan.kernels.backend import INTERPRETED

MAX_FORWARD_COLUMNS = 16_384
"""The widest row that a forward holds in registers; a wider one is read twice."""
MAX_BACKWARD_COLUMNS = 8_192
"""The widest row that a backward holds in registers, which keeps gradients of weight and bias as well."""

_TILE = 4_096
# Under the interpreter it is the operation that costs, whatever its size.
_LOOPED_COLUMNS = 8_192 if INTERPRETED else 2_048
_ELEMENTS_PER_THREAD = 16
_THREADS_PER_WARP = 32
_MAX_WARPS = 16
_MAX_BLOCK_ROWS = 64
_REGISTER_THREADS = 1_024
# Under the interpreter a program costs milliseconds; an odd number finds mistakes in how rows are dealt out.
_INTERPRETED_PROGRAMS = 3
_NOTHING = nullcontext()
# The interpreter replaces triton's language while it runs a kernel: a second thread would find it half replaced.
_ONE_AT_A_TIME = threading.RLock()


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program works on at a time.

    Attributes:
        rows, columns: of the tile, powers of two.
        warps: that work on it.
        looped: whether a row takes several tiles.
    """

    rows: int
    columns: int
    warps: int
    looped: bool = False


@functools.cache
def row_tile(columns: int, widest: int) -> Tile:
    """The tile for an operation that needs whole rows: several short rows, one row, or a part of a very wide one."""
    looped = columns > widest
    width = _LOOPED_COLUMNS if looped else next_power_of_two(columns)
    rows = 1 if looped else max(1, min(_MAX_BLOCK_ROWS, _TILE // width))
    return Tile(rows, width, _warps(rows * width), looped)


@functools.cache
def pointwise_tile(columns: int) -> Tile:
    """The tile for an operation on single elements: 16 bytes a thread in 16-bit types."""
    width = min(1_024, next_power_of_two(columns))
    return Tile(max(1, 1_024 // width), width, 4)


@functools.cache
def resident_programs(device: torch.device, warps: int) -> int:
    """How many programs with `warps` warps each the device runs at a time, if registers limit them."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    each = max(1, _REGISTER_THREADS // (warps * _THREADS_PER_WARP))
    return torch.cuda.get_device_properties(device).multi_processor_count * each


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def blocks(n: int, size: int) -> int:
    """How many blocks of `size` cover `n`."""
    return -(-n // size)


def _warps(elements: int) -> int:
    return max(1, min(_MAX_WARPS, elements // (_THREADS_PER_WARP * _ELEMENTS_PER_THREAD)))


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which needn't be the tensor's."""
    if INTERPRETED:
        return _ONE_AT_A_TIME
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(tensor.device)


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of a dtype to round to; None for float32, to which nothing is rounded."""
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(dtype)
