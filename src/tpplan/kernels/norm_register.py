"""Registering the norms with torch: `tpplan::layer_norm`, `tpplan::rms_norm`, both with `residual_` in front, and the
two backwards that they share.
"""  # noqa: D205

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpplan.kernels import norm_ops
from tpplan.kernels.registration import COLUMN_SUMS, COLUMNS, ROWS, define, no_second_backward, shard_rows


@dataclass(frozen=True, slots=True)
class _Form:
    """How the arguments and the results of one of the four forwards are arranged.

    Attributes:
        residual: whether the residual comes second, and the sum second among the results.
        centred: LayerNorm, which has a bias and means, otherwise RMSNorm.
    """

    residual: bool
    centred: bool

    @property
    def weight_at(self) -> int:
        return 2 if self.residual else 1

    @property
    def dims_at(self) -> int:
        return self.weight_at + (2 if self.centred else 1)

    @property
    def tensors(self) -> tuple[str, ...]:
        return (ROWS,) * self.weight_at + (COLUMNS,) * (self.dims_at - self.weight_at)

    @property
    def results(self) -> tuple[str, ...]:
        return (ROWS,) * (2 + self.residual + self.centred)


def _fake_forward(form: _Form) -> Callable[..., tuple[Tensor, ...]]:
    def fake(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        leading = x.shape[: x.dim() - rest[form.dims_at - 1]]
        results = [x.new_empty(x.shape, dtype=rest[-1])]
        if form.residual:
            results.append(x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, rest[0].dtype)))
        statistics = [x.new_empty(leading, dtype=torch.float32) for _ in range(1 + form.centred)]
        return (*results, *statistics)

    return fake


def _fake_backward(dims_at: int, dtypes_at: int) -> Callable[..., tuple[Tensor, ...]]:
    def fake(dy: Tensor, s: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        normalized = s.shape[s.dim() - rest[dims_at - 2] :]
        dtypes = rest[dtypes_at - 2 :]
        sums = [s.new_empty(0) if dtype is None else s.new_empty(normalized, dtype=dtype) for dtype in dtypes]
        return (s.new_empty(s.shape), *sums)

    return fake


def _setup(form: _Form) -> Callable[..., None]:
    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        statistics = output[1 + form.residual :]
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)
        s = output[1] if form.residual else inputs[0]
        ctx.save_for_backward(s, inputs[form.weight_at], *statistics)
        affine = inputs[form.weight_at : form.dims_at]
        wanted = ctx.needs_input_grad[form.weight_at : form.dims_at]
        ctx.affine_dtypes = [
            t.dtype if t is not None and need else None for t, need in zip(affine, wanted, strict=True)
        ]
        ctx.input_dtypes = [tensor.dtype for tensor in inputs[: form.weight_at]]
        # What comes after the tensors describes the norm; eps and the result's dtype are of no use to the backward.
        ctx.settings = (inputs[form.dims_at], *inputs[form.dims_at + 2 : -1])

    return setup


def _backward(form: _Form) -> Callable[..., tuple[Tensor | None, ...]]:
    def backward(ctx: Any, dy: Tensor | None, *rest: Tensor | None) -> tuple[Tensor | None, ...]:
        dsum = rest[0] if form.residual else None
        s, weight, *statistics = ctx.saved_tensors
        others = (None,) * (len(ctx.settings) + 2)
        if dy is None:
            ds, sums = dsum, [None for _ in ctx.affine_dtypes]
        else:
            name = "layer_norm_backward" if form.centred else "rms_norm_backward"
            run = OPERATORS[name]
            ds, *summed = run(dy, s, weight, *statistics, dsum, *ctx.settings, *ctx.affine_dtypes)
            sums = [g if dtype is not None else None for g, dtype in zip(summed, ctx.affine_dtypes, strict=True)]
        inputs = [None if ds is None else ds.to(dtype) for dtype in ctx.input_dtypes]
        return (*inputs, *sums, *others)

    return backward


_LAYER = "Tensor? weight, Tensor? bias, int dims, float eps, ScalarType dtype) -> (Tensor, "
_RMS = "Tensor? weight, int dims, float eps, float offset, bool round_first, ScalarType dtype) -> (Tensor, "
_FORWARDS: dict[str, tuple[str, Callable[..., Any], _Form]] = {
    "layer_norm": (f"(Tensor x, {_LAYER}Tensor, Tensor)", norm_ops.layer_norm, _Form(False, True)),
    "rms_norm": (f"(Tensor x, {_RMS}Tensor)", norm_ops.rms_norm, _Form(False, False)),
    "residual_layer_norm": (
        f"(Tensor x, Tensor residual, {_LAYER}Tensor, Tensor, Tensor)",
        norm_ops.residual_layer_norm,
        _Form(True, True),
    ),
    "residual_rms_norm": (
        f"(Tensor x, Tensor residual, {_RMS}Tensor, Tensor)",
        norm_ops.residual_rms_norm,
        _Form(True, False),
    ),
}

OPERATORS = {
    name: define(f"{name}{schema}", implementation, _fake_forward(form), _backward(form), _setup(form))
    for name, (schema, implementation, form) in _FORWARDS.items()
}
"""The operators of the norms by name."""
OPERATORS["layer_norm_backward"] = define(
    "layer_norm_backward(Tensor dy, Tensor s, Tensor? weight, Tensor mean, Tensor rstd, Tensor? dsum, int dims, "
    "ScalarType? weight_dtype, ScalarType? bias_dtype) -> (Tensor, Tensor, Tensor)",
    norm_ops.layer_norm_backward,
    _fake_backward(dims_at=6, dtypes_at=7),
    no_second_backward,
)
OPERATORS["rms_norm_backward"] = define(
    "rms_norm_backward(Tensor dy, Tensor s, Tensor? weight, Tensor rstd, Tensor? dsum, int dims, float offset, "
    "bool round_first, ScalarType? weight_dtype) -> (Tensor, Tensor)",
    norm_ops.rms_norm_backward,
    _fake_backward(dims_at=5, dtypes_at=8),
    no_second_backward,
)

for _name, (_, _, _form) in _FORWARDS.items():
    shard_rows(OPERATORS[_name], _form.results, _form.tensors, _form.dims_at)
shard_rows(
    OPERATORS["layer_norm_backward"], (ROWS, COLUMN_SUMS, COLUMN_SUMS), (ROWS, ROWS, COLUMNS, ROWS, ROWS, ROWS), 6
)
shard_rows(OPERATORS["rms_norm_backward"], (ROWS, COLUMN_SUMS), (ROWS, ROWS, COLUMNS, ROWS, ROWS), 5)
