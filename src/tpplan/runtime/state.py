"""State: parameters whose packs DTensor can't tell of, in a state_dict as the stock model has them.

Their DTensor knows only a plain shard, whose concatenation is in the ranks' order. A state_dict therefore holds them
whole, replicated and in the stock order, and takes them from there again. Making it is a collective: every rank must.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from tpplan.compat import local_of, new_distributed_tensor
from tpplan.compiler.ir.layout import Layout
from tpplan.runtime.communicator import Communicator
from tpplan.runtime.segments import in_packs, padded, taken


def whole_of(tensor: Tensor, layout: Layout | None) -> Tensor:
    """The whole of a parameter in the stock order, plain; a collective if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    detached = tensor.detach()
    assert isinstance(detached, DTensor)
    size = tensor.device_mesh.size()
    if layout is None or layout.dim is None or not layout.is_in_rank_order(size):
        return detached.full_tensor()
    count = tensor.shape[layout.dim]
    if not layout.is_even(count, size):  # DTensor would take the parts of a plain shard for granted
        longest = padded(local_of(detached), layout.dim, layout.local_size(count, size, 0))
        detached = DTensor.from_local(longest, tensor.device_mesh, tensor.placements, run_check=False)
    return in_packs(detached.full_tensor(), layout.dim, layout.packs, size)


def to_stock_order(
    packs: Mapping[str, Layout], axis: Communicator, module: nn.Module, state: dict[str, Any], prefix: str, _: object
) -> None:
    """A hook on `state_dict`: whole tensors in the stock order, as replicated DTensors."""
    for leaf, layout in packs.items():
        held = state.get(prefix + leaf)
        if layout.is_in_rank_order(axis.size) and isinstance(held, DTensor) and not held.is_meta:
            with torch.no_grad():
                whole = whole_of(held, layout)
            state[prefix + leaf] = DTensor.from_local(whole, held.device_mesh, [Replicate()], run_check=False)


def from_stock_order(
    packs: Mapping[str, Layout], axis: Communicator, module: nn.Module, state: dict[str, Any], prefix: str, *_: object
) -> None:
    """A hook on `load_state_dict`: this rank's part of what `to_stock_order` wrote."""
    for leaf, layout in packs.items():
        held, parameter = state.get(prefix + leaf), getattr(module, leaf)
        if not layout.is_in_rank_order(axis.size) or held is None or layout.dim is None:
            continue
        replicated = not isinstance(held, DTensor) or all(p.is_replicate() for p in held.placements)
        if replicated and isinstance(parameter, DTensor) and held.shape == parameter.shape:
            intervals = layout.intervals(held.shape[layout.dim], axis.size, axis.rank)
            part = taken(local_of(held).detach(), layout.dim, intervals).contiguous()
            state[prefix + leaf] = new_distributed_tensor(part, parameter)


__all__ = ["from_stock_order", "to_stock_order", "whole_of"]
