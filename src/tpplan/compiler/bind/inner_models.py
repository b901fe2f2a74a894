"""Wrapped models: modules that hold nothing but the model that a plan was written for.

in:  a model
out: the names of the modules inside it that are the whole of it, from the outside in

    PeftModel(LoraModel(LlamaForCausalLM))   ->   `base_model`, `base_model.model`
    LlamaForCausalLM(LlamaModel, lm_head)    ->   none: its head is a linear layer beside the rest
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tpplan.compat.modules import own_parameters

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_BESIDE = 10  # of what a model holds beside the wrapped one: less than a tenth of that, such as a learnt prompt


def wrapped_models(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that `model` only wraps, each by its name, from the outside in."""
    name, module = "", model
    while True:
        held = {leaf: child for leaf, child in module.named_children() if _has_matrices(child)}
        if len(held) != 1:
            return
        (leaf, child), *_ = held.items()
        if isinstance(child, _LISTS) or _size_beside(module, child) * _BESIDE >= _size(child):
            return
        name, module = f"{name}.{leaf}".lstrip("."), child
        yield name, module


def _has_matrices(module: nn.Module) -> bool:
    """Whether anything in a module may be a linear layer: a parameter of two dims that is no embedding table."""
    return any(
        parameter is not None and parameter.dim() > 1
        for inner in module.modules()
        if not isinstance(inner, nn.Embedding)
        for parameter in own_parameters(inner).values()
    )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _size_beside(module: nn.Module, child: nn.Module) -> int:
    shared = set(child.parameters())
    return sum(parameter.numel() for parameter in module.parameters() if parameter not in shared)


__all__ = ["wrapped_models"]
