"""Tails: results of which a body reads no more than so many entries from the end of the sequence.

in:  the regions of a trace
out: the exits by which such results leave their modules, each with how many entries are read

    self.lm_head(self.model(ids)[:, -1:])   ->   the result of `model`, 1
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from tpplan.compiler.ir.region import CallNode, Instance, OperationNode
from tpplan.compiler.ir.trace import Trace
from tpplan.compiler.place.solution import Place
from tpplan.compiler.rules.propagate import copies, tail_of


def tails(root: Instance, trace: Trace) -> dict[Place, int]:
    """By region and exit; without what is seen outside of the bodies as well."""
    seen = {*trace.effects.leaving, *trace.numbers.tested, *trace.draws.seeded}
    found: dict[Place, int] = {}
    _look(root, seen, found)
    return found


def _look(instance: Instance, seen: Set[int], found: dict[Place, int]) -> None:
    region = instance.region
    for node in region.nodes:
        count = tail_of(node, region.values) if isinstance(node, OperationNode) else 0
        if count:
            for place in _makers(instance, node.inputs[0], seen):
                found[place] = max(count, found.get(place, 0))
    for child in instance.children:
        _look(child, seen, found)


def _makers(instance: Instance, number: int, seen: Set[int]) -> Iterator[Place]:
    """The exits through which a value of a body has come, from the outermost inwards, if nothing was done to it."""
    while True:
        region = instance.region
        node = next((n for n in region.nodes if number in n.outputs), None)
        if node is None or instance.values[number] in seen:
            return
        if isinstance(node, OperationNode):
            if not copies(node, region.values):
                return
            number = node.inputs[0]
            continue
        child = instance.children[sum(isinstance(n, CallNode) for n in region.nodes[: region.nodes.index(node)])]
        target = node.region.outputs[node.outputs.index(number)]
        boundary = next((b for b in node.region.exits if b.target == target), None)
        if boundary is None or not seen.isdisjoint(child.values[i] for i in (target, boundary.source)):
            return
        yield (node.region.example, target)
        instance, number = child, boundary.source


__all__ = ["tails"]
