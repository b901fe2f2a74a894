"""Parameters in the body: DTensors to everyone outside, plain local shards to the user's code.

The local shard of a parameter is read through autograd, so that its gradient arrives on the DTensor. A replicated
parameter that is used on sharded activations gets a partial gradient; those are summed over the axis together, once a
backward, by a single node that hands out all their local tensors at the start of the root's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpplan.compat import local_of, native_apply, new_distributed_tensor
from tpplan.runtime.communicator import Communicator


class _LocalShard(torch.autograd.Function):
    """The local tensor of a DTensor parameter; backward wraps the local gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.parameter = parameter
        return local_of(parameter).detach()  # a tensor of its own: autograd would write to the parameter's

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return new_distributed_tensor(gradients[0], ctx.parameter)


_apply_local_shard = native_apply(_LocalShard)


class _SummedShards(torch.autograd.Function):
    """The local tensors of several replicated parameters; backward sums their gradients over the axis, coalesced."""

    @staticmethod
    def forward(ctx: Any, axis: Communicator, *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.parameters = parameters
        ctx.set_materialize_grads(False)
        return tuple(local_of(parameter).detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        summed = sum_coalesced(gradients, ctx.parameters, ctx.axis)
        wrapped = [
            None if gradient is None else new_distributed_tensor(gradient, parameter)
            for gradient, parameter in zip(summed, ctx.parameters, strict=True)
        ]
        return (None, *wrapped)


def sum_coalesced(
    gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], axis: Communicator
) -> list[Tensor | None]:
    """Sum gradients over the axis with one all-reduce for each dtype.

    A gradient that is missing here may exist on another rank; its place is filled with zeros, and stays None if no
    gradient of this call exists at all.
    """
    if all(gradient is None for gradient in gradients):
        return list(gradients)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, parameter in enumerate(parameters):
        by_dtype.setdefault(parameter.dtype, []).append(index)
    summed: list[Tensor | None] = [None] * len(gradients)
    for indices in by_dtype.values():
        parts = [torch.zeros_like(local_of(parameters[i])) if gradients[i] is None else gradients[i] for i in indices]
        flat = axis.all_reduce(torch.cat([part.reshape(-1) for part in parts if part is not None]))
        sizes = [local_of(parameters[i]).numel() for i in indices]
        for i, piece in zip(indices, flat.split(sizes), strict=True):
            if gradients[i] is not None:
                summed[i] = piece.view_as(local_of(parameters[i]))
    return summed


class SummedParameters:
    """The parameters of a model whose gradients are summed, and the tensors handed out for the current forward."""

    def __init__(self, axis: Communicator) -> None:
        """Serve the ranks of `axis`."""
        self.axis = axis
        self._handed_out: dict[int, Tensor] = {}

    def open(self, parameters: Sequence[Tensor]) -> None:
        """Hand out local tensors for `parameters`, tied together by one backward node."""
        wanted = [p for p in parameters if p.requires_grad]
        if wanted and torch.is_grad_enabled():
            shards = _SummedShards.apply(self.axis, *wanted)
            self._handed_out = dict(zip(map(id, wanted), shards, strict=True))  # pyright: ignore

    def close(self) -> None:
        """Forget what was handed out; the autograd graph keeps what it needs."""
        self._handed_out = {}

    def read(self, parameter: Tensor) -> Tensor:
        """The local tensor of a summed parameter. Outside of the root's forward it gets a node of its own."""
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return local_of(parameter)
        found = self._handed_out.get(id(parameter))
        if found is not None:
            return found
        return _SummedShards.apply(self.axis, parameter)[0]  # pyright: ignore


def read_shard(parameter: Tensor) -> Tensor:
    """The local tensor of a parameter whose gradient needs no sum; differentiable."""
    if torch.is_grad_enabled() and parameter.requires_grad:
        return _apply_local_shard(parameter)
    return local_of(parameter)
