"""Repeat: recognise a call that is like one that was decided, in a tenth of the time that its key takes.

in:  a call
out: the program that a call of this form and these sizes was found to run by; None if there was none

A call's key says all that could steer Python, and is worked out anew from nested objects each time. What is remembered
here of a call is its *form*: a function that looks in the same places for the same things, and collects the sizes of
tensors and the lengths that objects note. A call of the same form and sizes has the same key, so it runs by what was
decided for that. Forms are there for calls without gradients, such as each token of a generation; all else takes the
longer way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, cast

from torch import Tensor

from tpplan.calls.key import ambient_state
from tpplan.compiler.ir.objects import PLAIN
from tpplan.compiler.ir.program import Program
from tpplan.compiler.ir.pytree import has_own_state

Sizes = list[object]
Reader = Callable[[Any, Sizes, list[Tensor]], bool]
"""Whether something is of a form; collects its sizes, and its tensors."""

_DEPTH = 6  # less than a key's, so that nothing is read further than there
_MOST = 16
_FACTS = attrgetter("__class__", "dtype", "device", "requires_grad", "__dict__")
_COMPARED = PLAIN - {float, complex, slice, range}


class Repeats:
    """The forms of one model's calls, and what was decided for them."""

    def __init__(self, devices: Sequence[str]) -> None:
        """Know none; `devices` are the types whose autocast counts."""
        self._devices = tuple(devices)
        self._forms: list[_Form] = []

    def forget(self) -> None:
        """Know nothing of any call."""
        self._forms.clear()

    def find(self, more: object, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Program | None:
        """The program that such a call was found to run by.

        Args:
            more: what else a call's key has.
            arguments, keywords: the call.
        """
        state = (more, *ambient_state(self._devices))
        for form in self._forms:
            sizes = form.read(state, arguments, keywords)
            if sizes is not None:
                return form.met.get(sizes)
        return None

    def note(self, more: object, arguments: tuple[Any, ...], keywords: dict[str, Any], program: Program) -> None:
        """Remember by which program a call runs, as it is now: whole caches were cut to this rank's part."""
        state = (more, *ambient_state(self._devices))
        known = next((form for form in self._forms if form.read(state, arguments, keywords) is not None), None)
        form = _form(state, arguments, keywords) if known is None else known
        sizes = None if form is None else form.read(state, arguments, keywords)
        if form is None or sizes is None:
            return
        if known is None:
            self._forms = [form, *self._forms[: _MOST - 1]]
        form.met[sizes] = program


class _Form:
    """One form of a call."""

    def __init__(self, state: tuple[object, ...], positional: list[Reader], named: dict[str, Reader]) -> None:
        self.state = state
        self.met: dict[tuple[object, ...], Program] = {}
        self._positional, self._names, self._named = positional, tuple(named), [*named.values()]

    def read(
        self, state: tuple[object, ...], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[object, ...] | None:
        """The sizes of a call of this form; None for another one."""
        if len(arguments) != len(self._positional) or (*keywords,) != self._names or state != self.state:
            return None
        sizes: Sizes = []
        tensors: list[Tensor] = []
        for read, held in zip(self._positional, arguments, strict=True):
            if not read(held, sizes, tensors):
                return None
        for read, held in zip(self._named, keywords.values(), strict=True):
            if not read(held, sizes, tensors):
                return None
        return tuple(sizes) if len({*map(id, tensors)}) == len(tensors) else None


def _form(state: tuple[object, ...], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> _Form | None:
    """The form of a call; None if something in it isn't recognised so."""
    positional = [_reader(held, _DEPTH) for held in arguments]
    named = {name: _reader(held, _DEPTH) for name, held in keywords.items()}
    if None in positional or None in named.values():
        return None
    return _Form(state, cast("list[Reader]", positional), cast("dict[str, Reader]", named))


def _reader(held: Any, depth: int) -> Reader | None:
    """What recognises things like `held`."""
    kind = cast("type[Any]", type(held))
    if kind is Tensor:
        return _tensor(held)
    if _is_compared(held):
        return lambda other, sizes, tensors: type(other) is kind and other == held
    if not depth:
        return None
    if kind in (list, tuple):
        return _sequence(held, depth)
    if kind is dict:
        return _mapping(cast("dict[Any, Any]", held), depth)
    return _state(held, depth) if has_own_state(kind) else None


def _is_compared(held: object) -> bool:
    """Whether it counts by its type and value alone."""
    return type(held) in _COMPARED or isinstance(held, type)


def _tensor(held: Tensor) -> Reader | None:
    facts = _FACTS(held)
    if facts[3] or facts[4]:
        return None

    def read(other: Any, sizes: Sizes, tensors: list[Tensor]) -> bool:
        if type(other) is not Tensor or _FACTS(other) != facts:
            return False
        sizes.append(other.shape)
        tensors.append(other)
        return True

    return read


def _sequence(held: Sequence[Any], depth: int) -> Reader | None:
    kind, readers = type(held), [_reader(item, depth - 1) for item in held]
    if None in readers:
        return None
    known, count = cast("list[Reader]", readers), len(readers)

    def read(other: Any, sizes: Sizes, tensors: list[Tensor]) -> bool:
        if type(other) is not kind or len(other) != count:
            return False
        return all([reader(item, sizes, tensors) for reader, item in zip(known, other, strict=True)])

    return read


def _mapping(held: dict[Any, Any], depth: int) -> Reader | None:
    names, values = (*held,), _sequence([*held.values()], depth)
    if values is None or not all(map(_is_compared, names)):
        return None

    def read(other: Any, sizes: Sizes, tensors: list[Tensor]) -> bool:
        return type(other) is dict and (*other,) == names and values([*other.values()], sizes, tensors)  # pyright: ignore

    return read


def _state(held: object, depth: int) -> Reader | None:
    """Of an object by its attributes: whole numbers beside tensors are lengths, which count as sizes do."""
    kind, state = type(held), vars(held)
    keys = dict.fromkeys(state).keys()
    whole = [name for name, item in state.items() if type(item) is int]
    same = [name for name, item in state.items() if name not in whole and _is_compared(item)]
    rest: list[tuple[str, Reader]] = []
    for name, item in state.items():
        if name not in whole and name not in same:
            reader = _reader(item, depth - 1)
            if reader is None:
                return None
            rest.append((name, reader))
    below: list[Tensor] = []
    if not all(reader(state[name], [], below) for name, reader in rest):
        return None
    if not below:
        same, whole = [*same, *whole], []
    take = itemgetter(*same, *same[:1]) if same else None  # of two names at least, it gives a tuple
    expected = () if take is None else take(state)
    types = [*map(type, expected)]

    def read(other: Any, sizes: Sizes, tensors: list[Tensor]) -> bool:
        if type(other) is not kind:
            return False
        state: dict[str, Any] = other.__dict__
        if state.keys() != keys:
            return False
        if take is not None:
            found = take(state)
            if found != expected or [*map(type, found)] != types:
                return False
        for name, reader in rest:
            if not reader(state[name], sizes, tensors):
                return False
        for name in whole:
            length = state[name]
            if type(length) is not int:
                return False
            sizes.append(length)
        return True

    return read


__all__ = ["Repeats"]
