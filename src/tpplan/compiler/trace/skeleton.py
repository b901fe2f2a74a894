"""A copy of the user's model without its numbers: same modules and attributes, every tensor on the meta device.

in:  the user's model, materialised or on `meta`; it is only read
out: `Skeleton`: a deep copy whose parameters and buffers are meta tensors, with the names they go by
"""

from __future__ import annotations

import copy
import copyreg
import functools
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from types import CellType, FunctionType, GeneratorType
from typing import Any, NoReturn, cast
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from tpplan.compat.modules import named_modules, own_buffers, own_parameters
from tpplan.compiler.ir.hidden import is_plain, members
from tpplan.compiler.ir.objects import note_alike
from tpplan.compiler.trace.unfollowed import UnfollowedError
from tpplan.state.parts import counted

_PLAIN = frozenset((bool, int, float, str, type(None)))
_TABLES = frozenset((dict, OrderedDict, set))
_OWN = frozenset(("_parameters", "_buffers", "_modules"))
_PROTOCOL = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__", "__slots__")


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A numberless copy of a model.

    Attributes:
        model: the copy.
        parameters: every distinct parameter of the copy, with all names it goes by.
        buffers: every distinct buffer of the copy, likewise.
    """

    model: nn.Module
    parameters: tuple[tuple[Tensor, tuple[str, ...]], ...]
    buffers: tuple[tuple[Tensor, tuple[str, ...]], ...] = ()


def make_skeleton(model: nn.Module, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Skeleton:
    """Copy `model` onto the meta device.

    Args:
        model: the stock model; not changed.
        shapes: local shapes by name, for parameters and buffers that differ from the stock model's.
    """
    memo: dict[int, Any] = {}
    names: dict[int, list[str]] = {}
    parameters: dict[int, Tensor] = {}
    for prefix, module in named_modules(model, remove_duplicate=False):
        for leaf, parameter in own_parameters(module).items():
            if parameter is None:
                continue
            name = f"{prefix}.{leaf}" if prefix else leaf
            names.setdefault(id(parameter), []).append(name)
            if id(parameter) not in parameters:
                shape = (shapes or {}).get(name, tuple(parameter.shape))
                meta = torch.empty(shape, dtype=parameter.dtype, device="meta")
                copied = nn.Parameter(meta, requires_grad=parameter.requires_grad)
                parameters[id(parameter)] = note_alike(copied, parameter)
    memo.update(parameters)
    buffers = _buffers(model, shapes or {}, memo)
    modules = [module for _, module in named_modules(model)]
    functions = _memoise_contents(modules, memo)
    duplicate = _copied(modules, memo, functions)
    return Skeleton(duplicate, tuple((parameters[key], tuple(held)) for key, held in names.items()), buffers)


def _buffers(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], memo: dict[int, Any]
) -> tuple[tuple[Tensor, tuple[str, ...]], ...]:
    """Note the buffers' copies in `memo`; returns them with their names."""
    names: dict[int, list[str]] = {}
    for prefix, module in named_modules(model, remove_duplicate=False):
        for leaf, buffer in own_buffers(module).items():
            if buffer is None:
                continue
            name = f"{prefix}.{leaf}" if prefix else leaf
            names.setdefault(id(buffer), []).append(name)
            if id(buffer) not in memo:
                shape = shapes.get(name, tuple(buffer.shape))
                changed = shape != tuple(buffer.shape)
                memo[id(buffer)] = (
                    torch.empty(shape, dtype=buffer.dtype, device="meta") if changed else _to_meta(buffer)
                )
    return tuple((memo[key], tuple(held)) for key, held in names.items())


def _copied(modules: list[nn.Module], memo: dict[int, Any], functions: list[Any]) -> nn.Module:
    """A deep copy of the first of `modules`, of which the others are the descendants.

    As `copy.deepcopy` does it, which would spend nearly all of its time on numbers, names and empty tables of hooks.
    Modules that say themselves how to be copied are left to it.
    """
    states: dict[nn.Module, dict[str, Any]] = {}
    for module in modules:
        state = module.__getstate__() if _is_copied_as_usual(type(module)) else None
        if type(state) is dict:
            states[module] = state  # pyright: ignore[reportUnknownArgumentType]
            memo[id(module)] = type(module).__new__(type(module))
    _fill(functions, memo)
    for module, state in reversed(states.items()):
        copied = {name: held if type(held) in _PLAIN else _duplicate(held, memo) for name, held in state.items()}
        memo[id(module)].__setstate__(copied)
    return copy.deepcopy(modules[0], memo)


@functools.cache
def _is_copied_as_usual(kind: type[Any]) -> bool:
    stock = all(getattr(kind, name, None) is getattr(object, name, None) for name in _PROTOCOL)
    return stock and kind not in copyreg.dispatch_table


def _duplicate(held: Any, memo: dict[int, Any]) -> object:
    kind: type[Any] = type(held)  # pyright: ignore[reportUnknownVariableType]
    if kind in _PLAIN:
        return held
    found = memo.get(id(held))
    if found is not None:
        return found
    if kind is count:
        memo[id(held)] = count(*counted(held))
        return memo[id(held)]
    if kind is memoryview and not held.readonly:
        memo[id(held)] = memoryview(bytearray(held.tobytes())).cast(held.format, held.shape)
        return memo[id(held)]
    if kind in _TABLES and not held and not getattr(held, "__dict__", None):
        memo[id(held)] = kind()
        return memo[id(held)]
    if kind is dict:
        copied = memo[id(held)] = dict[Any, Any]()
        copied.update((_duplicate(key, memo), _duplicate(item, memo)) for key, item in held.items())  # pyright: ignore
        return copied
    known = len(memo)
    try:
        return copy.deepcopy(held, memo)
    except Exception:  # it is or has a lock, an open file: both share that
        while len(memo) > known:
            memo.popitem()  # half a copy
        return _duplicate_around(held, memo)


def _duplicate_around(held: Any, memo: dict[int, Any]) -> object:
    """A copy of what can be copied of something that holds what can't."""
    kind: Any = type(held)  # pyright: ignore[reportUnknownVariableType]
    memo[id(held)] = held
    if kind is GeneratorType:
        memo[id(held)] = _Untaken()
    elif kind in (list, tuple):
        memo[id(held)] = kind(_duplicate(item, memo) for item in cast("list[Any]", held))
    elif kind is threading.local or (
        hasattr(held, "__dict__") and kind.__new__ is object.__new__ and _is_copied_as_usual(kind)
    ):
        memo[id(held)] = kind.__new__(kind)
        own = cast("dict[str, Any]", vars(held))
        vars(memo[id(held)]).update({name: _duplicate(item, memo) for name, item in own.items()})
    return memo[id(held)]


class _Reference(ReferenceType[Any]):
    """A copy of a weak reference, which keeps the copy of what it refers to."""

    __slots__ = ("kept",)
    kept: Any

    def __call__(self) -> Any:
        return self.kept() if isinstance(self.kept, ReferenceType) else self.kept  # pyright: ignore

    def __deepcopy__(self, memo: dict[int, Any]) -> _Reference:
        made = memo[id(self)] = _Reference(_Reference)
        made.kept = copy.deepcopy(self.kept, memo)
        return made


class _Untaken:
    """What stands for a generator, of which there is no copy: what is taken of it, later calls don't get."""

    def __iter__(self) -> _Untaken:
        return self

    def __next__(self) -> NoReturn:
        raise UnfollowedError(
            "it takes from a generator that it keeps, of which nobody can see what comes",
            "keep a list in its place, or pass what it yields as an argument",
        )

    send = __next__


def _memoise_contents(modules: list[nn.Module], memo: dict[int, Any]) -> list[Any]:
    """Note copies of what `copy.deepcopy` would keep, numbers of tensors among it; returns those that are to be filled.

    These are functions with closures, and weak references.
    """
    waiting: list[Any] = [
        held
        for module in modules
        for name, held in vars(module).items()
        if name not in _OWN and type(held) not in _PLAIN and not (type(held) in _TABLES and not held)
    ]
    return _memoise(waiting, {id(module) for module in modules}, memo)


def _memoise(waiting: list[Any], seen: set[int], memo: dict[int, Any]) -> list[Any]:
    found: list[Any] = []
    while waiting:
        held = waiting.pop()
        if is_plain(held) or id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, Tensor):
            if id(held) not in memo:
                memo[id(held)] = _to_meta(held)
            continue
        if cast("Any", type(held)) in (ReferenceType, _Reference):
            memo[id(held)] = _Reference(_Reference)
            found.append(held)
            waiting.append(held())
        if isinstance(held, FunctionType) and (held.__closure__ or "<" in held.__qualname__):  # of no name elsewhere
            memo[id(held)] = _without_closure(held, memo)
            found.append(held)
        waiting.extend(inner for _, inner in members(held))
    return found


def transplanted(held: Any, twins: Mapping[nn.Module, nn.Module]) -> object:
    """A copy of a function or object of a model for its skeleton: what it says of a module, it says of its twin."""
    memo: dict[int, Any] = {id(module): twin for module, twin in twins.items()}
    functions = _memoise([held], set(), memo)
    _fill(functions, memo)
    return _duplicate(held, memo)


def _fill(copied: list[Any], memo: dict[int, Any]) -> None:
    for held in copied:
        made = memo[id(held)]
        if not isinstance(held, FunctionType):
            kept = held()
            outside = isinstance(kept, nn.Module) and id(kept) not in memo
            made.kept = held if outside else _duplicate(kept, memo)
            continue
        made.__defaults__ = _duplicate(held.__defaults__, memo)
        made.__kwdefaults__ = _duplicate(held.__kwdefaults__, memo)
        vars(made).update(_duplicate(vars(held), memo))
        for cell, stock in zip(made.__closure__ or (), held.__closure__ or (), strict=True):
            try:
                cell.cell_contents = _duplicate(stock.cell_contents, memo)
            except ValueError:  # not filled yet
                continue


def _without_closure(held: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """A copy of a function that is to be given what it closes over, its defaults and attributes.

    What several functions close over, their copies do as well.
    """
    cells = tuple(memo.setdefault(id(cell), CellType()) for cell in held.__closure__ or ())
    made = FunctionType(held.__code__, held.__globals__, held.__name__, None, cells)
    made.__qualname__, made.__module__ = held.__qualname__, held.__module__
    return made


def _to_meta(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu" and not isinstance(tensor, nn.Parameter) and tensor.dim() == 0:
        return note_alike(tensor.detach().clone(), tensor)  # a scalar constant: the model may read its value
    return note_alike(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), tensor)
