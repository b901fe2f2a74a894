"""Whether a model is what it was before it was compiled: numbers, attributes, hooks, mode, and random streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Any]


def state_of(model: nn.Module) -> State:
    """Everything that a compiler could have changed."""
    state: State = {"random stream": torch.get_rng_state(), "gradient mode": torch.is_grad_enabled()}
    for name, module in model.named_modules():
        state[f"class of {name}"] = type(module)
        for key, value in vars(module).items():
            if key == "_modules":
                value = {child: id(item) for child, item in module._modules.items()}
            state[f"{name}.{key}"] = _copy(value)
    return state


def changes(before: State, after: State) -> list[str]:
    """The names of what differs."""
    return [name for name in {**before, **after} if not _same(before.get(name), after.get(name))]


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        gradient = None if value.grad is None or not value.is_leaf else value.grad.clone()
        return (id(value), value.detach().clone(), value.requires_grad, gradient)
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(item) for item in value]
    if isinstance(value, (bool, int, float, str, set, frozenset, type(None))):
        return value
    return id(value)


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
