"""Settle: how the values of a record lie on ranks, by the rules that placed the program.

in:  a body's record, and how its arguments, its results and those of its calls lie
out: the layouts of its values, and of which whole ones its operations take parts (`rules/slices.py`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tpplan.compiler.ir.layout import REPLICATED, Layout
from tpplan.compiler.ir.program import RecordedBody
from tpplan.compiler.ir.region import CallNode, Instance, OperationNode
from tpplan.compiler.ir.script import ReplayError
from tpplan.compiler.ir.trace import Trace
from tpplan.compiler.rules.propagate import Outcome, Propagator, Refusal


@dataclass(frozen=True, slots=True)
class Settled:
    """How a body's values lie, and of what it takes parts.

    Attributes:
        layouts: by value of the record.
        slices: by the first result of an operation, the whole operands of which it takes parts, and how these lie.
    """

    layouts: Mapping[int, Layout]
    slices: Mapping[int, Mapping[int, Layout]]

    def also(self, layouts: Mapping[int, Layout], slices: Mapping[int, Mapping[int, Layout]]) -> Settled:
        """With more of both."""
        return Settled({**self.layouts, **layouts}, {**self.slices, **slices})


def settle(root: Instance, trace: Trace, body: RecordedBody, size: int, batch: int) -> Settled:
    """The layouts of a record's values, from those of its arguments and of what its calls return.

    Args:
        root: the record as a region.
        trace: the record.
        body: how values lie at its boundaries.
        size: the number of ranks.
        batch: the batch size of the model's call, for sequences flattened with their batch.

    Raises:
        ReplayError: an operation can't run on shards that lie so.
    """
    return _Settler(root, trace, body, size, batch).settled()


class _Settler:
    """Settles one record."""

    def __init__(self, root: Instance, trace: Trace, body: RecordedBody, size: int, batch: int) -> None:
        self.root, self.trace = root, trace
        self.propagator = Propagator(size, batch, frozenset(body.heads))
        self.inputs, self.results = dict(body.inputs), dict(body.results)
        self.calls = {(module, call): dict(results) for module, call, results in body.calls}
        self.refused: Refusal | None = None

    def settled(self) -> Settled:
        known = {c.target: self.inputs.get(c.path, REPLICATED) for c in self.root.frame.entries}
        found = self._from(0, Settled(known, {}))
        if found is None:  # as in the placement, whole values are sliced where nothing else works
            self.propagator = self.propagator.splitting(self.propagator.heads, slices=True)
            found = self._from(0, Settled(known, {}))
        if found is None:
            raise ReplayError(
                self.refused.reason if self.refused is not None else "its results would have other layouts"
            )
        return found

    def _from(self, position: int, settled: Settled) -> Settled | None:
        region = self.root.region
        children = self.root.children
        calls = sum(1 for node in region.nodes[:position] if isinstance(node, CallNode))
        while position < len(region.nodes):
            node = region.nodes[position]
            position += 1
            if isinstance(node, CallNode):
                frame = children[calls].frame
                calls += 1
                promised = self.calls.get((frame.module, frame.call), {})
                settled = settled.also({c.target: promised.get(c.path, REPLICATED) for c in frame.exits}, {})
                continue
            outcomes = self._outcomes(node, settled.layouts)
            if len(outcomes) > 1:
                branches = (self._from(position, self._made(settled, node, o)) for o in outcomes)
                return next((found for found in branches if found is not None), None)
            if not outcomes:
                return None
            settled = self._made(settled, node, outcomes[0])
        return settled if self._leaves(settled.layouts) else None

    def _made(self, settled: Settled, node: OperationNode, outcome: Outcome) -> Settled:
        values = self.root.values
        made = {values[o]: held for o, held in zip(node.outputs, outcome.outputs, strict=True) if o is not None}
        slices = {values[i]: held for i, held in outcome.slices}
        first = next(o for o in node.outputs if o is not None)
        return settled.also(made, {values[first]: slices} if slices else {})

    def _outcomes(self, node: OperationNode, known: Mapping[int, Layout]) -> list[Outcome]:
        region, values = self.root.region, self.root.values

        def layout(i: int) -> Layout:
            own = region.values[i].parameter
            return known.get(values[i]) or (own if own is not None else REPLICATED)

        found = self.propagator.outcomes(node, region.values, layout)
        if isinstance(found, Refusal):
            self.refused = found
            return []
        return sorted(found, key=lambda o: not o.outputs[0].is_sharded) if self.propagator.slices else found

    def _leaves(self, known: Mapping[int, Layout]) -> bool:
        return all(
            _kind(known.get(c.source, REPLICATED)) == _kind(self.results.get(c.path, REPLICATED))
            for c in self.root.frame.exits
        )


def _kind(layout: Layout) -> tuple[str, str, int | None]:
    return layout.forward, layout.gradient, layout.dim


__all__ = ["Settled", "settle"]
