"""The operator `tpplan::cross_entropy_parts` and its backward: what each rank does by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpplan.kernels import cross_entropy_formulas
from tpplan.kernels.backend import runs_kernels
from tpplan.kernels.launch import blocks, next_power_of_two, on_device
from tpplan.kernels.registration import ROWS, define, no_second_backward, shard_rows
from tpplan.kernels.rows import as_rows

_FORWARD_BLOCK, _BACKWARD_BLOCK = 4_096, 4_096
_WARPS = 8


def _forward(
    logits: Tensor, target: Tensor, first: int, classes: int, ignore_index: int, sum_logits: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not runs_kernels(logits) or not logits.numel():
        highest, logsum, picked, total = cross_entropy_formulas.forward(logits, target, first, classes, ignore_index)
        return highest, logsum, picked, total if sum_logits else torch.zeros_like(total)
    from tpplan.kernels.cross_entropy_kernel import cross_entropy_forward_kernel

    held = as_rows(logits)
    rows, columns = held.shape
    highest, logsum, picked, total = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(4))
    kernel: Any = cross_entropy_forward_kernel
    if rows:
        with on_device(logits):
            kernel[(rows,)](
                held,
                target.contiguous(),
                highest,
                logsum,
                picked,
                total,
                held.stride(0),
                columns,
                first,
                classes,
                ignore_index,
                SUM_LOGITS=sum_logits,
                BLOCK=min(_FORWARD_BLOCK, next_power_of_two(columns)),
                num_warps=_WARPS,
            )
    return highest, logsum, picked, total


def _backward(
    dlogsum: Tensor,
    dpicked: Tensor,
    dtotal: Tensor,
    logits: Tensor,
    target: Tensor,
    highest: Tensor,
    logsum: Tensor,
    first: int,
    ignore_index: int,
    sum_logits: bool,
) -> Tensor:
    if not runs_kernels(logits):
        given = dtotal if sum_logits else torch.zeros_like(dtotal)
        return cross_entropy_formulas.backward(
            dlogsum, dpicked, given, logits, target, highest, logsum, first, ignore_index
        )
    from tpplan.kernels.cross_entropy_kernel import cross_entropy_backward_kernel

    held = as_rows(logits)
    rows, columns = held.shape
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    block = min(_BACKWARD_BLOCK, next_power_of_two(columns))
    kernel: Any = cross_entropy_backward_kernel
    if dlogits.numel():
        with on_device(logits):
            kernel[(rows * blocks(columns, block),)](
                held,
                target.contiguous(),
                highest,
                logsum,
                dlogsum.contiguous(),
                dpicked.contiguous(),
                dtotal.contiguous(),
                dlogits,
                held.stride(0),
                columns,
                first,
                ignore_index,
                SUM_LOGITS=sum_logits,
                BLOCK=block,
                num_warps=_WARPS,
            )
    return dlogits


def _fake_forward(logits: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(4))


def _fake_backward(dlogsum: Tensor, dpicked: Tensor, dtotal: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, ctx.first, _, ctx.ignore_index, ctx.sum_logits = inputs
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(logits, target, output[0], output[1])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, _: None, *given: Tensor | None) -> Any:
    logits, target, highest, logsum = ctx.saved_tensors
    arrived = [torch.zeros_like(logsum) if gradient is None else gradient for gradient in given]
    settings = (ctx.first, ctx.ignore_index, ctx.sum_logits)
    return BACKWARD(*arrived, logits, target, highest, logsum, *settings), None, None, None, None, None


PARTS = define(
    "cross_entropy_parts(Tensor logits, Tensor target, SymInt first, SymInt classes, int ignore_index, "
    "bool sum_logits) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    _gradient,
    _setup,
)
BACKWARD = define(
    "cross_entropy_parts_backward(Tensor dlogsum, Tensor dpicked, Tensor dtotal, Tensor logits, Tensor target, "
    "Tensor highest, Tensor logsum, SymInt first, int ignore_index, bool sum_logits) -> Tensor",
    _backward,
    _fake_backward,
    no_second_backward,
)

# The rows of all of them are dim 0; the classes of a DTensor stay whole.
shard_rows(PARTS, (ROWS,) * 4, (ROWS,) * 2, whole_dims=1)
shard_rows(BACKWARD, (ROWS,), (ROWS,) * 7)
