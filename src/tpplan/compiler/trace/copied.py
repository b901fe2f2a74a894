"""Copies, bit by bit: operations that pack numbers into fewer bytes, and take them out again.

in:  a record that packs small whole numbers and unpacks them
out: the record in which what came out is what went in, where that is proved

    p = x[:2] | x[2:] << 4;   y = cat(p & 15, p >> 4)      ->      y = x

Bits are moved, masked and or-ed here. Each bit of what comes out is the `or` of some bits of what went in, so that a
few runs with numbers tell which they are: with all bits of those entries set whose number has a certain bit, or has
it not, and with one bit of every entry.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tpplan.compiler.ir.trace import Frame, Operation, Reference, Value
from tpplan.ops.issued import ALIAS

_MOVING = (
    "zeros", "cast", "alias", "copy", "copy into", "detach", "bits", "join", "stack", "expand", "transposition",
    "reshape", "select", "slice", "squeeze", "unsqueeze",
)  # fmt: skip
_WHOLE = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
_known: dict[object, bool] = {}


def with_copies(
    frame: Frame, values: Sequence[Value], among: Collection[tuple[int | None, ...]], moved: set[int]
) -> Frame:
    """A record with what is a copy, bit by bit, of what a body has made before.

    Args:
        frame: the record.
        values: those of the recording.
        among: the results of the operations that may make such copies.
        moved: gets what lay between a value and its copy.
    """
    body = [with_copies(node, values, among, moved) if isinstance(node, Frame) else node for node in frame.body]
    operations = [node for node in body if isinstance(node, Operation)]
    for place in range(len(body) - 1, -1, -1):
        node = body[place]
        if not isinstance(node, Operation) or node.outputs not in among or len(node.outputs) != 1:
            continue
        (made,) = node.outputs
        if made is None or made in moved or not node.is_a(*_MOVING):
            continue
        found = _Moves(operations, values, made)
        if found.source is not None and found.is_copy():
            source = found.source
            body[place] = Operation(ALIAS, (Reference(source),), {}, (source,), node.outputs, (), node.location)
            moved |= found.made
    return replace(frame, body=tuple(body))


class _Moves:
    """The operations that lead to a value and only move bits, and what they begin with."""

    def __init__(self, operations: Sequence[Operation], values: Sequence[Value], made: int) -> None:
        self._values, self._result = values, made
        maker: dict[int, int] = {}
        writers: dict[int, list[int]] = defaultdict(list)
        for i, node in enumerate(operations):
            maker.update((output, i) for output in node.outputs if output is not None)
            for value in node.overwritten:
                writers[value].append(i)
        places: set[int] = set()
        begins: set[int] = set()
        waiting, seen = [made], {made}
        possible = True
        while waiting:
            value = waiting.pop()
            own = maker.get(value)
            moved = own is not None and self._moves(operations[own])
            if not moved:
                begins.add(value)
            written = writers.get(value, [])
            possible &= all(self._moves(operations[i]) and i < maker[made] for i in written)
            possible &= moved or not written
            for i in (*([own] if own is not None and moved else []), *written):
                places.add(i)
                found = [v for v in operations[i].inputs if v not in seen]
                seen.update(found)
                waiting += found
        self._body = [operations[i] for i in sorted(places)]
        self.made = {output for node in self._body for output in node.outputs if output is not None}
        self.source = next(iter(begins)) if possible and len(begins) == 1 else None
        if self.source is not None:
            mine, its = values[made], values[self.source]
            if its.dtype not in _WHOLE or (mine.shape, mine.dtype) != (its.shape, its.dtype):
                self.source = None
            else:
                self._largest = _largest(operations, maker, self.source, its.dtype)

    def _moves(self, node: Operation) -> bool:
        whole = all(self._values[v].dtype in _WHOLE for v in (*node.inputs, *node.outputs) if v is not None)
        return node.is_a(*_MOVING) and whole

    def is_copy(self) -> bool:
        """Whether the value is, bit by bit, the one that the operations begin with."""
        assert self.source is not None
        numbers = {self.source: 0}
        shown = [_numbered(node, numbers) for node in self._body]
        key = (self._values[self.source].shape, self._values[self.source].dtype, self._largest, repr(shown))
        if key not in _known:
            with torch.no_grad():
                _known[key] = all(torch.equal(self._run(x), x) for x in self._samples())
        return _known[key]

    def _samples(self) -> Iterator[Tensor]:
        assert self.source is not None
        source = self._values[self.source]
        count, dtype = torch.Size(source.shape).numel(), source.dtype
        number, largest = torch.arange(count), self._largest
        yield torch.zeros(source.shape, dtype=dtype)
        for bit in range(max(count - 1, 0).bit_length()):
            has = (number >> bit & 1).reshape(source.shape) > 0
            for chosen in (has, ~has):
                yield torch.where(chosen, largest, 0).to(dtype)
        for bit in range(dtype.itemsize * 8):
            one = 1 << bit & largest
            yield torch.full(source.shape, one).to(dtype)
            yield torch.full(source.shape, largest ^ one).to(dtype)

    def _run(self, tensor: Tensor) -> Tensor:
        """The operations, on numbers."""
        assert self.source is not None
        held: dict[int, Tensor] = {self.source: tensor.clone()}

        def filled(argument: Any) -> Any:
            if isinstance(argument, Reference):
                return held[argument.identifier]
            return [*map(filled, argument)] if isinstance(argument, (tuple, list)) else argument  # pyright: ignore

        for node in self._body:
            named = {name: filled(argument) for name, argument in node.keywords.items()}
            result: Any = node.target(*map(filled, node.arguments), **named)
            made: Any = result if isinstance(result, (tuple, list)) else (result,)  # pyright: ignore[reportUnknownVariableType]
            held.update((output, item) for output, item in zip(node.outputs, made, strict=True) if output is not None)
        return held[self._result]


def _largest(operations: Sequence[Operation], maker: dict[int, int], value: int, dtype: torch.dtype) -> int:
    """A number whose bits are all that a value may have: fewer than its dtype's after a clamp."""
    every = -1 if dtype.is_signed else (1 << dtype.itemsize * 8) - 1
    cast = operations[maker[value]] if value in maker else None
    if cast is None or not cast.is_a("cast") or cast.inputs[0] not in maker:
        return every
    clamp = operations[maker[cast.inputs[0]]]
    ends = clamp.arguments[1:3] if clamp.is_a("clamp") else ()
    if len(ends) < 2 or not all(isinstance(end, (int, float)) for end in ends) or ends[0] < 0:
        return every
    return min(torch.iinfo(dtype).max, (1 << int(ends[1]).bit_length()) - 1)


def _numbered(node: Operation, numbers: dict[int, int]) -> object:
    """An operation with its values numbered in order of appearance."""

    def plain(argument: Any) -> object:
        if isinstance(argument, Reference):
            return "#", numbers.setdefault(argument.identifier, len(numbers))
        return tuple(map(plain, argument)) if isinstance(argument, (tuple, list)) else argument  # pyright: ignore

    made = [None if output is None else numbers.setdefault(output, len(numbers)) for output in node.outputs]
    return node.name, plain(node.arguments), [(name, plain(held)) for name, held in node.keywords.items()], made


__all__ = ["with_copies"]
