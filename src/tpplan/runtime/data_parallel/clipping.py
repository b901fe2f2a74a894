"""Clipping by the true norm of all gradients: each element counts once, however many ranks hold it.

in:  parameters whose gradients are DTensors on one or more meshes, or plain tensors that are alike on all ranks
out: gradients scaled as by `torch.nn.utils.clip_grad_norm_`, with one all-reduce for each axis that splits any of them

torch's own gives the same, by way of a DTensor operation, and often a collective, for each gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from tpplan.compat.dtensors import local_of
from tpplan.compat.tensors import foreach_norm
from tpplan.plan.taken import FLAG, NUMBER, ORDER, optional
from tpplan.runtime.parameters.sharded_operations import owned_elements, split_axes
from tpplan.runtime.parameters.sharded_tensors import ShardedTensor
from tpplan.taken_models import TENSORS, takes_in_graphs


@takes_in_graphs(parameters=TENSORS, max_norm=NUMBER, norm_type=ORDER, error_if_nonfinite=FLAG, foreach=optional(FLAG))
@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place such that their norm, as if they were one vector, is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, for parameters sharded over any axes. Every rank of their meshes must call it
    with the same parameters; some may lack a gradient that others have.

    Args:
        parameters: whose gradients are scaled.
        max_norm: the norm that they may have.
        norm_type: the order of the norm, a number or `"inf"`.
        error_if_nonfinite: whether to raise if the norm isn't finite.
        foreach: whether to scale by one operation for all; None decides as torch does.

    Returns:
        The norm before, a plain tensor, the same on all ranks. It is summed in float32, or in float64 if a gradient has
        that, and has the gradients' dtype.

    Raises:
        RuntimeError: the norm isn't finite, and `error_if_nonfinite`.

    Example:
        >>> model = tpplan.parallelize(model, "auto", inputs=x)
        >>> model(x).sum().backward()
        >>> norm = tpplan.clip_grad_norm_(model.parameters(), 1.0)
        >>> norm.shape
        torch.Size([])
    """
    order = float(norm_type)
    listed: list[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients: list[Tensor | None] = [ShardedTensor.adopted(parameter.grad) for parameter in listed]
    there = [gradient for gradient in gradients if gradient is not None]
    total: Tensor = cast("Any", torch.linalg).vector_norm(_norms(listed, gradients, order), order)
    if there:
        total = total.to(there[0].device, _promoted(there))
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"The total norm of order {order} for gradients from `parameters` is non-finite, so it cannot be clipped. "
            "To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    scaled: Any = [_Scaled(local_of(gradient)) for gradient in there]
    torch.nn.utils.clip_grads_with_norm_(scaled, max_norm, total, foreach)
    return total


def _promoted(gradients: list[Tensor]) -> torch.dtype:
    dtype = gradients[0].dtype.to_real()
    for gradient in gradients:
        dtype = torch.promote_types(dtype, gradient.dtype.to_real())
    return dtype


class _Scaled:
    """What torch needs of a parameter to scale its gradient."""

    def __init__(self, gradient: Tensor) -> None:
        self.grad = gradient


def _norms(parameters: list[Tensor], gradients: list[Tensor | None], order: float) -> Tensor:
    """The norm of each gradient, over all ranks; a neutral number for one that no rank has."""
    owners = [p if gradient is None else gradient for p, gradient in zip(parameters, gradients, strict=True)]
    pieces = [_counted_once(gradient) for gradient in gradients]
    wide = any(owner.dtype.to_real() is torch.float64 for owner in owners)
    dtype = torch.float64 if wide else torch.float32
    devices = (o.device_mesh.device_type if isinstance(o, DTensor) else o.device for o in owners)
    neutral = torch.full((), math.inf if order < 0 else 0.0, dtype=dtype, device=next(devices, None))
    found = iter(foreach_norm([piece for piece in pieces if piece is not None], order, dtype))
    norms = torch.stack([neutral] + [neutral if piece is None else next(found).to(neutral.device) for piece in pieces])
    for group, places in _groups(owners):
        index = torch.tensor(places, device=norms.device) + 1
        norms[index] = _over(group, norms[index], order)
    return norms


def _counted_once(gradient: Tensor | None) -> Tensor | None:
    """The local elements of a gradient that this rank counts; None if there are none."""
    if isinstance(gradient, ShardedTensor):
        local = owned_elements(gradient)
    elif isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
        summed = [Replicate() if p.is_partial() else p for p in gradient.placements]
        local = local_of(gradient.redistribute(gradient.device_mesh, summed))
    elif gradient is not None:
        local = local_of(gradient)
    else:
        return None
    if not local.numel():
        return None
    return local.abs() if local.is_complex() else local


def _groups(tensors: list[Tensor]) -> list[tuple[dist.ProcessGroup, list[int]]]:
    """The groups over which elements are split, each with the places of the tensors that it splits."""
    named: dict[str, tuple[dist.ProcessGroup, list[int]]] = {}
    known: dict[tuple[DeviceMesh, tuple[Placement, ...]], list[list[int]]] = {}
    for place, tensor in enumerate(tensors):
        if not isinstance(tensor, DTensor):
            continue
        mesh, placements = tensor.device_mesh, tuple(tensor.placements)
        if (mesh, placements) not in known:
            groups = [mesh.get_group(axis) for axis in split_axes(tensor)]
            known[mesh, placements] = [named.setdefault(group.group_name, (group, []))[1] for group in groups]
        for places in known[mesh, placements]:
            places.append(place)
    return list(named.values())


def _over(group: dist.ProcessGroup, norms: Tensor, order: float) -> Tensor:
    """The norms of what the ranks of a group have together, of those that each has by itself."""
    if math.isinf(order):
        sign = 1 if order > 0 else -1
        # A maximum over ranks may lose what isn't a number.
        numbers = (norms * sign).masked_fill(norms.isnan(), -math.inf)
        sent = torch.stack([numbers, norms.isnan().to(norms.dtype)])
        dist.all_reduce(sent, dist.ReduceOp.MAX, group)
        return (sent[0] * sign).masked_fill(sent[1] > 0, math.nan)
    powers = norms if order == 0 else norms.pow(order)
    dist.all_reduce(powers, group=group)
    return powers if order == 0 else powers.pow(1 / order)


__all__ = ["clip_grad_norm_"]
