"""Held: what the modules of a model hold beside modules and tensors, as a premise of its proofs.

in:  a sharded model, and the names by which bodies have asked their modules for something
out: a number for the state that they would see now; the place in which it differs from that of the first proofs

    model.config.scale = 3     ->   state 1: calls are proved anew
    model.config.scale = 2     ->   state 0: they run by the first proofs again

An attribute that no body has read is no premise: `generate` notes on a model what it did. What a forward writes is for
its own proof to follow. It is another state if proofs of other calls lean on it, such as those of other sizes.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from tpplan.calls.coverage import Written
from tpplan.compat.hooks import hook_tables
from tpplan.compat.modes import without_dispatch_modes, without_function_modes
from tpplan.compat.modules import hidden_names, own_buffers, own_parameters
from tpplan.compiler.ir.objects import without_checkpoint
from tpplan.compiler.trace.skeleton import transplanted
from tpplan.compiler.trace.slots import hook_name
from tpplan.runtime.modules.contents import MISSING, NOT_ATTRIBUTES
from tpplan.runtime.modules.writes import Watched, Writes
from tpplan.state.content import (
    NOTHING,
    ContentValue,
    Difference,
    Node,
    Reader,
    difference,
    differing,
    is_constant,
    numbers,
)
from tpplan.state.flat import Flat, Values
from tpplan.state.parts import PLAIN, UnseenError, functions_in, is_users_code, own_bases
from tpplan.state.reads import ANYTHING, global_content, is_function, marks_on, read_of_classes, shown, space_of


@contextmanager
def _apart() -> Generator[None]:
    """A block that nobody's modes see."""
    with without_function_modes(), without_dispatch_modes():
        yield


LeanedOn = Callable[[Sequence[Written], int, int], bool]


class Place(NamedTuple):
    """Where something is held: by a module or its class under a name, or in a table of its hooks by a number.

    Functions are held by modules of Python, and by `Tensor`.
    """

    holder: Any
    name: Any

    @property
    def is_shared(self) -> bool:
        """Whether no module of the model's holds it."""
        return not isinstance(self.holder, nn.Module)

    @property
    def is_function(self) -> bool:
        """Whether it holds a function that code reads, of a library's or by a name of one."""
        return isinstance(self.holder, ModuleType) or self.holder is Tensor


class Held:
    """What the modules of one model hold.

    Attributes:
        state: 0 in the state of the first proofs; in another one that bodies could tell from it, another number.
        by_forwards: attributes that forwards have written to.
        hidden: a tensor or a module that Python doesn't find, since `vars(module)` has something by its name.
    """

    def __init__(
        self,
        names: Mapping[nn.Module, str],
        twins: Mapping[nn.Module, nn.Module],
        writes: Writes,
        reads: Iterable[str],
        leaned_on: LeanedOn,
    ) -> None:
        """Look.

        Args:
            names: the modules, with their names.
            twins: for each of them that of the skeleton.
            writes: what was written to the modules. What this rank counts itself is looked at elsewhere.
            reads: the names that bodies have asked for.
            leaned_on: whether proofs lean on what a forward has written, with the states before it and after.
        """
        self._leaned_on = leaned_on
        self._names, self._twins, self._writes, self._local = names, twins, writes, writes.local
        self._kinds = dict.fromkeys(kind for module in names for kind in own_bases(type(module)))
        self._kinds = {kind: None for kind in self._kinds if not issubclass(kind, Watched)}
        self._reads = frozenset[str]()
        self._functions: set[Place] = set()
        self._now: dict[Place, object] = {}
        self._first: dict[Place, object] = {}
        self._like: dict[Place, tuple[object, object]] = {}
        self._changed: dict[Place, object] = {}
        self._copied: dict[Place, object] = {}
        self._unread: set[Place] = set()
        self.by_forwards: set[Place] = set()
        self._made: set[Place] = set()  # buffers that forwards have replaced: their shapes count
        self._states: dict[frozenset[tuple[Place, object]], int] = {frozenset(): 0}
        self.state = 0
        self._lay_out()
        self._read(reads)

    def __deepcopy__(self, memo: dict[int, Any]) -> Held:
        """That of a copy of the model, which is looked at when it is called: it is being made."""
        made = Held.__new__(Held)
        memo[id(self)] = made
        again = functools.partial(copy.deepcopy, memo=memo)

        def moved(held: Mapping[Place, Any]) -> dict[Place, Any]:
            return {
                place if place.is_shared else Place(again(place.holder), place.name): content
                for place, content in held.items()
            }

        vars(made).update(vars(self), _names=again(self._names), _twins=again(self._twins), _flat=None, _values=None)
        made._writes, made._local = again(self._writes), again(self._local)
        made._now, made._first, made._like = moved(self._now), moved(self._first), moved(self._like)
        made._changed, made._copied = moved(self._changed), moved(self._copied)
        made.by_forwards = {*moved(dict.fromkeys(self.by_forwards))}
        made._made = {*moved(dict.fromkeys(self._made))}
        made._unread, made._deep = {*moved(dict.fromkeys(self._unread))}, [*moved(dict.fromkeys(self._deep))]
        made._states = {frozenset(moved(dict(held)).items()): state for held, state in self._states.items()}
        return made

    # -- at each call ---------------------------------------------------------------------------------------------
    def look(self, written: Iterable[tuple[nn.Module, str]] = ()) -> None:
        """See what was changed since the last look.

        Args:
            written: attributes of modules that were set or deleted.
        """
        known = {Place(*place) for place in written if place[1] not in NOT_ATTRIBUTES}
        read = {place for place in known if self._is_read(place.name)}
        self._unread |= known - read
        if not self._has_same_values():  # whoever wrote past `__setattr__`, as by `__dict__`
            read |= {*self._now, *self._places()}
        if read or not self._is_same():
            self._compare({*self._deep, *self._around(), *read})

    @_apart()
    def compare(self) -> None:
        """As `look`, for all that there is, however it was written, but for what forwards write."""
        self._compare({*self._now, *self._places()}.difference(Place(*place) for place in self._writes.inside))

    def settle(self) -> None:
        """Take what was written since the last look as written by a forward, which its own proof follows.

        It is another state if proofs of other calls lean on that.
        """
        state = self.state
        inside = {Place(*place) for place in self._writes.inside if place[1] not in NOT_ATTRIBUTES}
        places = {place for place in inside if self._is_read(place.name)}
        self._writes.inside.clear()
        self.by_forwards |= places
        self._made |= {place for place in places if own_buffers(place.holder).get(place.name) is not None}
        if self._values is not None:
            self._written_values = self._values_in(self.by_forwards)
        same = self._is_same()
        if not self._has_same_values():  # as `cached_property` writes, which tells nobody
            places |= {place for place in self._places() if place not in self._now and place not in self._local}
        places |= set() if same else {*self._deep, *self._around()}
        if places:
            before = self._compare(places)
            if self.state != state and not self._leaned_on(self._written_in(before), state, self.state):
                self._accept(before)

    def _written_in(self, before: Mapping[Place, object]) -> list[Written]:
        """Where contents differ from what they were."""
        found: list[Written] = []
        for place, known in before.items():
            now = self._now.get(place, NOTHING)
            if now == known:
                continue
            attribute = isinstance(place.holder, nn.Module) and isinstance(place.name, str)
            start = self._told(place)
            for where, *contents in differing(start, known, now):
                sure = attribute or not self._is_led(place, where[len(start) :])
                found.append(Written(place.name if attribute else None, where, sure, (contents[0], contents[1])))
        return found

    def _told(self, place: Place) -> str:
        """As `_shown`, with a hook as `Trace.written` has it."""
        if not isinstance(place.name, tuple):
            return self._shown(place)
        hooks: list[tuple[Any, ...]] = [
            (table, key) for table, held in hook_tables(place.holder).items() for key in held
        ]
        return hook_name(
            self._names[place.holder],
            hooks.index(cast("tuple[Any, ...]", place.name)) if place.name in hooks else len(hooks),
        )

    def _is_led(self, place: Place, steps: str) -> bool:
        """Whether steps from a place go through a function's globals, to what has a place of its own."""
        held = self._standing(place)
        if isinstance(place.holder, type) and functions_in(held):
            return True
        first = re.match(r"\.(\w+)", steps)
        return isinstance(held, FunctionType) and (first is None or first[1] not in held.__code__.co_freevars)

    def _accept(self, before: Mapping[Place, object]) -> None:
        """Let what stands in these places now count as what was there before."""
        for place, known in before.items():
            content = self._now.get(place, NOTHING)
            first = self._first.get(place, NOTHING)
            if content in (known, first):
                continue
            self._copied.setdefault(place, first)
            if known == first:
                self._first[place] = content
            else:
                self._like[place] = (content, self._seen_as(place, known))
        self._number(before)

    @_apart()
    def _read(self, names: Iterable[str]) -> list[Place]:
        """Let what bodies ask for by these names count: earlier proofs, which read none of it, hold for any value."""
        new = frozenset(names) - self._reads
        self._reads |= new
        self._functions |= {Place(space_of(name), name.partition(":")[2]) for name in new if ":" in name}
        return self.find()

    @_apart()
    def find(self) -> list[Place]:
        """Look at what is there now, too, such as a new hook, as it is; returns the places."""
        found: list[Place] = []
        while places := [place for place in self._places() if place not in self._now and place not in self._local]:
            for place, content in self._contents(places):
                self._now[place] = self._first[place] = content
            self._lay_out()
            found += places
        return found

    def difference(self) -> Difference | None:
        """The first place in which the state differs from that of the first proofs."""
        if not self._changed:
            return None
        place = min(self._changed, key=self._shown)
        return difference(self._shown(place), self._first.get(place, NOTHING), self._changed[place])

    def holders(self) -> Iterator[object]:
        """What stands in the places in which the state differs from that of the first proofs."""
        return (self._standing(place) for place in self._changed)

    def _has_same_values(self) -> bool:
        """Whether modules have the same numbers, texts and the like, by the same names."""
        if self._values is None or not (self._values.is_same() and self._written_values.is_same()):
            return False
        return [*map(len, self._own)] == self._lengths

    def _is_same(self) -> bool:
        flat = self._flat
        return flat is not None and flat.is_same() and [*map(len, self._marks)] == self._marked

    # -- contents -------------------------------------------------------------------------------------------------
    @_apart()
    def _compare(self, places: Collection[Place]) -> dict[Place, object]:
        """Read these places; returns what was there before."""
        before = {place: self._now.get(place, NOTHING) for place in places}
        deep = self._flat is None or not self._flat.is_same() or [*map(len, self._marks)] != self._marked
        deep |= not self._has_same_values()
        for place, content in self._contents(places):
            if content is NOTHING and place not in self._first:
                continue
            self._first.setdefault(place, NOTHING)
            deep |= not isinstance(content, ContentValue) or isinstance(self._now.get(place), Node)
            self._now[place] = content
        self._number(places)
        if deep:
            self._lay_out()
        return before

    def _number(self, places: Iterable[Place]) -> None:
        """Find the state, after these places were looked at."""
        for place in places:
            content = self._seen_as(place, self._now.get(place, NOTHING))
            if content == self._first.get(place, NOTHING):
                self._changed.pop(place, None)
            else:
                self._changed[place] = content
        self.state = self._states.setdefault(frozenset(self._changed.items()), len(self._states))

    def _seen_as(self, place: Place, content: object) -> object:
        """What a content that a forward has made counts as: what was there before it."""
        made, known = self._like.get(place, (None, None))
        return known if content == made else content

    def _contents(self, places: Iterable[Place]) -> Iterator[tuple[Place, object]]:
        """What stands in these places.

        Raises:
            UnseenError: a body reads something that can be neither compared nor counted.
        """
        own, others = Reader(self._names), Reader(self._names, numbers)
        for place in places:
            if place in self._local:
                continue
            held = self._standing(place)
            reader = others if place.is_shared or isinstance(place.name, tuple) else own
            try:
                if held is MISSING:
                    yield place, NOTHING
                else:
                    yield place, global_content(place.holder, held, reader) if place.is_function else reader(held)
            except UnseenError as error:
                raise UnseenError(f"`{self._shown(place)}` is or holds {error}") from None

    @_apart()
    def _places(self) -> list[Place]:
        """All that bodies read."""
        named = [Place(module, name) for module in self._names for name in self._named(module) if self._is_read(name)]
        return [*named, *self._around()]

    def _around(self) -> Iterator[Place]:
        """Those of functions and of classes, and of parameters on which something was set."""
        yield from self._functions
        for module in self._names:
            for name, tensor in _tensors(module):
                if self._marks_on(Place(module, name), tensor):
                    yield Place(module, name)
        yield from (Place(*held) for held in read_of_classes(self._kinds, self._reads))

    def _named(self, module: nn.Module) -> Iterator[Any]:
        own = (name for name in vars(module) if name not in NOT_ATTRIBUTES and (module, name) not in self._local)
        constants = (
            name
            for name, held in own_buffers(module).items()
            if held is not None and (is_constant(held) or (module, name) in self._made)
        )
        hooks = ((t, k) for t, table in hook_tables(module).items() for k, hook in table.items() if is_users_code(hook))
        marked = (name for name, held in _tensors(module) if self._marks_on(Place(module, name), held))
        return chain(own, constants, marked, hooks if self._names[module] else ())

    def _standing(self, place: Place) -> Any:
        if isinstance(place.name, tuple):
            table, key = cast("tuple[str, int]", place.name)
            return hook_tables(place.holder)[table].get(key, MISSING)
        if place.is_shared:
            return cast("Mapping[str, Any]", vars(place.holder)).get(place.name, MISSING)
        tensor = own_parameters(place.holder).get(place.name)
        if tensor is None:
            tensor = own_buffers(place.holder).get(place.name)
        if tensor is not None:
            marks = self._marks_on(place, tensor)
            counts = is_constant(tensor) or place in self._made
            return tensor if counts else SimpleNamespace(**marks) if marks else MISSING
        return cast("dict[str, Any]", vars(place.holder)).get(place.name, MISSING)

    def _marks_on(self, place: Place, tensor: Tensor) -> dict[str, Any]:
        try:
            return marks_on(tensor, self._reads)
        except UnseenError as error:
            raise UnseenError(f"`{self._shown(place)}` is {error}") from None

    def _is_read(self, name: object) -> bool:
        return isinstance(name, tuple) or name in self._reads or ANYTHING in self._reads

    def _shown(self, place: Place) -> str:
        if place.is_shared:
            return f"{shown(place.holder)}.{place.name}"
        if isinstance(place.name, tuple):
            return f"{self._names[place.holder]}.{place.name[0]}[{place.name[1]}]"
        return f"{self._names[place.holder]}.{place.name}".lstrip(".")

    def _lay_out(self) -> None:
        """Remember what stands where, for `look`."""
        standing = [(place, self._standing(place)) for place in self._now]
        self._deep = [
            place
            for place, held in standing
            if type(held) not in PLAIN
            and held is not MISSING
            and place not in self._local
            and not (place.is_function and (is_function(held) or isinstance(held, ModuleType)))
        ]
        functions = [held for place in self._deep for held in self._written(place)]
        hidden = (Place(module, name) for module in self._names for name in hidden_names(module))
        self.hidden = next(map(self._shown, hidden), None)
        self._own = [*map(vars, self._names)]
        self._lengths = [*map(len, self._own)]
        self._values: Values | None = self._values_in(self._now.keys() - self.by_forwards)
        self._written_values = self._values_in(self.by_forwards)  # anew after each forward that writes
        tensors = [tensor for module in self._names for _, tensor in _tensors(module)]
        self._marks = [*map(vars, tensors)]
        self._marked = [*map(len, self._marks)]
        marked = [vars(tensor) for tensor in tensors if marks_on(tensor, self._reads)]
        deep = [held for place, held in standing if place in self._deep]
        spaces: dict[Any, list[str]] = {}
        for place in self._functions:
            spaces.setdefault(place.holder, []).append(place.name)
        self._flat: Flat | None = Flat([*deep, *functions, *self._kinds, *marked], self._names, spaces)

    def _values_in(self, places: Iterable[Place]) -> Values:
        """What stands in those of these places that are modules' own attributes, and hold nothing else."""
        own = (place for place in places if not place.is_shared and place not in self._local)
        tables = ((cast("dict[str, Any]", vars(place.holder)), place.name) for place in own)
        return Values((table, name) for table, name in tables if name in table and type(table[name]) in PLAIN)

    def _written(self, place: Place) -> list[Any]:
        """The functions that a class has in a place."""
        return functions_in(self._standing(place)) if isinstance(place.holder, type) and not place.is_function else []

    # -- the skeleton ---------------------------------------------------------------------------------------------
    @_apart()
    def follow(self, reads: Iterable[str] = ()) -> bool:
        """Let the skeleton's modules hold copies of what the model's hold now.

        Args:
            reads: names that a capture of the skeleton has asked for.

        Returns:
            Whether it was given something else by one of these: what it may have changed before wasn't followed.
        """
        twins = {twin: self._names[module] for module, twin in self._twins.items()}
        new = [place for place in self._read(reads) if not place.is_shared]
        reader = Reader(twins)
        for place in new:
            held = self._standing(Place(self._twins[place.holder], place.name))
            self._copied[place] = NOTHING if held is MISSING else reader(held)
        places = new if new else (place for place in self._now if not place.is_shared)
        changed = [
            p for p in places if p not in self._local and self._followed(p) != self._copied.get(p, self._first[p])
        ]
        standing = {place: self._standing(place) for place in (*changed, *self._unread)}
        made: Any = transplanted([without_checkpoint(held) for held in standing.values()], self._twins)
        for (place, held), item in zip(standing.items(), made, strict=True):
            self._put(self._twins[place.holder], place.name, MISSING if held is MISSING else item)
        self._copied |= {place: self._followed(place) for place in changed}
        self._unread.clear()
        return bool(new and changed)

    def _followed(self, place: Place) -> object:
        return self._now[place]

    def _put(self, twin: nn.Module, name: Any, item: Any) -> None:
        """Let a module of the skeleton have something."""
        if isinstance(name, tuple):
            table, key = cast("tuple[str, int]", name)
            if item is MISSING:
                hook_tables(twin)[table].pop(key, None)
            else:
                hook_tables(twin)[table][key] = item
        elif name in own_buffers(twin) and isinstance(item, Tensor):
            own_buffers(twin)[name] = item
        elif (held := dict(_tensors(twin)).get(name)) is not None:
            for mark in marks_on(held, self._reads):
                delattr(held, mark)
            vars(held).update(vars(item) if isinstance(item, SimpleNamespace) else {})
        elif item is MISSING:
            vars(twin).pop(name, None)
        else:
            setattr(twin, name, item)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's parameters and buffers."""
    every = chain(own_parameters(module).items(), own_buffers(module).items())
    return ((name, held) for name, held in every if held is not None)


__all__ = ["Held"]
