"""Linear layers split by rows: some rows of their sum travel while others are multiplied.

in:  x (…, s, in / size), and this rank's columns of a weight
out: y (…, s / size, out), this rank's part of the sum; or y (…, s, out), the whole

forward    the terms x W of some parts are made while those of others travel
backward   dX = dY Wᵀ of some parts of dY is made while others travel; then dW. Of a whole dY nothing travels
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tpplan.compat.autograd import native_apply
from tpplan.compat.modes import without_function_modes
from tpplan.runtime.bodies.layer_bodies import product
from tpplan.runtime.overlap.pairwise import gather_with, runs_as_written, scatter_with, sum_with
from tpplan.runtime.ranks.communicator import Communicator, fuses, of_backward
from tpplan.runtime.ranks.profiled import at_place, told_place
from tpplan.runtime.ranks.reshard import SecondDerivativeError


@dataclass(frozen=True, slots=True)
class Scattered:
    """The products of a layer, and their sum over the ranks.

    Attributes:
        axis: the ranks.
        dim: along which the sum is split; None for a sum that each rank has whole.
        transposed: whether the weight is (inputs, outputs).
        groups: how many parts are multiplied at a time, in order.
        least: how many rows the whole has to have, so that it pays.
    """

    axis: Communicator
    dim: int | None
    transposed: bool
    least: int
    groups: tuple[int, ...]
    back: Communicator = field(init=False)

    def __post_init__(self) -> None:
        """Take the same ranks for the backward."""
        object.__setattr__(self, "back", of_backward(self.axis))

    def __call__(self, input: Tensor, weight: Tensor) -> Tensor | None:
        """This rank's part of the sum; None where the layer has to run as without."""
        if input.is_complex() or weight.dtype is not input.dtype or not runs_as_written():
            return None
        rows = input.numel() // max(input.shape[-1], 1)
        if rows < self.least or not self._divides(input, weight, rows):
            return None
        with without_function_modes():
            if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad):
                return _apply_scattered(self, input, weight)
            return self.compute(input, weight)

    def _divides(self, input: Tensor, weight: Tensor, rows: int) -> bool:
        """Whether there are parts, which the ranks of a split sum share evenly."""
        if self.dim is None:
            made = weight.shape[1 if self.transposed else 0]
            return rows > 1 and rows * made * input.itemsize > self.axis.one_shot
        return (
            input.dim() > self.dim + 1 and bool(input.shape[self.dim]) and input.shape[self.dim] % self.axis.size == 0
        )

    def compute(self, input: Tensor, weight: Tensor) -> Tensor:
        """The same, without a backward."""
        if self.dim is None:
            rows, matrix = input.flatten(0, -2), weight if self.transposed else weight.t()
            whole = input.new_empty((*input.shape[:-1], matrix.shape[1]))
            terms, groups = whole.flatten(0, -2), self.groups[: rows.shape[0]]
            sum_with(self.axis, terms, rows, groups, lambda part, made: torch.mm(part, matrix, out=made))
            return whole
        dim = self.dim
        if fuses(self.axis):
            return self.axis.multiply_and_scatter(input, weight if self.transposed else weight.t(), dim)
        parts = input.chunk(self.axis.size, dim)

        def work(ranks: list[int]) -> Tensor:
            given = torch.cat([parts[rank] for rank in ranks], dim) if len(ranks) > 1 else parts[ranks[0]]
            return product(given, weight, None, self.transposed)

        return scatter_with(self.axis, dim, self.groups, work)


class _Scattered(torch.autograd.Function):
    """See the module's docstring."""

    @staticmethod
    def forward(ctx: Any, layer: Scattered, input: Tensor, weight: Tensor) -> Tensor:
        ctx.layer, ctx.place = layer, told_place()
        _, wants_input, wants_weight = ctx.needs_input_grad
        ctx.save_for_backward(input if wants_weight else None, weight if wants_input else None)
        return layer.compute(input, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise SecondDerivativeError
        layer: Scattered = ctx.layer
        input, weight = ctx.saved_tensors
        _, wants_input, wants_weight = ctx.needs_input_grad

        def work(part: Tensor) -> tuple[Tensor, ...]:
            return (part @ (weight.t() if layer.transposed else weight),) if wants_input else ()

        if layer.dim is None:
            whole = gradients[0]
            made = work(whole)
        else:
            back = layer.back
            with at_place(ctx.place):
                if wants_input and fuses(back):
                    matrix = weight.t() if layer.transposed else weight
                    whole, made = back.gather_and_multiply(gradients[0], layer.dim, [matrix])
                else:
                    whole, made = gather_with(back, gradients[0], layer.dim, layer.groups[::-1], work)
        of_weight = None
        if wants_weight:
            rows, given = whole.flatten(0, -2), input.flatten(0, -2)
            of_weight = torch.mm(given.t(), rows) if layer.transposed else torch.mm(rows.t(), given)
        return None, made[0] if made else None, of_weight


_apply_scattered = native_apply(_Scattered)

__all__ = ["Scattered"]
