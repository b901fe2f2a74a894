"""What is passed on: whether two runs of a model give the same values to the operations that both of them call.

if len(rows) == 0: continue               ->   alike: the other run leaves out what the one does between
y = y + (a if len(rows) > 4 else b)       ->   not alike: the sum gets another value
h.softmax(0 if len(rows) > 4 else -1)     ->   not alike: only sizes may be others
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

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
    steps, others = [*one.root.in_order()], [*other.root.in_order()]
    left, places = enumerate(map(_key, steps)), dict[int, int]()
    for place, key in enumerate(map(_key, others)):
        found = next((i for i, held in left if held == key), None)
        if found is None or _settings(steps[found][1]) != _settings(others[place][1]):
            return False
        places[found] = place
    names = {name: value for value, held in one.stored.items() for name in held}
    known, zeros = {value: frozenset((value,)) for value in one.stored}, set[int]()
    alike = {value: names[held[0]] for value, held in other.stored.items()}
    for place, (frame, step) in enumerate(steps):
        read, made = _values(step)
        origins = [known.get(value, frozenset[int]()) for value in read]
        if place not in places:
            through = frozenset[int]().union(*origins)
            known |= {value: through or frozenset((value,)) for value in made if value is not None}
            continue
        own_read, own_made = _values(others[places[place]][1])
        for value, of, given in zip(read, origins, own_read, strict=True):
            held = alike.get(given)
            if held is None and not of:
                continue  # neither was made by a step, nor is stored
            here, there = layouts.get(held or 0, REPLICATED), layouts.get(value, REPLICATED)
            lies = here == there or frame.module in replaced or (held in zeros and there.forward == "P")
            if held not in of or not lies:
                return False
        if step.is_a("zeros") if isinstance(step, Operation) else step.source in zeros:
            zeros.update(value for value in made if value is not None)
        known |= {value: frozenset((value,)) for value in made if value is not None}
        alike |= {a: b for a, b in zip(own_made, made, strict=True) if a is not None and b is not None}
    return True


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
    return type(held) if isinstance(held, Reference) or is_length else held


def _values(node: Operation | Crossing) -> tuple[Sequence[int], Sequence[int | None]]:
    """Those that a step reads, and those that it makes."""
    return (node.inputs, node.outputs) if isinstance(node, Operation) else ((node.source,), (node.target,))


__all__ = ["passes_on_alike"]
