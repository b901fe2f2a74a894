"""What is passed on: whether two runs of a model give the same values to the operations that both of them call.

if len(rows) == 0: continue               ->   alike: the one run leaves out what the other does between
y = y + (a if len(rows) > 4 else b)       ->   not alike: the sum gets another value
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher

from tpplan.compiler.ir.trace import Operation, Trace


def passes_on_alike(one: Trace, other: Trace) -> bool:
    """Whether the other run does no more, and reads the same values, or those that what it leaves out reads."""
    keys, others = _keys(one), _keys(other)
    left = iter(keys)
    if not all(key in left for key in others):
        return False  # the other does what the one doesn't
    blocks = [(0, 0, len(keys))]
    if keys != others:
        blocks = SequenceMatcher(None, keys, others, autojunk=False).get_matching_blocks()
    pairs = [(i + n, j + n) for i, j, size in blocks for n in range(size)]
    read = _origins(one, {i: n for n, (i, _) in enumerate(pairs)})
    given = _origins(other, {j: n for n, (_, j) in enumerate(pairs)})
    return all(
        len(read[i]) == len(given[j]) and all(a & b for a, b in zip(read[i], given[j], strict=True)) for i, j in pairs
    )


def _keys(trace: Trace) -> list[Hashable]:
    """What is done, and where in the source: not with which values."""
    return [
        (frame.module, (node.target, node.location) if isinstance(node, Operation) else node.path)
        for frame, node in trace.root.in_order()
    ]


def _origins(trace: Trace, common: dict[int, int]) -> list[Sequence[frozenset[Hashable]]]:
    """For each step the origins of what it reads: results of `common` steps by their numbers, parameters by name."""
    found: list[Sequence[frozenset[Hashable]]] = []
    known: dict[int, frozenset[Hashable]] = {}
    for place, (_, node) in enumerate(trace.root.in_order()):
        is_step = isinstance(node, Operation)
        inputs, outputs = (node.inputs, node.outputs) if is_step else ((node.source,), (node.target,))
        read = [known.get(value, frozenset((trace.parameters.get(value, ("",))[0],))) for value in inputs]
        found.append(read)
        through = frozenset[Hashable]().union(*read) or frozenset((f"made by step {place}",))
        for slot, value in enumerate(outputs):
            if value is not None:
                known[value] = frozenset(((common[place], slot),)) if place in common else through
    return found


__all__ = ["passes_on_alike"]
