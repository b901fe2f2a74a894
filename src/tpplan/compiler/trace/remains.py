"""Remains: what is there after a run that wasn't before it, in attributes, globals, arguments and results.

in:  a model and its surroundings before and after a run
out: `Effects`, in values of the run

    self.usage = x.sum()   ->   kept {12: "router.usage"}
    cache.append(k)        ->   left {("cache", 1): 14}
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from tpplan.compat.modules import named_modules
from tpplan.compiler.ir.hidden import hidden_tensors, is_plain
from tpplan.compiler.ir.objects import is_object
from tpplan.compiler.ir.observations import Effects
from tpplan.compiler.ir.pytree import leaves, tensors_in, tensors_of
from tpplan.compiler.ir.trace import Frame, Operation, Path
from tpplan.compiler.trace.effects import held_tensors
from tpplan.compiler.trace.left_state import changes, described, told
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.signatures import argument_names, takes_keywords
from tpplan.compiler.trace.skeleton import Skeleton
from tpplan.compiler.trace.slots import Slots, slots_of
from tpplan.compiler.trace.surroundings import Surroundings, cached_tensors
from tpplan.compiler.trace.tensor_classes import Wrapped
from tpplan.compiler.trace.watched_state import WatchedArray, WatchedNumber

_TABLES = frozenset(("_parameters", "_buffers", "_modules"))
_SCALARS = frozenset((bool, int, float, str, type(None)))
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Remains:
    """What stands in a model and around it before a run, and is compared with what does afterwards.

    Attributes:
        states: what can be told of the state before the run and, once its effects are told, after it.
    """

    def __init__(self, skeleton: Skeleton, around: Surroundings, recorder: Recorder, looks: bool) -> None:
        """Look at it before the run, or if it doesn't matter what that leaves, only at tensors."""
        self._skeleton, self._model, self._around = skeleton, skeleton.model, around
        self._recorder, self._looks = recorder, looks
        slots = self._slots()
        self._tensors = [*self._held(slots)]
        self._before, self._numbers = {id(tensor) for _, tensor in self._tensors}, told(slots)
        self.states = described(slots), described(slots)
        self.buffers = {recorder.value_of(tensor): names for tensor, names in skeleton.buffers}
        self._inputs: dict[Path, int] = {}

    def _slots(self) -> Slots:
        return slots_of(self._model, self._around) if self._looks else Slots({})

    def _held(self, slots: Slots) -> Iterator[tuple[str, Tensor]]:
        """The tensors that modules, their hooks and their surroundings hold."""
        yield from ((name, slot.value) for name, slot in slots.tensors())
        yield from held_tensors(self._model)

    def take(self, call: Call) -> dict[Path, int]:
        """Take the tensors of a call for what it is passed; their values, by where they sit in the arguments."""
        self._call, self._names = call, argument_names(type(self._model).forward)
        self._inputs = {path: self._recorder.value_of(tensor) for path, tensor in tensors_of(*call, self._names)}
        return self._inputs

    def readable(self) -> set[int]:
        """The ids of the tensors that a run may read which it hasn't made."""
        attributes: list[Any] = [
            held
            for _, module in named_modules(self._model)
            for name, held in vars(module).items()
            if name not in _TABLES and type(held) not in _SCALARS and (type(held) not in (dict, OrderedDict) or held)
        ]
        read = [
            *(tensor for tensor, _ in (*self._skeleton.parameters, *self._skeleton.buffers)),
            *(tensor for _, tensor in tensors_of(*self._call, self._names)),
            *(tensor for _, tensor in hidden_tensors(attributes)),
            *(tensor for cache in self._around.caches.values() for tensor in cached_tensors(cache)),
        ]
        return self._before | set(map(id, read))

    def changed(self) -> tuple[str, ...]:
        """The names of what the run has changed so far."""
        slots = self._slots()
        made = (name for name, tensor in self._held(slots) if id(tensor) not in self._before)
        held_value = self._recorder.held_value
        put = (names[0] for tensor, names in self._skeleton.buffers if held_value(tensor) not in self.buffers)
        return tuple(dict.fromkeys((*changes(self._numbers, told(slots)), *made, *put)))

    def effects(
        self, result: object, named: Mapping[int, tuple[str, object]], wrapped: Wrapped, others: Collection[int]
    ) -> Effects:
        """What the run has left behind, but for what is told by `reread`.

        Args:
            result: what the model returned.
            named: the objects that modules were passed, by id, with the arguments' names.
            wrapped: the tensors of classes of their own.
            others: values that are read after the run for other reasons.
        """
        slots = self._slots()
        self.states = self.states[0], described(slots)
        kept = {
            value: name
            for name, tensor in self._held(slots)
            if id(tensor) not in self._before and (value := wrapped.held_value(tensor)) is not None
        }
        outside = frozenset(value for value, name in kept.items() if name in slots and slots[name].outside)
        for cache in self._around.touched():
            for tensor in cached_tensors(cache):
                value = self._recorder.held_value(tensor)
                if value is not None:
                    kept[value] = f"the cache of {cache.__qualname__}"
        passed = self._passed_on() | self._call[1].keys()
        objects = [*_objects(result, named, passed)]
        in_objects = self._in_objects() | {
            at: tensor
            for path, held in objects
            if path and is_object(held)
            for at, tensor in tensors_in(held, path, objects=True)
        }
        left = {
            path: value
            for path, tensor in tensors_of(*self._call, self._names)
            if (value := wrapped.held_value(tensor)) is not None and value != self._inputs.get(path)
        }
        left |= {path: value for path, t in in_objects.items() if (value := wrapped.held_value(t)) is not None}
        left = {path: value for path, value in left.items() if value != self._inputs.get(path)}
        hidden = {
            value: type(held).__name__
            for path, held in objects
            if not path
            for _, tensor in hidden_tensors(held)
            if (value := wrapped.held_value(tensor)) is not None
        }
        state = told(slots)
        codes = (getattr(cache.__wrapped__, "__code__", None) for cache in self._around.caches.values())
        return Effects(
            kept=kept,
            left=left,
            hidden=hidden,
            in_objects=frozenset(in_objects),
            outside=outside,
            made=frozenset(self._recorder.effects.made.union(kept, left.values(), hidden, others)),
            written=frozenset(changes(self._numbers, state)),
            state=state,
            reread=frozenset(),
            cached=frozenset(code for code in codes if code),
            wraps=wrapped.has_any,
        )

    def reread(self, root: Frame) -> frozenset[str]:
        """The places of which operations read the tensor that stood there before the run."""
        nodes = (node for frame in root.walk() for node in frame.body)
        read = {value for node in nodes if isinstance(node, Operation) for value in node.inputs}
        return frozenset(name for name, tensor in self._tensors if self._recorder.held_value(tensor) in read)

    def _passed_on(self) -> set[str]:
        """The names by which a call may pass arguments: the root's, and with `**kwargs` those of modules inside."""
        kinds = {type(m) for m in self._model.modules()} if takes_keywords(type(self._model).forward) else ()
        return {*self._names, *(name for kind in kinds for name in argument_names(kind.forward))}

    def _in_objects(self) -> dict[Path, Tensor]:
        """The tensors of the call that an object holds, which is no container of Python's."""
        (arguments, keywords), names = self._call, self._names
        placed = ((names[i] if i < len(names) else f"*{i}", held) for i, held in enumerate(arguments))
        plain = {at for name, held in (*placed, *keywords.items()) for at, _ in tensors_in(held, (name,))}
        return {path: tensor for path, tensor in tensors_of(*self._call, names) if path not in plain}


def _objects(
    result: object, named: Mapping[int, tuple[str, object]], names: Collection[str]
) -> Iterator[tuple[Path, object]]:
    """What is no container among the results, with the path by which a call would pass it; () if it wouldn't.

    An object that goes by an argument's name, such as a cache, is for a later call to be passed. In a tuple it has the
    name by which modules were passed it.
    """
    for path, held in leaves(result):
        if not (isinstance(held, (Tensor, WatchedArray, WatchedNumber)) or is_plain(held)):
            name = named.get(id(held), ("",))[0]
            yield path if path[:1] in {(each,) for each in names} else (name,) if name in names else (), held


__all__ = ["Remains"]
