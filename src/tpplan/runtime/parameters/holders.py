"""Holders: what keeps a model's parameters beside its modules goes on with the sharded ones.

    optimizer = AdamW(model.parameters())           made before
    model = tpplan.parallelize(model, plan)         the optimizer's groups and state hold the sharded parameters now

Lists, dicts, sets, tuples, attributes and closures are given the sharded parameter in the place of the stock one, and
an optimizer's state each rank's part. A local variable can't be: what it holds raises from then on. Views of a stock
parameter, and weak containers with it, can't be either; `parallelize` refuses them, with nothing changed.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import CellType, FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn

from tpplan.compat.subclasses import without_tensor_classes
from tpplan.compat.tensors import base_of, has_own_memory, memory_span, use_count
from tpplan.compiler.trace.slots import slots_of
from tpplan.compiler.trace.surroundings import Surroundings
from tpplan.runtime.parameters.sharded_tensors import ShardedTensor, refusal

Replaced = tuple[Tensor, Tensor, str]
"""A stock parameter or buffer, the sharded one, and its name."""
_SCANS = 64
_NAME = "tpplan_name"


class StockParameter(nn.Parameter):
    """A parameter of the stock model that somebody kept; its sharded model has another."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raise."""
        held = next((t for t in _flat((args, kwargs)) if isinstance(t, StockParameter)), None)
        raise refusal(
            f"{getattr(func, '__name__', 'an operation')} was given the parameter "
            f"`{vars(held).get(_NAME)}` as it was before `parallelize`",
            "take it from the model again after `parallelize`: a variable can't be given the sharded one",
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"StockParameter({vars(self).get(_NAME)})"


def _flat(held: Any) -> Sequence[Any]:
    if isinstance(held, dict):
        return [leaf for item in cast("dict[str, Any]", held).values() for leaf in _flat(item)]
    if isinstance(held, (list, tuple)):
        return [leaf for item in cast("Sequence[Any]", held) for leaf in _flat(item)]
    return [held]


def inherit(stock: Tensor, sharded: Tensor) -> None:
    """Let a sharded parameter have what was set on the stock one, and its gradient."""
    vars(sharded).update(vars(stock))
    if stock.grad is not None and isinstance(sharded, ShardedTensor):
        sharded.grad = stock.grad


def refuse_views(parameters: Iterable[tuple[Tensor, str]]) -> None:
    """Refuse parameters of which somebody has a view, or an entry in a weak container: nobody can replace these.

    A weak reference by itself ends with the parameter, and shows it.

    Raises:
        StateError: TP140 with the parameter's name.
    """
    named = {id(parameter): (parameter, name) for parameter, name in parameters}
    for parameter, name in named.values():
        callbacks = [held.__callback__ for held in weakref.getweakrefs(parameter)]
        if any(getattr(callback, "__module__", "") in _WEAK_CONTAINERS for callback in callbacks):
            raise refusal(
                f"a weak dict or set has `{name}`, and would lose it", "fill weak containers after `parallelize`"
            )
    if any(use_count(parameter) > 1 for parameter, _ in named.values()):  # by a view, or by a graph of autograd's
        with without_tensor_classes():
            views = [id(held) for held in map(base_of, gc.get_objects()) if id(held) in named]
        if views:
            raise refusal(
                f"a view of `{named[views[0]][1]}` is alive, which can't be given the sharded parameter",
                "take views of parameters after `parallelize`, or delete them before",
            )


def refuse_aliases(model: nn.Module, parameters: Iterable[tuple[Tensor, str]]) -> None:
    """Refuse what is kept in the memory of a parameter, as `weight.data` is: it would keep the old numbers.

    Looked through is what a model holds and what is around it, if anything but a parameter has its memory.

    Raises:
        StateError: TP140 with both names.
    """
    spans, known = list[tuple[int, int, str]](), {id(parameter) for parameter in model.parameters()}
    for parameter, name in parameters:  # and quantised weights, which may be buffers
        known.add(id(parameter))
        if (span := memory_span(parameter)) is not None and not has_own_memory(parameter):
            spans.append((*span, name))
    for place, slot in slots_of(model, Surroundings(model)).items() if spans else ():
        span = memory_span(slot.value) if id(slot.value) not in known else None
        name = None if span is None else next((name for a, b, name in spans if a < span[1] and span[0] < b), None)
        if name is not None:
            raise refusal(
                f"`{place}` has the memory of `{name}`, and can't be given that of the sharded parameter",
                f"read `{name}` itself in the forward, or set `{place}` after `parallelize`",
            )


def refuse_gradients(stock: Tensor, name: str) -> bool:
    """Raise from a backward that is still to come to a stock parameter; whether there may be one."""
    if use_count(stock) == 1 or not stock.requires_grad:
        return False

    def refuse(_: Tensor) -> None:
        raise refusal(
            f"a backward of a call from before `parallelize` reached `{name}`, which nobody reads any more",
            "call `backward` before `parallelize`, or the model again after it",
        )

    stock.register_post_accumulate_grad_hook(refuse)
    return True


def is_held(parameter: Tensor) -> bool:
    """Whether somebody but the caller, in one variable, holds a parameter."""
    return sys.getrefcount(parameter) > 3  # the caller's, this function's, and the argument here


def pass_on(replaced: list[Replaced]) -> None:
    """Give all holders of these the sharded parameters."""
    new = {id(stock): sharded for stock, sharded, _ in replaced}
    waiting = [stock for stock, _, _ in replaced]
    for _ in range(_SCANS):
        # One look through the heap finds the containers of one, which mostly hold the others as well.
        place = next((i for i, stock in enumerate(waiting) if sys.getrefcount(stock) > _OURS), None)
        if place is None:
            break
        held = waiting.pop(place)
        own = [id(replaced), id(waiting), *map(id, replaced)]
        for holder in gc.get_referrers(held):
            if id(holder) not in own:
                _fill(holder, new)
    for stock, _, name in replaced:
        vars(stock)[_NAME] = name
        if type(stock) is nn.Parameter:
            stock.__class__ = StockParameter
        else:
            stock.__class__ = type(type(stock).__name__, (StockParameter, type(stock)), {})


_WEAK_CONTAINERS = ("weakref", "_weakrefset")  # of Python; compilers keep weak references of their own
_OURS = 4  # in `replaced`, in `waiting`, the loop's variable, and the argument


def _fill(holder: Any, new: Mapping[int, Tensor], depth: int = 0) -> None:
    """Put the sharded parameters in the places of the stock ones."""
    if isinstance(holder, list):
        listed = cast("list[Any]", holder)
        for place, item in enumerate(listed):
            if id(item) in new:
                listed[place] = new[id(item)]
    elif isinstance(holder, dict):
        _fill_dict(cast("dict[Any, Any]", holder), new)
    elif isinstance(holder, set):
        known = cast("set[Any]", holder)
        for item in [item for item in known if id(item) in new]:
            known.remove(item)
            known.add(new[id(item)])
    elif isinstance(holder, CellType):
        holder.cell_contents = new.get(id(holder.cell_contents), holder.cell_contents)
    elif type(holder) is tuple and depth < 3:
        _replace_tuple(cast("tuple[Any, ...]", holder), new, depth)
    elif not isinstance(holder, (FrameType, Tensor)):
        own: Any = getattr(cast("object", holder), "__dict__", None)
        if type(own) is dict:
            _fill_dict(cast("dict[Any, Any]", own), new)


def _fill_dict(held: dict[Any, Any], new: Mapping[int, Tensor]) -> None:
    for name, item in held.items():
        if id(item) in new:
            held[name] = new[id(item)]
    if any(id(name) in new for name in held):
        items = [*held.items()]
        held.clear()
        for name, item in items:
            sharded = new.get(id(name))
            held[name if sharded is None else sharded] = item if sharded is None else _cut(item, sharded)


def _cut(state: Any, sharded: Tensor) -> Any:
    """What an optimizer keeps for a parameter: of tensors of its shape each rank's part."""
    if isinstance(state, dict):
        own = cast("dict[str, Any]", state)
        own.update({name: _cut(item, sharded) for name, item in own.items()})
        return own
    if isinstance(state, Tensor) and isinstance(sharded, ShardedTensor) and state.dim():
        with torch.no_grad():
            return sharded.taken(state)
    return state


def _replace_tuple(held: tuple[Any, ...], new: Mapping[int, Tensor], depth: int) -> None:
    made = tuple(new.get(id(item), item) for item in held)
    for outer in gc.get_referrers(held):
        _fill(outer, cast("Any", {id(held): made}), depth + 1)


__all__ = ["StockParameter", "inherit", "is_held", "pass_on", "refuse_aliases", "refuse_gradients", "refuse_views"]
