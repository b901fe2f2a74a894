"""The call that is verified: the example's tensors, with numbers.

Tensors with numbers are taken as they are. For those on `meta`, and for fake ones, numbers are made up: normal for
floating tensors, random token ids within the vocabulary, masks that hide one position, positions in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from tpplan.compiler.trace.signatures import argument_names
from tpplan.parity.tree import map_tensors, path_name, tensors_in


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call of the model."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def clone(self) -> Call:
        """A call with tensors of its own, so that a body that writes to them disturbs nobody."""

        def own(_: str, tensor: Tensor) -> Tensor:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)

        return Call(map_tensors(self.arguments, own), map_tensors(dict(self.keywords), own))

    def differentiable(self) -> dict[str, Tensor]:
        """The tensors that want a gradient, by name."""
        named = [*tensors_in(self.arguments), *tensors_in(self.keywords)]
        return {path_name(path): tensor for path, tensor in named if tensor.requires_grad}


def call_with_numbers(
    model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any], dtype: torch.dtype, seed: int
) -> Call:
    """The example call of `model` with numbers, on the CPU, floating tensors in `dtype`."""
    generator = torch.Generator().manual_seed(seed + 1)
    vocabulary = _vocabulary(model)
    types = getattr(getattr(model, "config", None), "type_vocab_size", None) or 1

    def made(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_meta and type(tensor).__name__ != "FakeTensor":
            numbers = tensor.detach().to("cpu", copy=True)
        elif tensor.is_floating_point():
            numbers = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        else:
            numbers = _whole_numbers(name, tensor, types if "type" in name else vocabulary, generator)
        numbers = numbers.to(dtype if tensor.is_floating_point() else tensor.dtype)
        return numbers.requires_grad_(tensor.requires_grad)

    names = argument_names(type(model).forward)
    positional = tuple(
        map_tensors(argument, made, names[index] if index < len(names) else "")
        for index, argument in enumerate(arguments)
    )
    return Call(positional, map_tensors(dict(keywords), made))


def _whole_numbers(name: str, like: Tensor, bound: int, generator: Generator) -> Tensor:
    shape = tuple(like.shape)
    if like.dtype is torch.bool or "mask" in name:
        shown = torch.ones(shape)
        if shown.dim() == 2 and shape[1] > 1:
            shown[0, -1] = 0
        return shown
    if "position" in name:
        return torch.arange(shape[-1] if shape else 1).expand(shape)
    return torch.randint(bound, shape, generator=generator)


def _vocabulary(model: nn.Module) -> int:
    """A bound for made-up token ids."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(size, int) and size > 0:
        return size
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return min(tables, default=2)
