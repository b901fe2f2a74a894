"""States of optimizers, as those of the unsharded model have them: whole tensors, by the parameter's number.

    saved     {"state": {0: {"exp_avg": (64, 32)}}}        on every rank, of which one writes it
    loaded    {"state": {0: {"exp_avg": DTensor}}}         this rank's part, as the parameter's

So a run may be resumed over more ranks or fewer, or unsharded.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from tpplan.runtime.parameters.whole_states import part_like
from tpplan.training.sharding import TrainingError, refusal


def has_parts(optimizer: Optimizer) -> bool:
    """Whether some of an optimizer's parameters are DTensors."""
    return any(isinstance(held, DTensor) for group in optimizer.param_groups for held in group["params"])


def refuse_plain(optimizer: Optimizer) -> None:
    """Refuse an optimizer that can't step on DTensors, by a step on a small one. Every rank must call it.

    Raises:
        TrainingError: TP191.
    """
    kind: Any = type(optimizer)
    held = next((p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)), None)
    if held is None:
        return
    names = inspect.signature(kind).parameters
    options = {name: option for name, option in optimizer.defaults.items() if name in names}
    mesh = held.device_mesh
    local = torch.ones(2, 2, dtype=held.dtype, device=held.device)
    small, gradient = (DTensor.from_local(local.clone(), mesh, [Shard(0)] * mesh.ndim) for _ in range(2))
    parameter = nn.Parameter(small)
    try:
        trial = kind([parameter], **options)
    except Exception:  # it is made in another way
        return
    parameter.grad = gradient
    try:
        trial.step()
    except Exception as error:
        raise refusal(
            f"the optimizer `{kind.__name__}` can't step on the DTensors of a sharded model: {_first_line(error)}",
            "use another one: optim='adamw_torch', 'adamw_torch_fused' or 'sgd'",
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def whole_state(held: Any, keep: bool = True) -> Any:
    """A state_dict with whole tensors in place of DTensors, in main memory. Every rank must call it.

    Args:
        held: the state_dict, or an item of it.
        keep: whether this rank wants them; None takes their place otherwise.
    """
    if isinstance(held, DTensor):
        whole = held.full_tensor()
        return whole.detach().cpu() if keep else None
    if isinstance(held, dict):
        return {name: whole_state(item, keep) for name, item in cast("dict[Any, Any]", held).items()}
    if isinstance(held, (list, tuple)):
        items = [whole_state(item, keep) for item in cast("list[Any]", held)]
        return items if isinstance(held, list) else tuple(items)
    return held


def parts_of_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A state_dict with this rank's parts of whole tensors.

    Raises:
        TrainingError: TP193, a tensor has another shape than its parameter.
    """
    numbered = [number for group in state["param_groups"] for number in group["params"]]
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_number = dict(zip(numbered, held, strict=False))  # torch itself refuses another number of parameters
    cut: dict[Any, Any] = {}
    for number, of in state["state"].items():
        parameter = by_number.get(number)
        cut[number] = {name: _part(f"`{name}` of parameter {number}", item, parameter) for name, item in of.items()}
    return state | {"state": cut}


def _part(shown: str, held: Any, parameter: Tensor | None) -> Any:
    if (
        not isinstance(parameter, DTensor)
        or not isinstance(held, Tensor)
        or isinstance(held, DTensor)
        or not held.dim()
    ):
        return held
    if held.shape == parameter.shape:
        return part_like(held.to(parameter.device), parameter)
    if held.dim() == parameter.dim():
        raise TrainingError.of(
            "TP193",
            f"{shown} has shape {tuple(held.shape)}, and the parameter {tuple(parameter.shape)}",
            help="a state is loaded whole; save it by `Accelerator.save_state`, by the Trainer, or by "
            "get_optimizer_state_dict(…, full_state_dict=True)",
        )
    mesh = parameter.device_mesh
    return DTensor.from_local(held.to(parameter.device), mesh, [Replicate()] * mesh.ndim, run_check=False)


__all__ = ["has_parts", "parts_of_state", "refuse_plain", "whole_state"]
