"""Objects: what a call may hold beside tensors, containers and plain values.

in:  an argument of a call
out: whether a capture can be shown it, and a copy that the capture may write to

Objects whose state is all in their `__dict__`, such as key-value caches, are containers of what they hold. One that
holds tensors elsewhere can't be shown to a capture, whose tensors have no numbers, and neither can modules and
generators: these are opaque. Anything else is shown as a copy, since a forward may write to it.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from tpplan.compat.symbols import SYMBOLIC
from tpplan.compiler.ir.hidden import hidden_tensors
from tpplan.compiler.ir.pytree import is_record, is_record_class, leaves, shows_its_state
from tpplan.state.parts import PLAIN

_CONTAINERS = (tuple, list, dict, set, frozenset)
SHARED = (type, ModuleType, BuiltinFunctionType, Enum, *SYMBOLIC)
_DEPTH = 6


def is_opaque(held: object) -> bool:
    """Whether an argument is an object that a proof leaves out, as it hides tensors, or is a module or a generator."""
    if type(held) in PLAIN or isinstance(held, (Tensor, tuple, list, dict, *SHARED)) or is_record(held):
        return False
    if shows_its_state(type(held)):
        return any(is_opaque(item) for _, item in leaves(held, objects=True) if item is not held)
    return isinstance(held, (nn.Module, torch.Generator)) or _holds_tensors(held, _DEPTH)


def hides_tensors(held: object) -> bool:
    """Whether an argument, or what it holds, is an object that keeps tensors where no proof can see them."""
    return any(_hides(item) for _, item in leaves(held, objects=True))


def _hides(held: object) -> bool:
    closed = (Tensor, nn.Module, torch.Generator, FunctionType, MethodType, functools.partial, *SHARED)
    if type(held) in PLAIN or isinstance(held, closed) or shows_its_state(type(held)):
        return False
    return next(hidden_tensors(held), None) is not None


def is_object(held: object) -> bool:
    """Whether it is no container of Python's, but an object that may hold tensors, or is opaque."""
    known = _is_object_class(type(held))
    return is_opaque(held) if known is None else known


@functools.lru_cache(maxsize=4096)
def _is_object_class(kind: type[Any]) -> bool | None:
    """Whether instances of a class are such objects; None where that is for each to say."""
    if kind in PLAIN or issubclass(kind, (Tensor, tuple, list, dict, *SHARED)) or is_record_class(kind):
        return False
    return True if shows_its_state(kind) else None


def fresh_object(held: Any) -> Any:
    """A copy that a capture may write to; `held` itself if it can't be written to, or can't be copied."""
    if type(held) in PLAIN or isinstance(held, (Tensor, FunctionType, *SHARED)) or is_opaque(held):
        return held
    try:
        return copy.deepcopy(held)
    except Exception:  # whatever a class says of being copied
        return held


class Uncopied:
    """Stands for an object that was set on a tensor, which a copy of that doesn't have; see `marks_on`."""


def note_alike(made: Tensor, tensor: Tensor) -> Tensor:
    """`made`, with the plain values that are attributes of `tensor`."""
    for name, held in tensor.__dict__.items():
        setattr(made, name, held if type(held) in PLAIN else Uncopied)
    return made


def without_checkpoint(held: Any) -> Any:
    """A function for a capture: an activation checkpoint, which computes the same twice, is shown as the plain call."""
    function = held.func if isinstance(held, functools.partial) else held  # pyright: ignore[reportUnknownVariableType]
    return _called if function is checkpoint else held  # pyright: ignore[reportUnknownVariableType]


def _called(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    own = inspect.signature(checkpoint).parameters  # pyright: ignore[reportUnknownArgumentType]
    return function(*args, **{name: held for name, held in options.items() if name not in own})


def _holds_tensors(held: object, depth: int) -> bool:
    if isinstance(held, Tensor):
        return True
    if type(held) in PLAIN or isinstance(held, SHARED) or not depth:
        return False
    if isinstance(held, Mapping):
        return any(_holds_tensors(item, depth - 1) for item in held.values())  # pyright: ignore
    if isinstance(held, _CONTAINERS):
        return any(_holds_tensors(item, depth - 1) for item in held)  # pyright: ignore
    if isinstance(held, MethodType):
        return _holds_tensors(held.__self__, depth - 1)
    if isinstance(held, FunctionType):
        return False
    return any(_holds_tensors(item, depth - 1) for item in getattr(held, "__dict__", {}).values())


__all__ = [
    "PLAIN",
    "SHARED",
    "fresh_object",
    "hides_tensors",
    "is_object",
    "is_opaque",
    "note_alike",
    "without_checkpoint",
]
