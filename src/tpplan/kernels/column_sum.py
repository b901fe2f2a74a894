"""The sum of programs' shares of a gradient: the second launch of a backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpplan.kernels.backend import INTERPRETED
from tpplan.kernels.launch import blocks, on_device

_BLOCK_ROWS = 64
# Narrow, so that enough programs are busy; but under the interpreter it is the program that costs.
_BLOCK_COLUMNS = 4096 if INTERPRETED else 32


def sum_shares(shares: Tensor, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Add shares up over programs, in float32 and in a fixed order: `shares.sum(1)`, each sum in its own dtype.

    Args:
        shares: (sums, programs, columns), float32, contiguous; one or two sums.
        dtypes: of the sums.

    Returns:
        A tensor (columns,) for each sum.
    """
    from tpplan.kernels.column_sum_kernel import column_sum_kernel

    sums, programs, columns = shares.shape
    results = [torch.empty(columns, dtype=dtype, device=shares.device) for dtype in dtypes]
    kernel: Any = column_sum_kernel
    with on_device(shares):
        kernel[(blocks(columns, _BLOCK_COLUMNS), sums)](
            shares,
            results[0],
            results[1] if sums == 2 else None,
            programs,
            columns,
            BLOCK_ROWS=_BLOCK_ROWS,
            BLOCK_COLUMNS=_BLOCK_COLUMNS,
            num_warps=4,
        )
    return results
