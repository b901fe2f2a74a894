"""The operators `tpplan::gelu`, `tpplan::bias_gelu` and `tpplan::gated`, and their backwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpplan.kernels import activation_formulas, activation_launch
from tpplan.kernels.activation_formulas import Kind
from tpplan.kernels.backend import runs_kernels
from tpplan.kernels.column_sum import sum_shares
from tpplan.kernels.registration import COLUMN_SUMS, COLUMNS, ROWS, define, no_second_backward, shard_rows


def _forward(x: Tensor, up: Tensor | None, bias: Tensor | None, kind: Kind, dtype: torch.dtype) -> Tensor:
    run = activation_launch.forward if runs_kernels(x) else activation_formulas.forward
    return run(x, up, bias, kind, dtype)


def _gelu(x: Tensor, approximate: Kind) -> Tensor:
    return _forward(x, None, None, approximate, x.dtype)


def _gelu_backward(dy: Tensor, x: Tensor, approximate: Kind) -> Tensor:
    if runs_kernels(x):
        return activation_launch.backward(dy, x, None, approximate)[0]
    return activation_formulas.bias_backward(dy, x, None, approximate)[0]


def _bias_gelu(x: Tensor, bias: Tensor, approximate: Kind) -> Tensor:
    return _forward(x, None, bias, approximate, x.dtype)


def _bias_gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor, approximate: Kind, bias_grad: bool
) -> tuple[Tensor, Tensor]:
    nothing = bias.new_empty(0)
    if not runs_kernels(x):
        dx, dbias = activation_formulas.bias_backward(dy, x, bias, approximate)
        return dx, dbias.to(bias.dtype) if bias_grad else nothing
    dx, shares = activation_launch.bias_backward(dy, x, bias, approximate, bias_grad)
    if shares is None:
        return dx, torch.zeros_like(bias, memory_format=torch.contiguous_format) if bias_grad else nothing
    return dx, sum_shares(shares, [bias.dtype])[0]


def _gated(gate: Tensor, up: Tensor, activation: Kind) -> Tensor:
    return _forward(gate, up, None, activation, torch.promote_types(gate.dtype, up.dtype))


def _gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: Kind) -> tuple[Tensor, Tensor]:
    if not runs_kernels(gate):
        return activation_formulas.backward(dy, gate, up, activation)
    dgate, dup = activation_launch.backward(dy, gate, up, activation)
    assert dup is not None
    return dgate, dup


def _fake_bias_gelu_backward(dy: Tensor, x: Tensor, bias: Tensor, approximate: str, bias_grad: bool) -> Any:
    return x.new_empty(x.shape), bias.new_empty(bias.shape) if bias_grad else bias.new_empty(0)


def _like_first(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


def _like_second(dy: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _fake_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.kind = inputs
    ctx.save_for_backward(*tensors)


def _gelu_gradient(ctx: Any, dy: Tensor) -> Any:
    (x,) = ctx.saved_tensors
    return GELU_BACKWARD(dy, x, ctx.kind), None


def _bias_gelu_gradient(ctx: Any, dy: Tensor) -> Any:
    x, bias = ctx.saved_tensors
    wanted = ctx.needs_input_grad[1]
    dx, dbias = BIAS_GELU_BACKWARD(dy, x, bias, ctx.kind, wanted)
    return dx, dbias if wanted else None, None


def _gated_gradient(ctx: Any, dy: Tensor) -> Any:
    gate, up = ctx.saved_tensors
    return *GATED_BACKWARD(dy, gate, up, ctx.kind), None


GELU = define(
    "gelu(Tensor x, str approximate) -> Tensor",
    _gelu,
    _like_first,
    _gelu_gradient,
    _save_inputs,
)
GELU_BACKWARD = define(
    "gelu_backward(Tensor dy, Tensor x, str approximate) -> Tensor",
    _gelu_backward,
    _like_second,
    no_second_backward,
)
BIAS_GELU = define(
    "bias_gelu(Tensor x, Tensor bias, str approximate) -> Tensor",
    _bias_gelu,
    _like_first,
    _bias_gelu_gradient,
    _save_inputs,
)
BIAS_GELU_BACKWARD = define(
    "bias_gelu_backward(Tensor dy, Tensor x, Tensor bias, str approximate, bool bias_grad) -> (Tensor, Tensor)",
    _bias_gelu_backward,
    _fake_bias_gelu_backward,
    no_second_backward,
)
GATED = define(
    "gated(Tensor gate, Tensor up, str activation) -> Tensor", _gated, _fake_gated, _gated_gradient, _save_inputs
)
GATED_BACKWARD = define(
    "gated_backward(Tensor dy, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
    _gated_backward,
    _fake_gated_backward,
    no_second_backward,
)

shard_rows(GELU, (ROWS,), (ROWS,))
shard_rows(GELU_BACKWARD, (ROWS,), (ROWS, ROWS))
shard_rows(BIAS_GELU, (ROWS,), (ROWS, COLUMNS), columns_too=True)
shard_rows(BIAS_GELU_BACKWARD, (ROWS, COLUMN_SUMS), (ROWS, ROWS, COLUMNS), columns_too=True)
shard_rows(GATED, (ROWS,), (ROWS, ROWS))
shard_rows(GATED_BACKWARD, (ROWS, ROWS), (ROWS, ROWS, ROWS))
