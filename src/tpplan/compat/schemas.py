# pyright: reportPrivateUsage=false
"""What an operator's schema says: names, defaults, what it writes to and returns views of."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

__all__ = [
    "TORCH_NAMESPACES",
    "_ADD_",
    "_DETACH",
    "_VIEWS",
    "OpOverload",
    "OpOverloadPacket",
    "is_autocast_on_cuda",
    "is_random",
    "qualified_name",
    "schema_argument_names",
    "schema_defaults",
    "schema_keywords",
    "schema_lists",
    "schema_mutates",
    "schema_returns_view",
    "takes_device",
    "tensor_arguments",
    "written_tensors",
    "written_values",
]


_VIEWS = ("aten::view", "aten::_unsafe_view", "aten::reshape")


TORCH_NAMESPACES = ("aten", "prims")
"""Those of torch's own operators."""


@functools.cache
def schema_mutates(operator: OpOverload) -> tuple[int, ...]:
    """Positions of the arguments that `operator` writes to. For every torch."""
    return tuple(
        position
        for position, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.cache
def written_tensors(operator: OpOverload) -> tuple[int, ...]:
    """Of an operator's tensor arguments, those that it writes to and doesn't return.

    Of torch's own they are looked at where nothing is returned, as of `_foreach_add_`: what others write beside their
    result is known where they are. For every torch.
    """
    returns = operator._schema.returns
    if operator.namespace in (*TORCH_NAMESPACES, "c10d_functional", "_c10d_functional") and returns:
        return ()
    names, _ = tensor_arguments(operator)
    returned = {name for held in returns if (alias := held.alias_info) is not None for name in alias.before_set}
    arguments = operator._schema.arguments
    held = [(arguments[place].name, arguments[place].alias_info) for place in schema_mutates(operator)]
    written = [name for name, alias in held if alias is None or returned.isdisjoint(alias.before_set)]
    return tuple(names.index(name) for name in written if name in names)


def written_values(operator: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """What a call writes to and doesn't return, in the order of `written_tensors`; None for what it isn't given.

    What is in a list is there by itself. For every torch.
    """
    places = written_tensors(operator)
    if not places:
        return []
    names = tensor_arguments(operator)[0]
    given = {**dict(zip(schema_argument_names(operator), args, strict=False)), **keywords}
    found = [given.get(names[place]) for place in places]
    return [item for held in found for item in (held if isinstance(held, (list, tuple)) else (held,))]  # pyright: ignore


def qualified_name(packet: OpOverloadPacket) -> str:
    """`my::attn`, of all overloads together. For every torch."""
    return str(packet._qualified_op_name)


@functools.cache
def tensor_arguments(operator: OpOverload) -> tuple[tuple[str, ...], int | None]:
    """The names of an operator's tensor arguments, lists of tensors too, and how many tensors it returns.

    The number is None where a result is a list. For every torch.
    """
    schema = operator._schema
    names = tuple(held.name for held in schema.arguments if "Tensor" in str(held.type))
    lists = any("List" in str(held.type) for held in schema.returns)
    return names, None if lists else sum("Tensor" in str(held.type) for held in schema.returns)


@functools.cache
def schema_returns_view(operator: OpOverload) -> bool:
    """Whether a result of `operator` shares storage with an operand. For every torch."""
    return any(result.alias_info is not None for result in operator._schema.returns)


@functools.cache
def schema_argument_names(operator: OpOverload) -> tuple[str, ...]:
    """The names of the operator's arguments, in order. For every torch."""
    return tuple(argument.name for argument in operator._schema.arguments)


_DETACH, _ADD_ = torch.ops.aten.detach.default, torch.ops.aten.add_.Tensor


def is_random(operator: OpOverload) -> bool:
    """Whether it makes a tensor, and may draw random numbers to do so. For every torch."""
    returned = [argument.type.kind() for argument in operator._schema.returns]
    return torch.Tag.nondeterministic_seeded in operator.tags and "TensorType" in returned


def schema_defaults(operator: OpOverload) -> tuple[tuple[str, Any], ...]:
    """The names of its arguments, with their defaults; None for those without one. For every torch."""
    return tuple((argument.name, argument.default_value) for argument in operator._schema.arguments)


def schema_lists(operator: OpOverload) -> tuple[str, ...]:
    """The names of the arguments that are lists, such as sizes. For every torch."""
    return tuple(a.name for a in operator._schema.arguments if str(a.type).startswith("List["))


def schema_keywords(operator: OpOverload) -> frozenset[str]:
    """The names of the arguments that can't be passed by position. For every torch."""
    return frozenset(argument.name for argument in operator._schema.arguments if argument.kwarg_only)


def takes_device(operator: OpOverload) -> bool:
    """Whether it makes a tensor on a device that it is told. For every torch."""
    return any(argument.name == "device" for argument in operator._schema.arguments)


@functools.cache
def is_autocast_on_cuda(operator: str) -> bool:
    """Whether an operator of aten has a dtype of its own under CUDA's autocast; `rms_norm` from torch 2.13 on.

    For every torch.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", "AutocastCUDA")
