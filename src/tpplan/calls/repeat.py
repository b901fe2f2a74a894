"""Repeat: recognise a call that is like one that was decided, in a tenth of the time that its key takes.

in:  a call
out: the program that a call of this form and these sizes was found to run by; None if there was none

A call's key says all that could steer Python, and is worked out anew from nested objects each time. What is remembered
here of a call is its *form*: a function that looks in the same places for the same things, and collects the sizes of
tensors and the lengths that objects note. A call of the same form and sizes has the same key, so it runs by what was
decided for that; one of other sizes does if these are covered. Forms are there for calls without gradients, such as
each token of a generation; all else takes the longer way.

As a token takes little longer than such a look at a cache, the function is written for the form: without a loop over
objects, and with what C does at once.

    if (*v3,) != k1: return            the names of an object's attributes
    v4, v5, v6 = v3.values()
    …
    tensors = [v1, v2, v4, v5]         their facts, then their sizes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, cast

from torch import Tensor

from tpplan.calls.key import ambient_state
from tpplan.compiler.cover import LEAST_LENGTH
from tpplan.compiler.ir.program import Program
from tpplan.compiler.ir.pytree import has_own_state, tensors_in
from tpplan.state.flat import Flat
from tpplan.state.parts import PLAIN, own_bases

Sizes = tuple[object, ...]
Reader = Callable[[Sequence[Any]], Sizes | None]
"""The sizes of things that are of a form; None for others."""

Holds = Callable[[Sequence[int]], bool]
"""Whether a call is covered, by all its sizes."""

_DEPTH = 6  # less than a key's, so that nothing is read further than there
_MOST = 16
_SIZES = 4096
_FACTS = attrgetter("dtype", "device", "layout", "requires_grad", "__dict__")
_SHAPE = attrgetter("shape")
_COMPARED = PLAIN - {float, complex, slice, range}


class Repeats:
    """The forms of one model's calls, and what was decided for them."""

    def __init__(self, devices: Sequence[str]) -> None:
        """Know none; `devices` are the types whose autocast counts."""
        self._devices = tuple(devices)
        self._forms: list[_RepeatForm] = []

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
                return form.program(sizes)
        return None

    def note(
        self,
        more: object,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        program: Program,
        holds: Holds | None = None,
    ) -> None:
        """Remember by which program a call runs, as it is now: whole caches were cut to this rank's part.

        Args:
            more, arguments, keywords: see `find`.
            program: it runs by that.
            holds: whether calls of the form run by it, by all their sizes; None if sizes are for the key to tell.
        """
        state = (more, *ambient_state(self._devices))
        known = next((form for form in self._forms if form.read(state, arguments, keywords) is not None), None)
        form = _form(state, arguments, keywords) if known is None else known
        sizes = None if form is None else form.read(state, arguments, keywords)
        if form is None or sizes is None:
            return
        if known is None:
            self._forms = [form, *self._forms[: _MOST - 1]]
        form.note(sizes, program, holds)


class _RepeatForm:
    """One form of a call."""

    def __init__(
        self, state: tuple[object, ...], names: tuple[str, ...], count: int, read: Reader, dims: Sequence[int]
    ) -> None:
        self.state = state
        self._met: dict[Sizes, Program] = {}
        self._covers: list[tuple[Sizes, Holds, Program]] = []
        self._names, self._count, self._read = names, count, read
        self._dims = [*dims]  # of each tensor; lengths come after these

    def program(self, sizes: Sizes) -> Program | None:
        """The program of a call of this form, if it was told by which it runs."""
        program = self._met.get(sizes)
        if program is None:
            for like, holds, other in self._covers:
                numbers = self._flat(sizes, like)
                if numbers is not None and holds(numbers):
                    program = other
                    self.note(sizes, program, None)
                    break
        return program

    def note(self, sizes: Sizes, program: Program, holds: Holds | None) -> None:
        """Remember by which program calls of these sizes run, and maybe others."""
        if len(self._met) >= _SIZES:
            self._met.clear()
        self._met[sizes] = program
        if holds is not None:
            self._covers = [(sizes, holds, program), *[held for held in self._covers if held[1] != holds]][:_MOST]

    def _flat(self, sizes: Sizes, like: Sizes) -> list[int] | None:
        """All sizes, dim by dim, as a key has them; None if the call is of another kind than that with sizes `like`."""
        count = len(self._dims)
        shapes: Any = sizes[:count]
        if [*map(len, shapes)] != self._dims:
            return None
        found = [size for shape in shapes for size in shape]
        lengths: Any = zip(sizes[count:], like[count:], strict=True)
        for length, before in lengths:
            if before >= LEAST_LENGTH <= length:
                found.append(length)
            elif length != before:
                return None
        return found

    def read(self, state: tuple[object, ...], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Sizes | None:
        """The sizes of a call of this form; None for another one."""
        if len(arguments) != self._count or (*keywords,) != self._names or state != self.state:
            return None
        return self._read((*arguments, *keywords.values()))


def _form(state: tuple[object, ...], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> _RepeatForm | None:
    """The form of a call; None if something in it isn't recognised so."""
    written = _Written()
    if not written.unpack("held", [*arguments, *keywords.values()], _DEPTH):
        return None
    return _RepeatForm(state, (*keywords,), len(arguments), written.reader(), written.dims())


class _Written:
    """A reader that is being written: its lines, and the names in it of what is looked at in the end."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._constants: dict[str, object] = {"facts": _FACTS, "shape": _SHAPE}
        self._variables = 0
        self._tensors: list[tuple[str, Tensor]] = []
        self._plain: list[tuple[str, object]] = []
        self._numbers: list[str] = []
        self._classes: list[type[Any]] = []

    def dims(self) -> list[int]:
        """How many dims each tensor has, in the order of the sizes."""
        return [tensor.dim() for _, tensor in self._tensors]

    def reader(self) -> Reader:
        """The function."""
        tensors, others = (f"[{', '.join(name for name, _ in held)}]" for held in (self._tensors, self._plain))
        plain, kinds = [held for _, held in self._plain], [type(held) for _, held in self._plain]
        self._require(f"[*map(type, plain := {others})] == {self._named(kinds)}")
        self._require(f"plain == {self._named(plain)}")
        self._require(f"[*map(type, tensors := {tensors})] == {self._named([Tensor] * len(self._tensors))}")
        self._require(f"[*map(facts, tensors)] == {self._named([_FACTS(held) for _, held in self._tensors])}")
        self._require(f"len({{*map(id, tensors)}}) == {len(self._tensors)}")  # one tensor twice is another call
        self._require(f"{{*map(type, lengths := [{', '.join(self._numbers)}])}} <= {self._named({int})}")
        if self._classes:  # of the user's, which may have flags of their own
            self._require(f"{self._named(Flat(self._classes, {}))}.is_same()")
        source = ["def read(held):", *self._lines, "return (*map(shape, tensors), *lengths)"]
        exec("\n ".join(source), self._constants)  # of names and structure alone, none of which is the caller's text
        return cast("Reader", self._constants["read"])

    def unpack(self, name: str, held: Sequence[Any], depth: int, lengths: bool = False) -> bool:
        """Look at what `name` holds, which is as long; False if something isn't recognised.

        Args:
            name: in the function.
            held: what is there.
            depth: how far to look into that.
            lengths: whether whole numbers are lengths, which count as sizes do.
        """
        inside = [self._variable() for _ in held]
        if inside:
            self._lines.append(f"{', '.join(inside)}, = {name}")
        own: list[str] | None = [] if lengths else None
        known = all([self._look(variable, item, depth, own) for variable, item in zip(inside, held, strict=True)])
        self._numbers += own or ()  # after those of what is inside, as in a key
        return known

    def _look(self, name: str, held: Any, depth: int, lengths: list[str] | None) -> bool:
        kind: type[Any] = type(held)  # pyright: ignore[reportUnknownVariableType]
        if kind is Tensor:
            self._tensors.append((name, held))
            return not (held.requires_grad or vars(held))
        if kind is int and lengths is not None:
            lengths.append(name)
            return True
        if kind in _COMPARED or isinstance(held, type):
            self._plain.append((name, held))
            self._classes += own_bases(held) if isinstance(held, type) else ()
            return True
        if not depth:
            return False
        if kind is list or kind is tuple:
            self._require(f"type({name}) is {kind.__name__} and len({name}) == {len(held)}")
            return self.unpack(name, held, depth - 1)
        if kind is dict:
            return self._mapping(name, held, depth)
        return has_own_state(kind) and self._state(name, held, depth)

    def _mapping(self, name: str, held: dict[Any, Any], depth: int) -> bool:
        names = (*held,)
        if not all(type(key) in _COMPARED or isinstance(key, type) for key in names):
            return False
        self._require(f"type({name}) is dict and [*map(type, {name})] == {self._named([*map(type, names)])}")
        self._require(f"(*{name},) == {self._named(names)}")
        return self.unpack(f"{name}.values()", [*held.values()], depth - 1)

    def _state(self, name: str, held: Any, depth: int) -> bool:
        """Look at an object's attributes: whole numbers beside tensors are lengths."""
        own, state = self._variable(), cast("dict[str, Any]", vars(held))
        self._classes += own_bases(cast("type[Any]", type(held)))
        self._require(f"type({name}) is {self._named(cast('object', type(held)))}")
        self._lines.append(f"{own} = {name}.__dict__")
        self._require(f"(*{own},) == {self._named((*state,))}")
        lengths = any(tensors_in(state, objects=True))
        return self.unpack(f"{own}.values()", [*state.values()], depth - 1, lengths)

    def _require(self, condition: str) -> None:
        self._lines.append(f"if not ({condition}): return None")

    def _named(self, constant: object) -> str:
        name = f"k{len(self._constants)}"
        self._constants[name] = constant
        return name

    def _variable(self) -> str:
        self._variables += 1
        return f"v{self._variables}"


__all__ = ["Repeats"]
