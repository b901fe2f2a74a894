"""What a call leaves behind, as plain numbers by name, and how two such lists differ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Values = dict[str, Any]


def tensors(value: Any) -> list[Tensor]:
    """All tensors in a result or an argument."""
    return [leaf for _, leaf in leaves(value, "") if isinstance(leaf, Tensor)]


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every leaf of a result with its path, whatever the containers are."""
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif dataclasses.is_dataclass(value):
        items = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif isinstance(value, SimpleNamespace) or getattr(value, "is_container", False):
        items = vars(value).items()
    else:
        yield path, value
        return
    yield f"{path}:type", type(value).__name__
    for key, item in items:
        yield from leaves(item, f"{path}.{key}")


def whole(value: Any) -> Any:
    """A copy without shards. Every process must ask for the same ones in the same order."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().to_dense()
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()


def loss(result: Any) -> Tensor | None:
    """A number that depends on each element of each floating result in its own way."""
    total: Tensor | None = None
    for tensor in tensors(result):
        if not (tensor.requires_grad and tensor.is_floating_point()):
            continue
        weights = torch.arange(tensor.numel(), dtype=torch.float64).cos().reshape(tensor.shape)
        part = (tensor.double() * weights).sum()
        total = part if total is None else total + part
    return total


def after_forward(result: Any) -> Values:
    """The results."""
    return {f"result{path}": whole(leaf) for path, leaf in leaves(result, "")}


def after_backward(model: nn.Module, arguments: Any) -> Values:
    """Gradients, parameters, buffers and arguments as they are now."""
    values: Values = {}
    for name, parameter in model.named_parameters():
        values[f"parameter {name}"] = whole(parameter)
        values[f"gradient of {name}"] = whole(parameter.grad)
    for name, buffer in model.named_buffers():
        values[f"buffer {name}"] = whole(buffer)
    for path, leaf in leaves(arguments, ""):
        values[f"argument{path}"] = whole(leaf)
        if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.requires_grad:
            values[f"gradient of argument{path}"] = None if leaf.grad is None else whole(leaf.grad)
    return values


def attributes(model: nn.Module) -> Values:
    """Tensors and plain numbers that modules keep, besides parameters and buffers."""
    values: Values = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, (Tensor, int, float, str)) and not key.startswith("_"):
                values[f"attribute {name}.{key}"] = whole(value)
    return values


def written(values: Values, before: Values) -> Values:
    """Those attributes that aren't what they were."""
    return {name: value for name, value in values.items() if name not in before or _differ("", value, before[name], 0)}


def difference(ours: Values, theirs: Values, tolerance: float) -> str:
    """The first difference in words; empty if there is none."""
    for name in [*theirs, *(name for name in ours if name not in theirs)]:
        if name not in ours or name not in theirs:
            return f"{name} is there only {'with' if name in ours else 'without'} shards"
        words = _differ(name, ours[name], theirs[name], tolerance)
        if words:
            return words
    return ""


def _differ(name: str, ours: Any, theirs: Any, tolerance: float) -> str:
    if name.startswith("gradient"):  # none and zeros say the same
        ours = torch.zeros_like(theirs) if ours is None and theirs is not None else ours
        theirs = torch.zeros_like(ours) if theirs is None and ours is not None else theirs
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor):
        if type(ours) is not type(theirs):
            return f"{name} is a {type(ours).__name__}, not a {type(theirs).__name__}"
        same = not isinstance(theirs, (int, str, bool, float)) or ours == theirs
        if isinstance(theirs, float) and isinstance(ours, float):
            near = math.isclose(ours, theirs, rel_tol=tolerance, abs_tol=tolerance)
            same = near or (math.isnan(ours) and math.isnan(theirs))
        return "" if same else f"{name} is {ours}, not {theirs}"
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{name} is {ours.dtype} {list(ours.shape)}, not {theirs.dtype} {list(theirs.shape)}"
    if not theirs.numel():
        return ""
    if not theirs.is_floating_point():
        return "" if torch.equal(ours, theirs) else f"{name} differs"
    a, b = ours.double(), theirs.double()
    if not torch.equal(a.isnan(), b.isnan()):
        return f"{name} has other NaN"
    error = float((a - b).nan_to_num(0.0).abs().max())
    scale = float(b.nan_to_num(0.0).abs().max())
    return "" if error <= tolerance * max(1.0, scale) else f"{name} is off by {error:.2g} of {scale:.2g}"
