"""`save_pretrained` of transformers' models, for sharded ones: of the stock class, with whole tensors.

It knows of no sharding but transformers' own, and would write parts, under the name of the sharded class. That of a
model that wraps a sharded one, such as peft's, writes some of its tensors, which are gathered as it asks for them.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.compat.modules import own_modules
from tpplan.runtime.around.adapters import telling_methods
from tpplan.runtime.ranks.faults import naming_ranks


def saving_methods(stock: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """`save_pretrained`, for a class that has it."""
    saves = getattr(stock, "save_pretrained", None)
    if not callable(saves):
        return {}

    def save_pretrained(self: nn.Module, *args: Any, state_dict: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """As the stock model's. Every rank must call it; the first one gathers the whole model in main memory.

        `tpplan.save_weights` writes the same folder without that.
        """
        first = not dist.is_initialized() or dist.get_rank() == 0
        state = whole_state_of(self, first) if state_dict is None else state_dict
        result = saves(_stock_twin(self, stock), *args, state_dict=state, **kwargs)
        _await_others()
        return result

    return {"save_pretrained": save_pretrained}


def wrapper_class(stock: type[nn.Module], path: tuple[str, ...], inner: type[nn.Module]) -> type[nn.Module]:
    """A class like `stock`, of modules that wrap a sharded model, which saves whole tensors, if it saves any.

    Args:
        stock: the class.
        path: the names that lead from a module of it to the sharded model.
        inner: the stock class of that.
    """
    own = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    own |= telling_methods(stock, path)
    saves = getattr(stock, "save_pretrained", None)
    if not callable(saves):
        return type(stock.__name__, (stock,), own)

    def save_pretrained(self: nn.Module, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
        """As the stock model's. Every rank must call it; the first one writes."""
        first = not dist.is_initialized() or dist.get_rank() == 0
        kwargs.setdefault("is_main_process", first)
        state = _WholeOnes(self.state_dict(keep_vars=True)) if state_dict is None else state_dict
        with torch.no_grad():
            result = saves(_twin_around(self, stock, path, inner), *args, state_dict=state, **kwargs)
        _await_others()
        return result

    return type(stock.__name__, (stock,), {**own, "save_pretrained": functools.wraps(saves)(save_pretrained)})


def _await_others() -> None:
    """What a rank returns from has been written."""
    if dist.is_initialized():
        with naming_ranks("the meeting at the end of `save_pretrained`"):
            dist.barrier()


class _WholeOnes(dict[str, Any]):
    """A state_dict whose tensors are gathered when they are read, on all ranks alike."""

    def __getitem__(self, name: str) -> Any:
        return _gathered(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        """As of any dict, gathered."""
        return _gathered(super().get(name, default))

    def items(self) -> Any:
        """As of any dict, gathered one after the other."""
        return ((name, self[name]) for name in self)

    def values(self) -> Any:
        """As of any dict, gathered one after the other."""
        return (self[name] for name in self)


def _gathered(value: Any) -> Any:
    whole: Any = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach() if isinstance(whole, Tensor) else whole


def _twin_around(model: nn.Module, stock: type[nn.Module], path: tuple[str, ...], inner: type[nn.Module]) -> Any:
    """A wrapper with the same modules, of its stock class, around a model of its stock class."""
    twin = cast("Any", stock.__new__(stock))
    twin.__dict__.update(model.__dict__)
    first, *rest = path
    child: nn.Module = getattr(model, first)
    below = _twin_around(child, type(child), tuple(rest), inner) if rest else _stock_twin(child, inner)
    twin.__dict__["_modules"] = {n: below if n == first else held for n, held in own_modules(model).items()}
    return twin


def _stock_twin(model: nn.Module, stock: type[nn.Module]) -> Any:
    """The same model as one of the stock class, with a config that may be written to."""
    twin = cast("Any", stock.__new__(stock))
    twin.__dict__.update(model.__dict__)
    if "config" in twin.__dict__:
        twin.__dict__["config"] = copy.deepcopy(twin.__dict__["config"])
    return twin


def whole_state_of(model: nn.Module, keep: bool) -> dict[str, Any]:
    """The whole state_dict in main memory, tied tensors as one; {} where it isn't to be kept.

    Every rank must call it.
    """
    own = dict(model.named_parameters(remove_duplicate=False))  # tied in a state only while they require grad
    whole: dict[int, Any] = {}
    state: dict[str, Any] = OrderedDict()  # by which accelerate knows a model's state
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            key = id(own.get(name, value))
            if key not in whole:
                gathered: Any = value.full_tensor() if isinstance(value, DTensor) else value
                plain: Any = gathered.detach().cpu() if isinstance(gathered, Tensor) else gathered
                whole[key] = plain if keep else None
            if keep:
                state[name] = whole[key]
    return state


__all__ = ["saving_methods", "whole_state_of"]
