"""Dead results: what leaves a module and is read by nobody, as lists of hidden states often are.

in:  the root's region, and the values whose layouts are constrained
out: by region, the exits that are dead and have to be followed all the same

A state doesn't hold the layout of a dead result: each leaves as it is made. A decoder that keeps the stream and the
scores of every layer had as many states as combinations of their layouts. A result whose size somebody reads has to be
followed, through every module that it leaves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from tpplan.compiler.ir.region import CallNode, Region
from tpplan.compiler.place.solution import Place


def kept_exits(root: Region, places: Collection[Place]) -> Mapping[int, frozenset[int]]:
    """By id of the region, the positions of dead exits whose values are among `places` outside of it."""
    constrained: dict[tuple[str, int], set[int]] = defaultdict(set)
    for name, number in places:
        constrained[name].add(number)
    kept: dict[int, frozenset[int]] = {}
    todo: list[tuple[Region, frozenset[int]]] = [(root, frozenset())] if constrained else []
    seen: set[tuple[int, frozenset[int]]] = set()
    while todo:
        region, wanted = todo.pop()
        if (id(region), wanted) in seen:
            continue
        seen.add((id(region), wanted))
        exits = frozenset(i for i, held in enumerate(region.exits) if held.dead and held.target in wanted)
        if exits:
            kept[id(region)] = kept.get(id(region), frozenset()) | exits
        read = constrained[region.example] | {region.exits[i].source for i in exits}
        for node in region.nodes:
            if isinstance(node, CallNode):
                pairs = zip(node.outputs, node.region.outputs, strict=True)
                todo.append((node.region, frozenset(inner for outer, inner in pairs if outer in read)))
    return kept


__all__ = ["kept_exits"]
