"""Outside: what a model's own code does with parameters elsewhere than in a forward, as some models' `generate` does.

    tokens = self.query_tokens.expand(batch, -1, -1)     a DTensor, as the parameter is to everyone outside
    self.encoder(torch.cat([tokens, embeddings], 1))     with plain tensors, which are equal on all ranks

There a plain tensor counts as a replicated one, and a module that is called with a DTensor gets the whole tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from tpplan.compiler.ir.pytree import leaves
from tpplan.runtime.classes.split_logits import SplitLogits, wholes


def whole(held: Any) -> Any:
    """A tensor in place of a DTensor."""
    return held.full_tensor() if isinstance(held, DTensor) else held


def whole_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call that comes from outside of the root's forward."""
    if not any([issubclass(kind, DTensor) for kind in {*map(type, args), *map(type, kwargs.values())}]):
        return args, kwargs
    return tuple([whole(held) for held in args]), {name: whole(held) for name, held in kwargs.items()}


def serving_methods(stock: type[nn.Module], is_outside: Callable[[nn.Module], bool]) -> dict[str, Callable[..., Any]]:
    """The public methods of a class but `forward`, such that DTensors and plain tensors can meet while they run.

    Args:
        stock: the class that the user wrote.
        is_outside: whether no forward of the model is under way: in one, no DTensor is dispatched.
    """
    members: dict[str, Any] = {}
    for kind in reversed([kind for kind in stock.__mro__ if not issubclass(nn.Module, kind)]):
        members |= vars(kind)  # what a subclass overrides, by a static method or a property too, stays overridden
    return {
        name: _serving(stock, name, member, is_outside)
        for name, member in members.items()
        if isinstance(member, FunctionType) and not name.startswith("_") and name != "forward"
    }


def _compare(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hold a prompt against that of the other ranks: each of the many calls that follow would be wrong, or wait."""
    guard: Any = model.__dict__["_tpplan"].guard
    if guard is not None:
        config: Any = kwargs.get("generation_config") or getattr(model, "generation_config", None)
        draws = bool(kwargs.get("do_sample", getattr(config, "do_sample", False)))
        guard.require_alike_prompt(args, kwargs, draws)


def _without_parts(result: Any) -> Any:
    """A result with whole logits: every rank is here, which may not be so where the caller looks at them."""
    return wholes(result) if any(isinstance(item, SplitLogits) for _, item in leaves(result)) else result


# Whether such a method runs in this thread (or task): in another one, another model may be called at the same time.
_serves: ContextVar[bool] = ContextVar("tpplan serves", default=False)


def serves() -> bool:
    """Whether such a method runs, as `generate` does."""
    return _serves.get()


@contextmanager
def serving() -> Generator[None]:
    """A block in which calls without gradients return whole results, as they do for `generate`."""
    token = _serves.set(True)
    try:
        yield
    finally:
        _serves.reset(token)


def _serving(
    stock: type[nn.Module], name: str, known: FunctionType, is_outside: Callable[[nn.Module], bool]
) -> Callable[..., Any]:

    @functools.wraps(known)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        method = getattr(stock, name, known)  # which may have been replaced since
        if not is_outside(self) or _serves.get():
            return method(self, *args, **kwargs)
        if name == "generate":
            _compare(self, args, kwargs)
        with serving():
            return _without_parts(method(self, *args, **kwargs))

    return call


__all__ = ["serves", "serving", "serving_methods", "whole", "whole_arguments"]
