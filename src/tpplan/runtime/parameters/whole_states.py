"""State: whole tensors, such as a stock model's, taken by a sharded model's `load_state_dict`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tpplan.compat.dtensors import local_of, made_dtensor
from tpplan.compat.modules import own_tensors
from tpplan.runtime.parameters.packed_tensors import PackedTensor
from tpplan.runtime.parameters.sharded_tensors import ShardedTensor, part_of


def take_parts(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """A hook before a module's `load_state_dict`: of whole tensors, this rank's parts."""
    for leaf, parameter in own_tensors(module).items():
        held = state.get(prefix + leaf)
        if isinstance(parameter, DTensor) and isinstance(held, Tensor) and held.shape == parameter.shape:
            whole = _whole(ShardedTensor.adopted(held), parameter)
            if whole is not None:
                state[prefix + leaf] = part_like(whole, parameter, bool(metadata.get("assign_to_params_buffers")))


def part_like(whole: Tensor, parameter: DTensor, copy: bool = True) -> DTensor:
    """What this rank holds of `whole`, where it holds what it does of `parameter`, which has the same shape.

    Args:
        whole: a plain tensor.
        parameter: says who holds what.
        copy: whether the part must keep nothing of the whole alive.
    """
    part = part_of(parameter).of(whole.detach())
    if copy:
        part = part.clone(memory_format=torch.contiguous_format)
    kind = PackedTensor if isinstance(parameter, PackedTensor) else ShardedTensor
    return made_dtensor(kind, part, parameter.device_mesh, parameter.placements, parameter.shape)


def _whole(held: Tensor, parameter: DTensor) -> Tensor | None:
    """The whole of a tensor from a state that doesn't lie as `parameter` does; None if torch can take it as it is."""
    if not isinstance(held, DTensor):
        return held
    if held.placements != parameter.placements:
        return held.full_tensor() if isinstance(parameter, PackedTensor) else None
    # For a model on `meta`, torch has put the whole in the part's place.
    local = local_of(held)
    stuffed = isinstance(held, PackedTensor) and local.shape == held.shape and held.part.shape != tuple(local.shape)
    return local if stuffed else None


def without_replicas(model: nn.Module) -> nn.Module:
    """The model itself, of one in a DistributedDataParallel, which puts a prefix before its names."""
    while isinstance(model, DistributedDataParallel):
        model = cast("nn.Module", model.module)
    return model


__all__ = ["part_like", "part_of", "take_parts", "without_replicas"]
