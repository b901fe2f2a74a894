"""What is passed on: whether two runs of a model give the same values to the operations that both of them call.

if len(rows) == 0: continue               ->   alike: the other run leaves out what the one does between
y = y + (a if len(rows) > 4 else b)       ->   not alike: the sum gets another value
h.softmax(0 if len(rows) > 4 else -1)     ->   not alike: only sizes may be others
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import repeat
from typing import Any, cast

import torch

from tpplan.compat.schemas import schema_defaults
from tpplan.compiler.ir.layout import REPLICATED, Layout
from tpplan.compiler.ir.trace import Crossing, Frame, Operation, Reference, Trace

_LENGTHS = frozenset(("size", "sizes", "split_size", "split_sizes", "start", "end", "length", "repeats"))
Step = tuple[Frame, Operation | Crossing]


def passes_on_alike(one: Trace, other: Trace, layouts: Mapping[int, Layout], replaced: Collection[str]) -> bool:
    """Whether the other run does no more, with the same values, or with those that what it leaves out reads.

    Args:
        one, other: the runs.
        layouts: of the values of the one: what takes the place of another lies as that does.
        replaced: modules with other bodies, whose values have no layouts; what these do is proved for any rows.
    """
    names = {name: value for value, held in one.stored.items() for name in held}
    alike = {value: names[held[0]] for value, held in other.stored.items()}
    known = {value: frozenset((value,)) for value in one.stored}  # of the one's values those that the other has, too
    zeros, live = set[int](), _live(other)

    def is_same(value: int, given: int, module: str) -> bool:
        """Whether what the other run reads may take the place of a value."""
        of, held = known.get(value, frozenset[int]()), alike.get(given)
        if given not in live:
            return True
        if held is None and not of:  # neither was made by a step, nor is stored
            numbers, others = one.values[value].numbers, other.values[given].numbers
            return numbers is others or (numbers is not None and others is not None and torch.equal(numbers, others))
        here, there = layouts.get(held or 0, REPLICATED), layouts.get(value, REPLICATED)
        return held in of and (here == there or module in replaced or (held in zeros and there.forward == "P"))

    left = [*other.root.in_order()][::-1]
    for frame, step in one.root.in_order():
        read, made = _values(step)
        if left and _key((frame, step)) == _key(left[-1]) and _settings(step) == _settings(left[-1][1]):
            own_read, own_made = _values(left[-1][1])
            if len(read) == len(own_read) and all(map(is_same, read, own_read, repeat(frame.module))):
                left.pop()
                if step.is_a("zeros") if isinstance(step, Operation) else step.source in zeros:
                    zeros.update(value for value in made if value is not None)
                known |= {value: frozenset((value,)) for value in made if value is not None}
                alike |= {a: b for a, b in zip(own_made, made, strict=True) if a is not None and b is not None}
                continue
        through = frozenset[int]().union(*(known.get(value, frozenset[int]()) for value in read))
        known |= {value: through or frozenset((value,)) for value in made if value is not None}
    return not left


def _live(trace: Trace) -> set[int]:
    """The values that operations read, or that are returned."""
    found = {crossing.source for crossing in trace.root.exits}
    for _, node in [*trace.root.in_order()][::-1]:
        if isinstance(node, Operation):
            found.update(node.inputs)
        elif node.target in found:
            found.add(node.source)
    return found


def _key(step: Step) -> Hashable:
    """What is done, and where in the source."""
    frame, node = step
    return frame.module, (node.target, node.location) if isinstance(node, Operation) else node.path


def _settings(node: Operation | Crossing) -> dict[str, Any]:
    """The arguments that are neither tensors nor sizes."""
    if not isinstance(node, Operation):
        return {}
    names = [name for name, _ in schema_defaults(node.target)]
    given = dict(zip(names, node.arguments, strict=False)) | node.keywords
    return {name: _setting(held, name in _LENGTHS) for name, held in given.items()}


def _setting(held: Any, is_length: bool) -> Any:
    if isinstance(held, (tuple, list)):
        return tuple(_setting(item, is_length) for item in held)  # pyright: ignore[reportUnknownVariableType]
    kind = cast("Any", type(held))
    return kind if isinstance(held, Reference) or is_length else held


def _values(node: Operation | Crossing) -> tuple[Sequence[int], Sequence[int | None]]:
    """Those that a step reads, and those that it makes."""
    return (node.inputs, node.outputs) if isinstance(node, Operation) else ((node.source,), (node.target,))


__all__ = ["passes_on_alike"]
