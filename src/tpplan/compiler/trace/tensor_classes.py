"""Tensors of classes of their own in a call: each is one value, what its class shows of it.

in:  such tensors among a call's arguments, and those that the call leaves there
out: their values, and the record with what reads and makes them

    codes = q._codes; x = codes * q._scale     what the body of a call does with the tensor `q` of a cache, and
    codes * scale                              what the class of `q` does to show it
    x = q                                      so the record says this

What a call leaves is shown at the end of the body that made it, as a part of that. An operation on inner tensors that
isn't one of those by which the class shows them has no meaning that a proof could go by, and is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tpplan.compat.schemas import schema_mutates
from tpplan.compiler.ir.kept_tensors import WrapperError, inner_tensors, is_wrapper, shown
from tpplan.compiler.ir.locations import Location
from tpplan.compiler.ir.trace import Frame, Operation, Reference
from tpplan.compiler.trace.copied import with_copies
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.unfollowed import UnfollowedError
from tpplan.ops.issued import ALIAS, CLONE


@dataclass(frozen=True, slots=True)
class _Shown:
    """A tensor of a class of its own, the operations that show it, and the value that they make."""

    tensor: Tensor
    inner: tuple[Tensor, ...]
    body: tuple[Operation, ...]
    value: int


class Wrapped:
    """The tensors of classes of their own in one recording."""

    def __init__(self, recorder: Recorder) -> None:
        """Know none yet."""
        self._recorder = recorder
        self._taken: dict[int, tuple[int, _Shown]] = {}
        self._left: dict[int, _Shown] = {}
        self._reading: _Reading | None = None
        self._moved: set[int] = set()

    @property
    def has_any(self) -> bool:
        """Whether there are any."""
        return bool(self._taken or self._left)

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Note the tensors of a call that are of a class of their own."""
        for tensor in tensors:
            if not is_wrapper(tensor):
                continue
            if tensor.requires_grad:
                raise UnfollowedError(f"it is passed a `{type(tensor).__name__}` that wants a gradient")
            for inner in inner_tensors(tensor):
                self._recorder.new_value(inner, False)
            value = self._recorder.value_of(tensor)
            self._taken[id(tensor)] = (value, self._show(tensor))

    def inner(self) -> Iterator[Tensor]:
        """The tensors that those of the call consist of."""
        return (tensor for _, known in self._taken.values() for tensor in known.inner)

    def held_value(self, tensor: Tensor) -> int | None:
        """The value that a tensor stands for, if the run has made it."""
        if not is_wrapper(tensor):
            return self._recorder.held_value(tensor)
        taken = self._taken.get(id(tensor))
        if taken is not None and all(a is b for a, b in zip(inner_tensors(tensor), taken[1].inner, strict=True)):
            return taken[0]
        known = self._left.get(id(tensor))
        if known is None:
            known = self._left[id(tensor)] = self._show(tensor)
        return known.value

    def _show(self, tensor: Tensor) -> _Shown:
        recorder = self._recorder
        try:
            with recorder, recorder.aside() as aside:
                made = shown(tensor)
        except WrapperError as error:
            raise UnfollowedError(str(error)) from error
        body = [node for node in aside.body if isinstance(node, Operation)]
        value = recorder.value_of(made)
        if body and body[-1].target is CLONE and body[-1].outputs == (value,):
            value = body.pop().inputs[0]
        return _Shown(tensor, tuple(inner_tensors(tensor)), tuple(body), value)

    def settled(self, root: Frame) -> Frame:
        """The record of a run, in which tensors of classes of their own are what they show.

        Raises:
            UnfollowedError: the run writes to inner tensors.
        """
        if not self.has_any:
            return root
        self._reading = _Reading(self._recorder, [*self._taken.values()])
        among = {node.outputs for known in self._left.values() for node in known.body}
        return with_copies(self._reading.rewritten(self._with_left(root)), self._recorder.values, among, self._moved)

    def stripped(self, root: Frame, live: Frame, kept: Collection[int]) -> Frame:
        """The record without what inner tensors are made of: how a rank packs its numbers is its own affair.

        Args:
            root: the record as it is settled.
            live: the same without dead operations.
            kept: the values that are read after the run.

        Raises:
            UnfollowedError: the run does more with inner tensors than reading what they show.
        """
        if self._reading is None:
            return root
        self._reading.refuse_others(live, kept)
        needed = {output for _, node in _operations(live) for output in node.outputs}

        def without(frame: Frame) -> Frame:
            body = (without(node) if isinstance(node, Frame) else node for node in frame.body)
            return replace(frame, body=tuple(n for n in body if isinstance(n, Frame) or not self._packs(n, needed)))

        return without(root)

    def _packs(self, node: Operation, needed: Collection[int | None]) -> bool:
        """Whether an operation that nothing needs has to do with inner tensors."""
        if any(output in needed for output in node.outputs):
            return False
        return bool(self._moved.intersection(o for o in node.outputs if o is not None)) or self._reads(node)

    def _reads(self, node: Operation) -> bool:
        return self._reading is not None and self._reading.reads(node)

    def _with_left(self, root: Frame) -> Frame:
        """The record with the operations that show what the call leaves, each at the end of the body that made it."""
        made = {
            output: (number, (frame.module, frame.call))
            for number, (frame, node) in enumerate(_operations(root))
            for output in node.outputs
            if output is not None
        }
        added: dict[tuple[str, int], list[Operation]] = {}
        for known in self._left.values():
            own = {output for node in known.body for output in node.outputs}
            read = {value for node in known.body for value in node.inputs} - own
            place = max((made[value] for value in read if value in made), default=(0, (root.module, root.call)))
            added.setdefault(place[1], []).extend(known.body)

        def extended(frame: Frame) -> Frame:
            body = tuple(extended(node) if isinstance(node, Frame) else node for node in frame.body)
            return replace(frame, body=(*body, *added.get((frame.module, frame.call), ())))

        return extended(root)


class _Reading:
    """Finds in a record what its bodies do to read the tensors of a call that are of classes of their own."""

    def __init__(self, recorder: Recorder, taken: Sequence[tuple[int, _Shown]]) -> None:
        self._recorder = recorder
        self._class = {
            recorder.value_of(inner): type(known.tensor).__name__ for _, known in taken for inner in known.inner
        }
        self._number = {value: value for value in self._class}  # which of those a value is by which a class shows
        self._shown = {known.value: value for value, known in taken}
        self._known: dict[object, tuple[int | None, ...]] = {}
        for _, known in taken:
            for node in known.body:
                self._number.update((output, output) for output in node.outputs if output is not None)
                self._known[self._key(node)] = node.outputs

    def rewritten(self, frame: Frame) -> Frame:
        """A record that reads what is shown."""
        body: list[Operation | Frame] = []
        for node in frame.body:
            if isinstance(node, Frame):
                body.append(self.rewritten(node))
                continue
            self._refuse_write(node)
            body += self._read(node) if self.reads(node) else (node,)
        return replace(frame, body=tuple(body))

    def _read(self, node: Operation) -> tuple[Operation, ...]:
        """What an operation on inner tensors, or on what was made of them, is in the record."""
        made = self._known.get(self._key(node))
        if made is None:
            return (node.renumbered({v: self._shown[v] for v in node.inputs if v in self._shown}),)
        if len(made) != 1 or made[0] not in self._shown:
            numbered = zip(node.outputs, made, strict=True)
            self._number.update((mine, its) for mine, its in numbered if mine is not None and its is not None)
            return ()
        value = self._shown[made[0]]
        return (Operation(ALIAS, (Reference(value),), {}, (value,), node.outputs, (), node.location),)

    def _refuse_write(self, node: Operation) -> None:
        for position in schema_mutates(node.target):
            held = node.arguments[position] if position < len(node.arguments) else None
            if isinstance(held, Reference):
                shared = (
                    v for v in self._class if self._recorder.storage_of(v) == self._recorder.storage_of(held.identifier)
                )
                name = self._class.get(next(shared, -1))
                if name is not None:
                    raise UnfollowedError(f"it writes to a tensor that a `{name}` keeps, at {node.location}")

    def reads(self, node: Operation) -> bool:
        """Whether an operation reads an inner tensor, or what its class makes of it."""
        return any(value in self._number for value in node.inputs)

    def refuse_others(self, root: Frame, kept: Collection[int]) -> None:
        """Raise if a record does more with inner tensors than reading what they show."""
        read: dict[int, Location | None] = dict.fromkeys(kept)
        for frame in root.walk():
            read.update((crossing.source, None) for crossing in (*frame.entries, *frame.exits))
            read.update((v, node.location) for node in frame.body if isinstance(node, Operation) for v in node.inputs)
        for value, location in read.items():
            if value in self._number:
                name = self._class.get(self._number[value]) or next(iter(self._class.values()))
                at = "" if location is None else f" at {location}"
                raise UnfollowedError(f"it reads what a `{name}` keeps{at}, in another way than that class shows it")

    def _key(self, node: Operation) -> object:
        def plain(held: Any) -> object:
            if isinstance(held, Reference):
                return "value", self._number.get(held.identifier), held.identifier in self._number or held.identifier
            if isinstance(held, (tuple, list)):
                return tuple(map(plain, held))  # pyright: ignore[reportUnknownArgumentType]
            return type(held).__name__, repr(held)

        return node.target, plain(node.arguments), repr(sorted((n, plain(held)) for n, held in node.keywords.items()))


def _operations(root: Frame) -> Iterator[tuple[Frame, Operation]]:
    return ((frame, node) for frame, node in root.in_order() if isinstance(node, Operation))


__all__ = ["Wrapped"]
