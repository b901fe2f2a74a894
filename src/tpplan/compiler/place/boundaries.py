"""Boundaries: the layouts that a value can take where it enters or leaves a module, and what each change costs.

in:  a boundary, the layout on its outer side for an entry, on its inner side for an exit
out: the layouts possible on the other side, each with its cost

    x: S(1) enters self_attn   ->   S(1) for nothing; R, R·∂P for a gather and what its backward needs
"""

from __future__ import annotations

from collections.abc import Iterable

from tpplan.compiler.ir.layout import (
    PARTIAL,
    REPLICATED,
    REPLICATED_PARTIAL,
    Collectives,
    Layout,
    Pack,
    ending,
    packed,
    reshard_between,
    sharded,
)
from tpplan.compiler.ir.program import Reshard, splits_sequence
from tpplan.compiler.ir.region import LocalValue, OperationNode, Region, RegionBoundary
from tpplan.compiler.place.solution import Constraints, Cost
from tpplan.compiler.rules.propagate import Propagator, flat_heads
from tpplan.cost.communication import Topology, bytes_sent, ring_steps
from tpplan.ops.registry import lookup
from tpplan.plan import Pin


class Boundaries:
    """Answers for one axis. Regions must live as long as it does: it knows them by identity."""

    def __init__(self, propagator: Propagator, topology: Topology, constraints: Constraints) -> None:
        """Answer for the propagator's axis and batch, under `constraints`."""
        self.propagator = propagator
        self.size = propagator.size
        self.topology = topology
        self.constraints = constraints
        self._known: dict[tuple[int, int, bool, Layout], list[tuple[Layout, Cost]]] = {}

    def entry_options(self, region: Region, boundary: RegionBoundary, source: Layout) -> list[tuple[Layout, Cost]]:
        """The layouts inside of an entry."""
        key = (id(region), id(boundary), False, source)
        if key not in self._known:
            self._known[key] = self._entry_options(region, boundary, source)
        return self._known[key]

    def _entry_options(self, region: Region, boundary: RegionBoundary, source: Layout) -> list[tuple[Layout, Cost]]:
        targets = self._targets(region, boundary, region.values[boundary.target], source, outward=False)
        return self.entries_among(region, boundary, source, targets)

    def entries_among(
        self, region: Region, boundary: RegionBoundary, source: Layout, targets: Iterable[Layout]
    ) -> list[tuple[Layout, Cost]]:
        """Those of `targets` that are possible inside of an entry."""
        value = region.values[boundary.target]
        options: list[tuple[Layout, Cost]] = []
        for target in targets:
            if target.is_sharded and (region.example, boundary.target) in self.constraints.unsharded:
                continue
            if target != REPLICATED and (region.example, boundary.target) in self.constraints.whole:
                continue
            if _gathers_weight(boundary, source, target, value):
                continue
            collectives = self._change(source, target, value)
            if collectives is not None:
                tie = 0 if source == target else 100 * (2 if source == PARTIAL else 1) + region.depth
                options.append((target, self._price(source, target, collectives, value, tie)))
        return options

    def exit_options(self, region: Region, boundary: RegionBoundary, source: Layout) -> list[tuple[Layout, Cost]]:
        """The layouts outside of an exit."""
        key = (id(region), id(boundary), True, source)
        if key not in self._known:
            self._known[key] = self._exit_options(region, boundary, source)
        return self._known[key]

    def _exit_options(self, region: Region, boundary: RegionBoundary, source: Layout) -> list[tuple[Layout, Cost]]:
        value = region.values[boundary.target]
        options: list[tuple[Layout, Cost]] = []
        for target in self._targets(region, boundary, value, source, outward=True):
            if _gathers_weight(boundary, source, target, value):
                continue
            collectives = self._change(source, target, value)
            if collectives is not None:
                tie = 0 if source == target else (50 - region.depth if source == PARTIAL else 1000)
                options.append((target, self._price(source, target, collectives, value, tie)))
        return options

    def _targets(
        self, region: Region, boundary: RegionBoundary, value: LocalValue, source: Layout, outward: bool
    ) -> list[Layout]:
        sequence = self._sequence_layout(value)
        if boundary.pin is not None and value.dtype.is_floating_point and value.shape:
            if boundary.pin is Pin.REPLICATE:
                return [REPLICATED, REPLICATED_PARTIAL] if value.differentiable else [REPLICATED]
            if boundary.pin is Pin.SEQUENCE:
                return [] if sequence is None else [sequence]
            return self._split_features(boundary, value)
        if boundary.pin is not None:
            return [REPLICATED]
        if outward and boundary.final:
            if source.is_sharded and self._pinned_inside(region, boundary):
                return [source]
            return [REPLICATED]
        if region.fixed and region.style is None:
            return [source]
        # A sum that nobody reads is made all the same, as in the module's other calls.
        targets = [] if outward and boundary.unread and source == PARTIAL else [source]
        if value.differentiable:
            targets += [REPLICATED, REPLICATED_PARTIAL]
        elif not source.is_replicated:
            targets.append(REPLICATED)
        movable = value.differentiable or not source.is_replicated or self.constraints.freedoms.slice_constants
        if movable and sequence is not None and self.constraints.sequence:
            targets += [REPLICATED, sequence]
        tail = self.constraints.tails.get((region.example, boundary.target), 0) if outward else 0
        if tail and splits_sequence(source, value.shape):
            targets.append(ending(tail))
        targets += self._head_layouts(value)
        if region.has_own_backward and not outward and value.dtype.is_floating_point and value.shape:
            # No function takes a part of what it gets whole: its backward makes the gradient of all of it.
            split = {n for v in region.values if v.parameter is not None and v.parameter.is_sharded for n in v.shape}
            targets += self._split_features(boundary, value) if value.shape[-1] in split else []
        return list(dict.fromkeys(targets))

    def _split_features(self, boundary: RegionBoundary, value: LocalValue) -> list[Layout]:
        """What `shard` may mean: the packs of a layer; without any, an even split, or one by the heads of a body."""
        last, count = len(value.shape) - 1, value.shape[-1]
        heads = () if boundary.packs else sorted(self.constraints.freedoms.heads)
        asked = [boundary.packs or (Pack(count),), *heads]
        fits = (w for w in asked if sum(p.size for p in w) == count and all(p.fits(self.size) for p in w))
        return list(dict.fromkeys(packed(last, whole) for whole in fits))

    def _head_layouts(self, value: LocalValue) -> list[Layout]:
        """The splits by heads: of a dim that counts them, or of dim 0 where it was flattened with the batch."""
        heads, batch = sorted(self.constraints.freedoms.heads), self.propagator.batch
        lengths = 0 if self.constraints.freedoms.lengths_as_heads else value.lengths
        counted = [(dim, n) for dim, n in enumerate(value.shape) if dim >= lengths]
        found = [packed(dim, (pack,)) for dim, n in counted for (pack,) in heads if pack.size == n]
        if batch > 1 and len(value.shape) == 3:
            found += [flat_heads(pack, batch) for (pack,) in heads if value.shape[0] == batch * pack.size]
        return found if value.dtype.is_floating_point else []

    def _pinned_inside(self, region: Region, boundary: RegionBoundary) -> bool:
        """Whether a value that leaves comes from a module whose output the plan pins.

        It may come through results, and through what a body does to each entry by itself, as where logits are capped.
        """
        identifier = boundary.source
        while True:
            node = next((n for n in region.nodes if identifier in n.outputs), None)
            if isinstance(node, OperationNode):
                shape, operator = region.values[identifier].shape, lookup(node.name)
                alike = {i for i in node.inputs if region.values[i].shape == shape}
                if operator is None or operator.kind != "entrywise" or len(alike) != 1:
                    return False
                (identifier,) = alike
                continue
            if node is None:
                return False
            region, position = node.region, node.outputs.index(identifier)
            inner = next((b for b in region.exits if b.target == region.outputs[position]), None)
            if inner is None:
                return False
            if inner.pin is not None:
                return True
            identifier = inner.source

    def _sequence_layout(self, value: LocalValue) -> Layout | None:
        """The split along the sequence: dim 1 of (batch, sequence, …), or dim 0 of (batch · sequence, hidden)."""
        if not value.dtype.is_floating_point:
            return None
        if len(value.shape) == 2:
            batch, rows = self.propagator.batch, value.shape[0]
            fits = batch > 1 and rows > batch and rows % (batch * self.size) == 0
            return sharded(0, interleave=batch) if fits else None
        return None if len(value.shape) < 3 or value.shape[1] % self.size else sharded(1)

    def _change(self, source: Layout, target: Layout, value: LocalValue) -> Collectives | None:
        """What the change of a value costs; None where there is no such change."""
        if source.tail and source != target and value.shape[1] > source.tail:
            return None  # the rest isn't there
        if (source, target) == (REPLICATED_PARTIAL, REPLICATED) and not self.constraints.freedoms.once:
            return None
        return reshard_between(source, target)

    def _price(self, source: Layout, target: Layout, collectives: Collectives, value: LocalValue, tie: int) -> Cost:
        """Of tails no latency is counted: prompts are read to their ends, and may be longer than the example."""
        size, entries = self.size, min(target.tail, value.shape[1]) if target.tail else 0
        whole = value.bytes // value.shape[1] * entries if entries else value.bytes
        whole *= size if source.is_extreme else 1
        ways = [collectives.forward] + ([collectives.backward] if value.differentiable else [])
        time = sum(
            self.topology.time(0 if source.tail or entries else ring_steps(way, size), bytes_sent(way, whole, size))
            for way in ways
            if way.communicates
        )
        return (time, tie)

    def exchange(self, moves: Iterable[Reshard]) -> int:
        """The time of what a body exchanges."""
        ways = [(way, move) for move in moves for way in (move.forward, move.backward) if way.communicates]
        return sum(
            self.topology.time(ring_steps(way, self.size), bytes_sent(way, move.padded_bytes(self.size), self.size))
            for way, move in ways
        )

    def move(self, source: Layout, target: Layout, value: LocalValue) -> Cost:
        """What it costs to reshard a value inside of a body; of equal ways, those at boundaries come first."""
        collectives = reshard_between(source, target)
        assert collectives is not None
        return self._price(source, target, collectives, value, 10_000)

    def gradient_sum(self, value: LocalValue) -> int:
        """A parameter's share of the coalesced sum; its latency is paid once for all."""
        return 1 + self.topology.time(0, bytes_sent("all-reduce", value.bytes, self.size))


def _gathers_weight(boundary: RegionBoundary, source: Layout, target: Layout, value: LocalValue) -> bool:
    """Whether a weight that is computed of split parameters would be gathered in each call, although no pin says so."""
    return value.weight and source.is_sharded and not target.is_sharded and boundary.pin is None


__all__ = ["Boundaries"]
