"""Which dtype to verify in, and whether the numbers fit into memory.

Exactness serves better than likeness: in float64 a right program differs from the unsharded model by 1e-14 or so, and
a wrong one by as much as ever. So models whose parameters take up to 2 GiB that way are verified in float64, larger
ones in float32; a half-precision dtype is used only where it is asked for.
"""

from __future__ import annotations

import os

import torch
from torch import nn

from tpplan.compiler.ir.program import Program
from tpplan.parity.parity_errors import TooLargeError

_COMFORTABLE = 2 << 30
_MOST = 32 << 30


def choose_dtype(program: Program) -> torch.dtype:
    """The dtype to verify in where none is asked for; see the module's docstring."""
    whole, _ = _elements(program)
    comfortable = whole * torch.float64.itemsize <= _COMFORTABLE and _needed(program, torch.float64) <= _limit()
    return torch.float64 if comfortable else torch.float32


def refuse_too_large(model: nn.Module, program: Program, dtype: torch.dtype) -> None:
    """Raise `TooLargeError` if parameters and gradients, of the model and of all ranks, exceed half of the memory."""
    needed, limit = _needed(program, dtype), _limit()
    if needed > limit:
        raise TooLargeError.of(
            "TP194",
            f"verifying `{type(model).__name__}` at tp={program.size} in {str(dtype).removeprefix('torch.')} takes "
            f"{_gibibytes(needed)} for parameters and gradients; the limit here is {_gibibytes(limit)}",
            help="fewer layers prove as much: on the command line `--set num_hidden_layers=2`, in Python a model "
            "built from a smaller config",
        )


def _needed(program: Program, dtype: torch.dtype) -> int:
    whole, local = _elements(program)
    return 2 * dtype.itemsize * (whole + program.size * local)


def _elements(program: Program) -> tuple[int, int]:
    """How many numbers the parameters hold, in all and on one rank."""
    whole = sum(placement.bytes // placement.itemsize for placement in program.parameters)
    return whole, sum(placement.local_bytes // placement.itemsize for placement in program.parameters)


def _limit() -> int:
    try:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not on every platform
        physical = _MOST
    return min(_MOST, physical // 2)


def _gibibytes(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
