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
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, cast

from torch import Tensor

from tpplan.calls.key import ambient_state
from tpplan.compiler.ir.objects import PLAIN
from tpplan.compiler.ir.program import Program
from tpplan.compiler.ir.pytree import has_own_state

Sizes = list[object]
Reader = Callable[[Sequence[Any], Sizes, list[Tensor]], bool]
"""Whether things are of a form; collects their sizes, and their tensors."""

_DEPTH = 6  # less than a key's, so that nothing is read further than there
_MOST = 16
_FACTS = attrgetter("dtype", "device", "requires_grad", "__dict__")
_SHAPE, _VALUES = attrgetter("shape"), dict[str, Any].values
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

    def __init__(self, state: tuple[object, ...], names: tuple[str, ...], count: int, read: Reader) -> None:
        self.state = state
        self.met: dict[tuple[object, ...], Program] = {}
        self._names, self._count, self._read = names, count, read

    def read(
        self, state: tuple[object, ...], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[object, ...] | None:
        """The sizes of a call of this form; None for another one."""
        if len(arguments) != self._count or (*keywords,) != self._names or state != self.state:
            return None
        sizes: Sizes = []
        tensors: list[Tensor] = []
        if not self._read([*arguments, *keywords.values()], sizes, tensors):
            return None
        return tuple(sizes) if len({*map(id, tensors)}) == len(tensors) else None


def _form(state: tuple[object, ...], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> _Form | None:
    """The form of a call; None if something in it isn't recognised so."""
    read = _all([*arguments, *keywords.values()], _DEPTH)
    return None if read is None else _Form(state, (*keywords,), len(arguments), read)


def _all(held: list[Any], depth: int, lengths: bool = False) -> Reader | None:
    """What recognises as many things like these, those alike together: in functions that are written in C.

    Args:
        held: the things.
        depth: how far to look into them.
        lengths: whether whole numbers among them are lengths.
    """
    if not held:
        return lambda others, sizes, tensors: True
    groups: dict[object, list[int]] = {}
    for place, item in enumerate(held):
        looks = _lengths if lengths and type(item) is int else _looks(item, place)
        groups.setdefault(looks, []).append(place)
    readers: list[tuple[Callable[[Any], Any], Reader]] = []
    for looks, places in groups.items():
        reader = _lengths if looks is _lengths else _alike([held[place] for place in places], depth)
        if reader is None:
            return None
        readers.append((itemgetter(*places, *places[:1]), reader))  # of two places at least, it gives a tuple
    if len(readers) == 1:
        return readers[0][1]
    return lambda others, sizes, tensors: all([reader(take(others)[:-1], sizes, tensors) for take, reader in readers])


def _looks(held: Any, place: int) -> object:
    """What is equal for things that are read together."""
    kind = cast("type[Any]", type(held))
    if kind is Tensor:
        return Tensor
    if _is_compared(held):
        return _is_compared
    own = has_own_state(kind) and kind not in (list, tuple, dict)
    return (kind, *cast("dict[str, Any]", vars(held))) if own else place


def _alike(held: list[Any], depth: int) -> Reader | None:
    """What recognises things like these, which look alike."""
    kind = cast("type[Any]", type(held[0]))
    if kind is Tensor:
        return _tensors(held)
    if _is_compared(held[0]):
        kinds, values = [*map(type, held)], [*held]
        return lambda others, sizes, tensors: [*map(type, others)] == kinds and [*others] == values
    if not depth:
        return None
    if kind in (list, tuple):
        return _sequence(held[0], depth)
    if kind is dict:
        return _mapping(held[0], depth)
    return _states(held, depth) if has_own_state(kind) else None


def _is_compared(held: object) -> bool:
    """Whether it counts by its type and value alone."""
    return type(held) in _COMPARED or isinstance(held, type)


def _tensors(held: list[Tensor]) -> Reader | None:
    facts = [*map(_FACTS, held)]
    if any(requires_grad or marks for *_, requires_grad, marks in facts):
        return None
    kinds: list[type] = [Tensor] * len(held)

    def read(others: Sequence[Any], sizes: Sizes, tensors: list[Tensor]) -> bool:
        if [*map(type, others)] != kinds or [*map(_FACTS, others)] != facts:
            return False
        sizes.extend(map(_SHAPE, others))
        tensors.extend(others)
        return True

    return read


def _sequence(held: Sequence[Any], depth: int) -> Reader | None:
    kind, count, inside = type(held), len(held), _all([*held], depth - 1)

    def read(others: Sequence[Any], sizes: Sizes, tensors: list[Tensor]) -> bool:
        (other,) = others
        return type(other) is kind and len(other) == count and inside(other, sizes, tensors)  # pyright: ignore

    return None if inside is None else read


def _mapping(held: dict[Any, Any], depth: int) -> Reader | None:
    names, inside = (*held,), _all([*held.values()], depth - 1)
    kinds = [*map(type, names)]

    def read(others: Sequence[Any], sizes: Sizes, tensors: list[Tensor]) -> bool:
        (other,) = others
        if type(other) is not dict or [*map(type, other)] != kinds or (*other,) != names:  # pyright: ignore
            return False
        return inside([*other.values()], sizes, tensors)  # pyright: ignore

    return None if inside is None or not all(map(_is_compared, names)) else read


def _lengths(others: Sequence[Any], sizes: Sizes, tensors: list[Tensor]) -> bool:
    sizes.extend(others)
    return {*map(type, others)} == {int}


def _states(held: list[Any], depth: int) -> Reader | None:
    """Of objects by their attributes: whole numbers beside tensors are lengths, which count as sizes do."""
    kinds, names, items = [*map(type, held)], [*map(tuple, map(vars, held))], _items(held)
    inside, below = _all(items, depth - 1), list[Tensor]()
    if inside is None or not inside(items, [], below):
        return None
    if below:
        inside = cast("Reader", _all(items, depth - 1, lengths=True))

    def read(others: Sequence[Any], sizes: Sizes, tensors: list[Tensor]) -> bool:
        if [*map(type, others)] != kinds or [*map(tuple, map(vars, others))] != names:
            return False
        return inside(_items(others), sizes, tensors)

    return read


def _items(held: Sequence[Any]) -> list[Any]:
    return [*chain.from_iterable(map(_VALUES, map(vars, held)))]


__all__ = ["Repeats"]
