"""Sizes as symbols: one run of a model for all sizes that take the same way through its Python.

in:  a call whose sizes are symbols
out: its record, in which numbers made of sizes are expressions; and what Python and torch compared, as conditions

    k = int(n.shape[1] > 8); F.pad(n, (0, 0, k, -k))       of an example of length 8
    ->  constant_pad_nd(n, (0, 0, 0, 0))                   condition: n.shape[1] <= 8

Where C needs the value of a number, as for `range(n)`, the condition is `n == 8`. So whatever isn't followed makes a
record narrower, and never wrong.
"""

from __future__ import annotations

import builtins
import functools
import linecache
import logging
import sys
import threading
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from pathlib import Path as FilePath
from typing import Any, cast
from unittest import mock

import sympy
import torch
from torch import Tensor

from tpplan.compat.modes import enable_python_dispatcher
from tpplan.compat.schemas import OpOverload, schema_mutates
from tpplan.compat.symbols import SYMBOLIC, SizeSymbols, expression_of
from tpplan.compiler.ir.locations import INTERNAL, Location
from tpplan.compiler.ir.observations import CaptureSettings
from tpplan.compiler.trace.meta_results import Made
from tpplan.compiler.trace.recorder import Recorder
from tpplan.ops.issued import ALIAS, SLICE

_LIBRARIES = (*INTERNAL, str(FilePath(sympy.__file__).parent), "<")
_COVER = str(FilePath(__file__).parents[1] / "cover.py")
_LIKE: dict[type, object] = dict(zip(SYMBOLIC, (0, 0.0, False), strict=True))
_lock = threading.RLock()

Results = dict[object, tuple[Any, list[tuple[Any, Any]]]]
"""Results of operators by what they are given: how they are held, and each with its geometry."""


class SymbolicRecorder(Recorder):
    """A recorder of runs whose sizes are symbols."""

    def __init__(self, results: Results, settings: CaptureSettings) -> None:
        """Share `results` with others over the same symbols."""
        super().__init__(settings)
        self._made = results

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is SLICE and self.frames and self.indexing is tuple and not kwargs and _takes_all(args):
            return self._same(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _same(self, tensor: Tensor) -> Tensor:
        """What torch hands out of a slice that takes all: where sizes are numbers, it records none."""
        value = self.value_of(tensor)
        with enable_python_dispatcher():
            made = ALIAS(tensor)
        self._identity[id(made)] = value
        self.alive.append(made)
        return made

    def indexed(self, tensor: Tensor, result: Any) -> Any:
        """As of numbers, a view of the tensor where no slice is left."""
        if not self.frames or not isinstance(result, Tensor) or result is tensor:
            return result
        value = self.held_value(result)
        if value is None or value != self.held_value(tensor):
            return result
        return ALIAS(tensor)

    def _run(self, func: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any], memoise: bool) -> Made:
        """As of numbers, but that views are remembered as well, and results are aliases of earlier ones.

        A new tensor takes a millisecond of symbolic arithmetic. Who shares memory is known by operators' schemas.
        """
        key: object = None
        if not schema_mutates(func):
            key = (id(func), *map(self._key, args), *((name, self._key(held)) for name, held in keywords.items()))
            known = self._made.get(key)
            if known is not None:
                container, tensors = known
                made = [(tensor.detach(), geometry) for tensor, geometry in tensors]
                items = [tensor for tensor, _ in made]
                return (items[0] if container is None else container(items)), made
        with enable_python_dispatcher():
            result, found = super()._run(func, args, keywords, memoise)
        container: Any = type(result) if isinstance(result, (tuple, list)) else None  # pyright: ignore
        if key is not None and container in (None, tuple, list) and all(g is not None and t.is_meta for t, g in found):
            self._made[key] = container, [(tensor.detach(), geometry) for tensor, geometry in found]
        return cast("Any", result), found

    def _key(self, argument: Any) -> object:
        """What the result of an operator depends on."""
        if isinstance(argument, Tensor):
            found = self._identity.get(id(argument))
            shape, stride, dtype = self.values[self.value_of(argument) if found is None else found].geometry
            return (*map(expression_of, shape), None, *map(expression_of, stride), dtype)
        if isinstance(argument, (list, tuple)):
            return tuple(map(self._key, argument))  # pyright: ignore[reportUnknownArgumentType]
        shown = expression_of(argument)
        return type(argument).__name__, repr(shown) if isinstance(shown, float) else shown


def _takes_all(args: tuple[Any, ...]) -> bool:
    """Whether a slice takes all entries of a dim; where that depends on sizes, it becomes a condition."""
    given: tuple[Any, ...] = (*args, *(0, None, None, 1)[len(args) - 1 :])
    tensor, dim, start, end, step = given
    if isinstance(start, SYMBOLIC) or start not in (None, 0) or step != 1:
        return False
    return end is None or (type(end) is int and end == sys.maxsize) or bool(end >= tensor.shape[dim])


@contextmanager
def symbols() -> Generator[SizeSymbols]:
    """Symbols for sizes, which in the block count as numbers to code that asks for the class of one.

    In torch's own code they don't. Text that is made of a symbol has its number, which is a condition. A symbol has no
    hash, so that no cache of a function ever holds what was made of one.
    """
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    with _lock, ExitStack() as changed:  # one at a time, as all threads see it
        changed.enter_context(mock.patch.object(log, "disabled", True))  # it warns of what is raised, and told later
        changed.enter_context(mock.patch.object(torch.SymInt, "__repr__", _shown))
        for kind in _LIKE:
            changed.enter_context(mock.patch.object(kind, "__getattribute__", _attribute))
        changed.enter_context(mock.patch.object(builtins, "isinstance", _is_instance))
        changed.enter_context(mock.patch.object(builtins, "type", _Type))
        yield SizeSymbols(_line)


_test: Any = builtins.isinstance
_kind_of: Any = builtins.type
_text: Any = torch.SymInt.__repr__


def _shown(number: torch.SymInt) -> str:
    return repr(int(number)) if _asked_by_user() else _text(number)


def _is_instance(item: Any, classes: Any) -> bool:
    kind = _kind_of(item)
    return _test(_LIKE[kind] if kind in _LIKE and _asked_by_user() else item, classes)


def _attribute(held: Any, name: str) -> Any:
    """An attribute of a symbol, which has those of a number; its class as well, also for patterns."""
    if _asked_by_user():
        like = _LIKE[_kind_of(held)]
        if name == "__class__" or not hasattr(like, name):
            return getattr(like, name)
    return object.__getattribute__(held, name)


class _AnyType(type):
    """The class of what stands for `type`, of which all classes are."""

    def __instancecheck__(cls, held: object) -> bool:
        return _test(held, _kind_of)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, _kind_of)


class _Type(_kind_of, metaclass=_AnyType):
    """What stands for `type`."""

    def __new__(cls, *args: Any, **keywords: Any) -> Any:
        if len(args) != 1:
            return _kind_of(*args, **keywords)
        kind = _kind_of(args[0])
        return _kind_of(_LIKE[kind]) if kind in _LIKE and _asked_by_user() else kind


def fix(held: Any) -> None:
    """Make the values that symbolic numbers among arguments have in the example conditions."""
    if isinstance(held, (tuple, list)):
        for item in held:  # pyright: ignore[reportUnknownVariableType]
            fix(item)
    elif isinstance(held, torch.SymBool):
        bool(held)
    elif isinstance(held, torch.SymInt):
        int(held)
    elif isinstance(held, torch.SymFloat):
        float(held)


def balanced(condition: Any) -> Any:
    """A comparison of sizes without terms that count negatively: they go to the other side."""
    if not isinstance(condition, sympy.core.relational.Relational):
        return condition
    left, right = cast("tuple[Any, Any]", condition.args)
    terms: Any = sympy.Add.make_args(left - right)
    lacking = [term for term in terms if term.could_extract_minus_sign()]
    sides = (sympy.Add(*(term for term in terms if term not in lacking)), sympy.Add(*(-term for term in lacking)))
    return cast("Any", condition).func(*sides, evaluate=False)


def _asked_by_user() -> bool:
    return not _is_internal(sys._getframe(2).f_code.co_filename)  # pyright: ignore[reportPrivateUsage]


@functools.cache
def _is_internal(file: str) -> bool:
    return file.startswith(_LIBRARIES)


def _line() -> str:
    """The line of the model that is running, with its text; nothing where the compiler itself compares."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and not frame.f_code.co_filename.endswith(_COVER):
        name = frame.f_code.co_filename
        if not _is_internal(name):
            text = linecache.getline(name, frame.f_lineno).strip()
            return f"{Location(name, frame.f_lineno).short}: {text}"
        frame = frame.f_back
    return ""


__all__ = ["Results", "SymbolicRecorder", "balanced", "fix", "symbols"]
