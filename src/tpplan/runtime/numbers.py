"""Numbers that Python takes of DTensors, those of the whole, on all ranks; and numbers that it writes into them.

torch takes a rank's own number of a norm that isn't summed yet, `gradient.norm().item()`, and asks for infinities only
the ranks that split the first gradient of a list. Optimizers and loops that do so would go on by other numbers on each
rank. On CPU it draws the same numbers for each rank's part, and `tensor.data = other` changes nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tpplan.compat import OpOverload, copy_without_gradients, handle_operator, handler_of, let_data_be_set, local_of
from tpplan.runtime.packed_operations import split_first

_NUMBER = torch.ops.aten._local_scalar_dense.default
_ANY = torch.ops.aten._is_any_true.default  # asked by anomaly mode
_RESCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


@functools.cache
def take_whole_numbers() -> None:
    """From now on let DTensors give the whole's numbers."""
    rescaled = handler_of(_RESCALE)

    def rescale(operator: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return rescaled(operator, (split_first(args[0]), *args[1:]), keywords)

    handle_operator(_NUMBER, _number)
    handle_operator(_RESCALE, rescale)
    handle_operator(_ANY, lambda operator, args, keywords: operator(local_of(args[0])))


@functools.cache
def write_whole_numbers(device: str) -> None:
    """From now on let numbers be written into DTensors on `device` as into the whole tensors."""
    let_data_be_set()
    copy_without_gradients()
    if device == "cpu":  # elsewhere torch draws a part's numbers as those of the whole
        for name in ("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_"):
            handle_operator(getattr(torch.ops.aten, name).default, _draw)
        handle_operator(torch.ops.aten.bernoulli_.float, _draw)


def _draw(operator: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Draw the whole, on all ranks, and keep a part; what FSDP has cut in stretches is drawn as by torch."""
    target: DTensor = args[0]
    if not all(placement.is_replicate() or type(placement) is Shard for placement in target.placements):
        operator(local_of(target), *args[1:], **keywords)
        return target
    drawn = operator(torch.empty(target.shape, dtype=target.dtype, device=target.device), *args[1:], **keywords)
    part = distribute_tensor(drawn, target.device_mesh, target.placements, src_data_rank=None)
    local_of(target).copy_(local_of(part))
    return target


def _number(operator: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    tensor: DTensor = args[0]
    whole = all(placement.is_replicate() for placement in tensor.placements)
    return operator(local_of(tensor) if whole else tensor.full_tensor())


__all__ = ["take_whole_numbers", "write_whole_numbers"]
