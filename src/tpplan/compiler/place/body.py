"""Bodies: a region made ready for the placement, which walks it many times.

in:  a region
out: `Body`: for every node, where its operands stand in a state, and what of the state is still to be read after it

A state is a tuple of codes, small numbers that stand for layouts, and so quick to compare and to look up.

    x -> a = norm(x) -> b = x + a     state before the sum: (x, a); after it: (b,)
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence

from tpplan.compiler.ir.layout import REPLICATED, Layout
from tpplan.compiler.ir.region import LocalValue, OperationNode, Region, RegionBoundary

Codes = tuple[int, ...]
GONE = -1  # in place of the layout of a value that nobody reads any more, or whose exit is chosen
_Picker = Callable[[Codes], Codes]


class Numbering:
    """Numbers layouts."""

    def __init__(self) -> None:
        """Start without any."""
        self._known: list[Layout] = []
        self._codes: dict[Layout, int] = {}

    def code(self, layout: Layout) -> int:
        """The number of a layout."""
        found = self._codes.get(layout)
        if found is None:
            found = self._codes[layout] = len(self._known)
            self._known.append(layout)
        return found

    def layouts(self, codes: Codes) -> tuple[Layout, ...]:
        """The layouts that these numbers stand for."""
        return tuple([self._known[code] for code in codes])

    def known(self, codes: Codes) -> tuple[Layout | None, ...]:
        """As `layouts`; None for numbers below zero, which stand for no single one."""
        return tuple([self._known[code] if code >= 0 else None for code in codes])


class Body:
    """How states pass through a region.

    Attributes:
        constants: codes of parameters and constants, which aren't part of a state.
        entries: takes, of the codes of the region's inputs, those of its entries' sources.
        start: of the codes of inputs and entries' targets, the state at the beginning.
        operands: for each node, of a state and the constants, its operands; at last the exits' sources.
        following: for each node, of a state, the results and the constants, the state after it; at last the outputs.
        names: for each node, the values that the state before it is of; at last those at the end.
        leaving: for each node, the places in that state of values that one exit reads from there on and nothing else,
            if it leads out of the model, or is dead and kept; at last those at the end.
        read: for each node, the places of its operands in that state; at last those of what leaves in a
            layout that the caller can't choose.
        alone: for each node, the place of the only operand in that state, where nothing reads that later and the node
            makes one value; else None. At last None.
    """

    def __init__(self, region: Region, numbering: Numbering, kept: Collection[int] = ()) -> None:
        """Work out the positions. Of exits that are dead, those of `kept` count as read."""
        dead = frozenset(i for i, b in enumerate(region.exits) if b.dead and i not in kept)
        read = [boundary for i, boundary in enumerate(region.exits) if i not in dead]
        live = _liveness(region, read)
        self.constants: Codes = ()
        self._places: dict[int | None, int] = {}
        self._region = region
        self._numbering = numbering
        self.entries = self._picker(region.inputs, [b.source for b in region.entries])
        self.start = self._picker((*region.inputs, *(b.target for b in region.entries)), live[0])
        self.names = live
        self.read: list[tuple[int, ...]] = []
        self.operands: list[_Picker] = []
        self.following: list[_Picker] = []
        self.alone: list[int | None] = []
        for before, after, node in zip(live, live[1:], region.nodes, strict=False):
            overwritten = node.overwritten if isinstance(node, OperationNode) else ()
            made = [o for o in node.outputs if o is not None]
            self.operands.append(self._picker(before, (*node.inputs, *overwritten)))
            self.read.append(_places(before, (*node.inputs, *overwritten)))
            lasts = len(self.read[-1]) != 1 or before[self.read[-1][0]] in after
            self.alone.append(
                None if lasts or overwritten or len(node.outputs) != 1 or len(made) != 1 else self.read[-1][0]
            )
            self.following.append(self._picker((*before, *made), after))
        self.alone.append(None)
        self._joined: dict[int, list[tuple[int, ...]]] = {}
        self._readers: dict[int, list[int]] = defaultdict(list)
        for position, places in enumerate(self.read):
            for place in places:
                self._readers[live[position][place]].append(position)
        for name in {*(b.source for b in region.exits), *region.outputs}:
            self._readers[name] += [len(region.nodes)] * 2  # it stays to be read
        ends = [None if i in dead else b.source for i, b in enumerate(region.exits)]
        self.operands.append(self._picker(live[-1], ends))
        self.read.append(_places(live[-1], (*_chosen_inside(region, read), *region.outputs)))
        leaving = [boundary for boundary in read if boundary.final or boundary.dead]
        self.leaving = _leaving(region, leaving, live)
        self.following.append(self._picker((*live[-1], *(b.target for b in region.exits)), region.outputs))

    def joined(self, position: int) -> list[tuple[int, ...]]:
        """The places, before a node, of values that wait to be joined: of one shape, on their way to one node alone."""
        if position not in self._joined:
            groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
            for place, name in enumerate(self.names[position]):
                where = self._sink(name)
                if where is not None:
                    groups[where, self._region.values[name].shape].append(place)
            self._joined[position] = [tuple(places) for places in groups.values() if len(places) > 1]
        return self._joined[position]

    def _sink(self, name: int) -> int | None:
        """The first node on a value's way, on which nothing else reads it, that reads other values as well."""
        while len(self._readers[name]) == 1:
            (position,) = self._readers[name]
            node = self._region.nodes[position]
            made = [output for output in node.outputs if output is not None]
            if len(self.read[position]) != 1 or len(made) != 1:
                return position
            (name,) = made
        return None

    def _picker(self, names: Sequence[int], wanted: Sequence[int | None]) -> _Picker:
        """Takes the codes of `wanted` out of those of `names`, with the constants after them.

        Of a name that stands there twice, the last counts. None is for what is `GONE`.
        """
        places: dict[int | None, int] = {name: place for place, name in enumerate(names)}
        found = [places[name] if name in places else len(names) + self._constant(name) for name in wanted]
        if not found:
            return lambda codes: ()
        if len(found) == 1:
            (only,) = found
            return lambda codes: (codes[only],)
        return operator.itemgetter(*found)

    def _constant(self, name: int | None) -> int:
        if name not in self._places:
            self._places[name] = len(self.constants)
            held = GONE if name is None else self._numbering.code(_source_layout(self._region.values[name]))
            self.constants += (held,)
        return self._places[name]


def _places(names: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    return tuple(place for place, name in enumerate(names) if name in wanted)


def _chosen_inside(region: Region, exits: Sequence[RegionBoundary]) -> list[int]:
    """What leaves by these exits, and can't leave its layout to the caller."""
    counts = Counter(boundary.source for boundary in exits)
    return [b.source for b in exits if not region.depth or b.dead or counts[b.source] > 1]


def _source_layout(value: LocalValue) -> Layout:
    return value.parameter if value.parameter is not None else REPLICATED


def _leaving(
    region: Region, exits: Sequence[RegionBoundary], live: Sequence[tuple[int, ...]]
) -> list[tuple[tuple[int, RegionBoundary], ...]]:
    """For each position of the body (and its end), what one of `exits` reads from there on and nothing else."""
    found: list[list[tuple[int, RegionBoundary]]] = [[] for _ in live]
    counts = Counter([boundary.source for boundary in region.exits] + list(region.outputs))
    last = dict.fromkeys(live[0], 0)
    for after, node in enumerate(region.nodes, start=1):
        overwritten = node.overwritten if isinstance(node, OperationNode) else ()
        last |= {i: after for i in (*node.inputs, *node.outputs, *overwritten) if i is not None}
    for boundary in exits:
        position = last.get(boundary.source)
        if counts[boundary.source] == 1 and position is not None and boundary.source in live[position]:
            found[position].append((live[position].index(boundary.source), boundary))
    return [tuple(held) for held in found]


def _liveness(region: Region, exits: Sequence[RegionBoundary]) -> list[tuple[int, ...]]:
    """For each position of the body (and its end), the values made before it that are still to be read."""
    needed: set[int] = {b.source for b in exits} | set(region.outputs)
    made = {b.target for b in region.exits}
    needed -= made
    live: list[set[int]] = [set(needed)]
    for node in reversed(region.nodes):
        needed = needed - {o for o in node.outputs if o is not None}
        needed |= set(node.inputs)
        if isinstance(node, OperationNode):
            needed |= set(node.overwritten)
        live.append(set(needed))
    live.reverse()
    sources = {i for i, v in enumerate(region.values) if v.parameter is not None or v.constant}
    return [tuple(sorted(names - sources)) for names in live]


__all__ = ["GONE", "Body", "Codes", "Numbering"]
