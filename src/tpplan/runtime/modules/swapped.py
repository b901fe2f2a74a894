"""Swapped: the class that a stock module is swapped for, by its own class and its style."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from tpplan.compat.autograd import recomputes
from tpplan.compat.modules import class_over, own_buffers, own_parameters
from tpplan.runtime.around.outside_forwards import serving_methods
from tpplan.runtime.compiled.compiled_entry import as_called, with_entry
from tpplan.runtime.modules.module_runtime import RUNTIME, ModuleRuntime
from tpplan.runtime.modules.sharded_modules import SHOWN, ShardedModule, ShardedRoot
from tpplan.runtime.parameters.saved_models import saving_methods


def replaces_body(module: nn.Module) -> bool:
    """Whether a module runs a body of tpplan's in place of its own, and of all inside."""
    runtime: ModuleRuntime | None = module.__dict__.get(RUNTIME)
    return runtime is not None and not runtime.replays and (runtime.body or runtime.layer) is not None


_PREFIX: dict[str | None, str] = {
    "colwise": "Colwise",
    "rowwise": "Rowwise",
    "vocab": "Vocabulary",
    "experts": "Shared",
    "sequence": "Sequence",
    "replicate": "Replicated",
    None: "Sharded",
}


class _OwnTensor:
    """A tensor of a module, as it is to everyone outside of the module's forward.

    An activation checkpoint of a part of a body reads it in a backward, where the local one isn't in the instance's
    `__dict__`, which comes first.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: nn.Module | None, kind: type[nn.Module]) -> Any:
        tables: tuple[dict[str, Any], ...] = ()
        if module is not None:
            tables = (own_parameters(module), own_buffers(module))
        table: dict[str, Any] | None = next((held for held in tables if self._name in held), None)
        if module is None or table is None:
            raise AttributeError(f"'{kind.__name__}' object has no attribute '{self._name}'")
        runtime: ModuleRuntime | None = module.__dict__.get(RUNTIME)
        if runtime is not None and recomputes() and torch.is_grad_enabled() and runtime.handed_out.shards is None:
            runtime.handed_out.recall()
            latest: ModuleRuntime = module.__dict__[RUNTIME]
            for owner, name, read in (*latest.reads, *latest.parts):
                if owner is module and name == self._name:
                    return read(table[name])
        return table[self._name]


@functools.cache
def swapped_class(
    stock: type[nn.Module], style: str | None, root: bool, tensors: tuple[str, ...] = ()
) -> type[nn.Module]:
    """The class to swap `stock` for, shown as `ColwiseLinear` for `Linear`; one class for each combination.

    It has the stock one's name, which bodies may ask for.

    Args:
        stock: the class that the user wrote.
        style: the plan's style of the module.
        root: whether the module is the model itself.
        tensors: the module's own, which its body reads.
    """
    base: type[ShardedModule] = ShardedRoot if root else ShardedModule
    methods = serving_methods(stock, _is_outside) | saving_methods(stock) if root else {}
    own = {"forward": as_called(base.forward, stock.forward), "__module__": stock.__module__, "__doc__": stock.__doc__}
    own[SHOWN] = shown = f"{_PREFIX[style]}{stock.__name__}"
    own["__qualname__"] = stock.__qualname__  # by `str` of a class transformers looks up which outputs it can record
    read = {held: _OwnTensor(held) for held in tensors if not hasattr(stock, held)}
    made = with_entry(class_over(shown, base, stock, methods | own | read), base.forward)
    made.__name__ = stock.__name__  # from now on: a registry of the stock class's may go by the names of classes
    return made


def _is_outside(module: nn.Module) -> bool:
    """Whether no forward of this root is under way."""
    runtime: ModuleRuntime | None = module.__dict__.get(RUNTIME)
    return runtime is not None and runtime.handed_out.shards is None


__all__ = ["replaces_body", "swapped_class"]
