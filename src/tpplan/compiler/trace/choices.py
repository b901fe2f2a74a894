"""Choices: what a capture on meta tensors makes of operations whose results' sizes depend on numbers.

in:  the boolean rows of an index, or the number of entries that `nonzero` looks through
out: the indices that torch itself would turn them into, and how many there are in the trace

    x[chosen]                    ->   x[rows], rows = chosen.nonzero()
    hit.nonzero()  (8 experts)   ->   all eight, in numbers, as the model picks its modules by them
    torch.where(mask)  (96)      ->   89 of them, without numbers: a size that no axis divides
    best.unique()  (argmax of 8) ->   all eight, in numbers, as of `nonzero`

How many entries are found differs from call to call, so that no dim of such a size may be shared out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tpplan.compiler.ir.trace import Frame, Operation, Trace, Value
from tpplan.ops.dim_map import dims_of

_BOOLEAN = (torch.bool, torch.uint8)


def has_boolean_rows(args: tuple[Any, ...]) -> bool:
    """Whether an indexing operation picks by true and false, and not by numbers."""
    return any(isinstance(row, Tensor) and row.dtype in _BOOLEAN for row in args[1])


def with_numbered_rows(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an indexing operation, its boolean rows turned into the numbers of the entries they pick."""
    rows: list[Tensor | None] = []
    for row in args[1]:
        if isinstance(row, Tensor) and row.dtype in _BOOLEAN:
            rows += row.nonzero().unbind(1)
        else:
            rows.append(row)
    return (args[0], rows, *args[2:])


def called_with_found(trace: Trace) -> set[str]:
    """The modules that are called with what is found in a tensor, such as experts with the tokens routed to them."""
    called: set[str] = set()
    for frame in trace.root.walk():
        if (frame.module, frame.call) not in trace.chosen:
            continue
        found: set[int] = set()
        for node in frame.body:
            if isinstance(node, Frame):
                if any(crossing.source in found for crossing in node.entries):
                    called.add(node.module)
                    found.update(crossing.target for crossing in node.exits)
                continue
            # What rows are written to has the size that it had before.
            read = node.inputs[:1] if node.is_a("write") else node.inputs
            if node.is_a("places") or any(i in found for i in read):
                found.update(output for output in node.outputs if output is not None)
    return called


def found_count(entries: int) -> int:
    """How many of so many entries `nonzero` finds in a trace: a prime, that no number of ranks divides."""
    return next((n for n in range(entries, 2, -1) if _is_prime(n)), entries)


def choices_of(body: Iterable[object], value: int, values: Sequence[Value]) -> int | None:
    """Of how many a tensor's numbers name the best, if that is what they do."""
    made = {o: node for node in body if isinstance(node, Operation) for o in node.outputs if o is not None}
    while (node := made.get(value)) is not None:
        shape = values[node.inputs[0]].shape if node.inputs else ()
        if node.is_a("choice"):
            dims = dims_of(node.target, node.arguments, len(shape)) if shape else ()
            return shape[dims[0]] if len(dims) == 1 else None
        if not node.is_a("reshape", "detach", "copy", "alias"):
            return None
        value = node.inputs[0]
    return None


def found_among(body: Iterable[object], value: int, values: Sequence[Value]) -> int:
    """Of how many numbers a value is a place where these aren't zero, or a view of such places; 0 if it is none."""
    made = {o: node for node in body if isinstance(node, Operation) for o in node.outputs if o is not None}
    while (node := made.get(value)) is not None and len(node.inputs) == 1:
        if node.is_a("places"):
            shape = values[node.inputs[0]].shape
            return shape[0] if len(shape) == 1 else 0
        value = node.inputs[0]
    return 0


def _is_prime(number: int) -> bool:
    return all(number % n for n in range(2, int(number**0.5) + 1))


__all__ = [
    "called_with_found", "choices_of", "found_among", "found_count", "has_boolean_rows",
    "with_numbered_rows",
]  # fmt: skip
