"""A copy of the user's model without its numbers: same modules and attributes, every tensor on the meta device.

in:  the user's model, materialised or on `meta`; it is only read
out: `Skeleton`: a deep copy whose parameters and buffers are meta tensors, with the names they go by
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tpplan.compat import own_buffers

# A module holds a dozen tables of hooks, nearly all of them empty: copying those in full would take most of the time.
_TABLES = (dict, OrderedDict, set)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A numberless copy of a model.

    Attributes:
        model: the copy.
        parameters: every distinct parameter of the copy, with all names it goes by.
    """

    model: nn.Module
    parameters: tuple[tuple[Tensor, tuple[str, ...]], ...]


def make_skeleton(model: nn.Module, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Skeleton:
    """Copy `model` onto the meta device.

    Args:
        model: the stock model; not changed.
        shapes: local shapes by parameter name, for parameters that differ from the stock model's.
    """
    memo: dict[int, object] = {}
    names: dict[int, list[str]] = {}
    parameters: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        if id(parameter) not in parameters:
            shape = (shapes or {}).get(name, tuple(parameter.shape))
            meta = torch.empty(shape, dtype=parameter.dtype, device="meta")
            parameters[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    memo.update(parameters)
    for module in model.modules():
        for held in (*own_buffers(module).values(), *vars(module).values()):
            _memoise_tensors(held, memo)
            if type(held) in _TABLES and not held:
                memo[id(held)] = type(held)()
    duplicate = copy.deepcopy(model, memo)
    return Skeleton(duplicate, tuple((parameters[key], tuple(held)) for key, held in names.items()))


def _memoise_tensors(held: object, memo: dict[int, object]) -> None:
    if isinstance(held, Tensor):
        if id(held) not in memo:
            memo[id(held)] = _to_meta(held)
    elif isinstance(held, (list, tuple)):
        for item in held:  # pyright: ignore[reportUnknownVariableType]
            if isinstance(item, Tensor):
                _memoise_tensors(item, memo)


def _to_meta(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu" and not isinstance(tensor, nn.Parameter) and tensor.dim() == 0:
        return tensor.detach()  # a scalar constant: the model may read its value
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
