"""Which dtype to verify in, and whether the numbers fit into memory.

Exactness serves better than likeness: in float64 a right program differs from the unsharded model by 1e-14 or so, and
a wrong one by as much as ever. So models whose parameters fit into a gibibyte that way are verified in float64, larger
ones in float32; a half-precision dtype is used only where it is asked for.
"""

from __future__ import annotations

import os

import torch
from torch import nn

from tpplan.compiler.program import Program
from tpplan.verify.errors import TooLargeError

_COMFORTABLE = 1 << 30
_MOST = 16 << 30


def choose_dtype(program: Program) -> torch.dtype:
    """The dtype to verify in where none is asked for; see the module's docstring."""
    elements = sum(placement.bytes // placement.itemsize for placement in program.parameters)
    return torch.float64 if elements * torch.float64.itemsize <= _COMFORTABLE else torch.float32


def refuse_too_large(model: nn.Module, program: Program, dtype: torch.dtype) -> None:
    """Raise `TooLargeError` if parameters and gradients, of the model and of all ranks, exceed half of the memory."""
    whole = sum(placement.bytes // placement.itemsize for placement in program.parameters)
    local = sum(placement.local_bytes // placement.itemsize for placement in program.parameters)
    needed = 2 * dtype.itemsize * (whole + program.size * local)
    limit = min(_MOST, _physical_memory() // 2)
    if needed > limit:
        raise TooLargeError(
            f"verifying `{type(model).__name__}` at tp={program.size} in {_short(dtype)} takes {_gibibytes(needed)} "
            f"for parameters and gradients; the limit here is {_gibibytes(limit)}\n"
            "  help: fewer layers prove as much: on the command line `--set num_hidden_layers=2`, in Python a model "
            "built from a smaller config"
        )


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 2 * _MOST


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gibibytes(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
