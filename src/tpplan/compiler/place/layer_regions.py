"""Layers: regions that are solved as one, not operation by operation.

in:  the region of a rowwise layer, a table of rows, shared experts or a recurrent layer; the layouts of its inputs
out: the ways to run it, by the layouts of its results; or the failure
"""

from __future__ import annotations

import math

from tpplan.compiler.ir.exchanges import exchanged, splits_tokens
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, REPLICATED_PARTIAL, Layout
from tpplan.compiler.ir.program import Reshard
from tpplan.compiler.ir.region import Region
from tpplan.compiler.ir.replaced_bodies import Recurrence
from tpplan.compiler.place.body import Body, Codes
from tpplan.compiler.place.entry_layouts import Entries, States, combined, keep
from tpplan.compiler.place.solution import Cost, Dispatched, Entered, Failure, Left, Recurred, State, Steps
from tpplan.compiler.rules.propagate import Refusal
from tpplan.compiler.rules.recurrent import GATHERED, gathers, gathers_first, made_layout, taken_layouts
from tpplan.cost.communication import bytes_sent, ring_steps
from tpplan.plan import Exchange


class Layers:
    """Solves them under the constraints of its boundaries."""

    def __init__(self, entries: Entries) -> None:
        """Solve for what is entered so."""
        self._entries, self._numbering = entries, entries.numbering
        self.boundaries, self.constraints = entries.boundaries, entries.boundaries.constraints

    def solve(self, region: Region, inputs: Codes) -> States | Failure | None:
        """The ways to run a region; None for one that is walked."""
        if region.recurrent is not None:
            return self._solve_recurrent(region, inputs)
        if region.shared:
            return self._solve_shared(region, inputs)
        return self._solve_reduced(region, inputs) if region.reduced else None

    # -- linear layers and tables whose product is partial ----------------------------------------------------------
    def _solve_reduced(self, region: Region, inputs: Codes) -> States | Failure:
        """A rowwise linear or a vocabulary-split table: the product is partial, and is reduced before the bias.

        It may also leave as it is; a bias is then added on one rank.
        """
        body = Body(region, self._numbering)
        bias = next((i for i, v in enumerate(region.values) if v.parameter is not None and len(v.shape) == 1), None)
        exit_boundary = region.exits[0]
        finished: States = {}
        for _, cost, layouts in self._entries.ways(region, body, inputs):
            choice = Entered(layouts)
            for target, extra in self.boundaries.exit_options(region, exit_boundary, PARTIAL):
                if bias is not None and target.dim == len(region.values[exit_boundary.source].shape) - 1:
                    continue  # the bias has all features
                partial = replicated = once = frozenset[int]()
                total = (cost[0] + extra[0], cost[1] + extra[1])
                if bias is not None and target == PARTIAL:
                    if (region.example, bias) in self.constraints.reduced_biases:
                        continue
                    # Only to save a collective: as dear as a gradient to be summed, so that ties go to the plain bias.
                    once = frozenset({bias})
                    total = (total[0] + self.boundaries.gradient_sum(region.values[bias]), total[1] + 1)
                if bias is not None and region.values[bias].differentiable:
                    if target in (REPLICATED, PARTIAL):
                        replicated = frozenset({bias})
                    else:
                        if (region.example, bias) in self.constraints.whole_gradients:
                            continue
                        partial = frozenset({bias})
                        total = (total[0] + self.boundaries.gradient_sum(region.values[bias]), total[1])
                left = Left((target,), partial, replicated, once)
                keep(finished, (self._numbering.code(target),), total, left, Steps(choice, None))
        return finished or self._entries.failure(region, body, inputs)

    def _splits_tokens(self, region: Region, layouts: State) -> bool:
        """Whether all arguments of stacked experts are split by tokens, alike and evenly."""
        if region.stack is None or region.stack.ranks > 1:  # a token would go to all ranks of a group
            return False
        count = region.values[region.entries[0].target].shape[0]
        return splits_tokens(layouts) and layouts[0].is_even(count, self.boundaries.size)

    # -- whole experts, of which each rank runs its own ---------------------------------------------------------------
    def _solve_shared(self, region: Region, inputs: Codes) -> States | Failure:
        """Each rank's experts see whole tokens, of which some are theirs; the result is a sum over the ranks.

        Or tokens that are split go to the ranks with their experts, and what these make of them comes back.
        """
        body = Body(region, self._numbering)
        (exit_boundary,) = region.exits
        asked = None if region.stack is None else region.stack.exchange
        entered = (region.values[boundary.target].differentiable for boundary in region.entries)
        whole = tuple(REPLICATED_PARTIAL if differentiable else REPLICATED for differentiable in entered)
        finished: States = {}
        for _, cost, layouts in self._entries.ways(region, body, inputs):
            choice = Entered(layouts)
            if layouts == whole and asked is not Exchange.ALL_TO_ALL:
                made, sent, steps = PARTIAL, 0, Steps(choice, None)
            elif asked is not Exchange.SUMS and self._splits_tokens(region, layouts):
                made, sent = layouts[0], self.boundaries.exchange(_dispatched(region, self.boundaries.size))
                steps = Steps(Dispatched(made), Steps(choice, None))
            else:
                continue
            for target, extra in self.boundaries.exit_options(region, exit_boundary, made):
                total = (cost[0] + sent + extra[0], cost[1] + extra[1])
                keep(finished, (self._numbering.code(target),), total, Left((target,)), steps)
        if not finished and asked is Exchange.ALL_TO_ALL:
            held = zip(region.entries, self._numbering.layouts(body.entries(inputs + body.constants)), strict=True)
            refusal = Refusal("dispatch", "its tokens aren't split", tuple((b.source, layout) for b, layout in held))
            return Failure((), None, refusal, (-1,))
        return finished or self._entries.failure(region, body, inputs)

    # -- recurrent layers, whose hidden state is split ----------------------------------------------------------------
    def _solve_recurrent(self, region: Region, inputs: Codes) -> States | Failure:
        """Each rank's gates see all of the input and of the hidden state, which is gathered in each step."""
        body, recurrence = Body(region, self._numbering), region.recurrent
        assert recurrence is not None
        sources = self._numbering.layouts(body.entries(inputs + body.constants))
        branches: list[list[tuple[Layout, Cost]]] = []
        for boundary, source in zip(region.entries, sources, strict=True):
            value, paths = region.values[boundary.target], (boundary.path, *boundary.aliases)
            taken = taken_layouts(recurrence, paths, len(value.shape), value.differentiable)
            options = self.boundaries.entries_among(region, boundary, source, taken)
            branches.append([o for o in options if boundary.pin or not region.fixed or o[0] == source])
        made = [made_layout(recurrence, b.path, len(region.values[b.source].shape)) for b in region.exits]
        leaving = [self.boundaries.exit_options(region, b, held) for b, held in zip(region.exits, made, strict=True)]
        finished: States = {}
        for entered, cost in combined(branches):
            for left, extra in combined(leaving):
                total = (cost[0] + extra[0] + self._gathering(region, recurrence, entered), cost[1] + extra[1])
                steps = Steps(Recurred(tuple(made)), Steps(Entered(entered), None))
                keep(finished, tuple(map(self._numbering.code, left)), total, Left(left), steps)
        return finished or self._entries.failure(region, body, inputs)

    def _gathering(self, region: Region, recurrence: Recurrence, entered: State) -> int:
        """What it takes to gather the hidden state, forward and backward."""
        first = next(region.values[b.target] for b in region.entries if b.path == ("input",))
        size, (source, _) = self.boundaries.size, GATHERED
        entry = source.longest(recurrence.features, size) * size * first.dtype.itemsize
        ways = ["all-gather"]
        if any(region.values[b.source].differentiable for b in region.exits):
            ways.append("reduce-scatter")
        moved = [(held.times, held.batch) for held in gathers(recurrence, first.shape)]
        for boundary, layout in zip(region.entries, entered, strict=True):
            if gathers_first(recurrence, boundary.path, layout):
                moved.append((1, math.prod(region.values[boundary.target].shape[:-1])))
        return sum(
            times * self.boundaries.topology.time(ring_steps(way, size), bytes_sent(way, batch * entry, size))
            for times, batch in moved
            for way in ways
        )


def _dispatched(region: Region, size: int) -> tuple[Reshard, ...]:
    """What ranks exchange where tokens go to the ranks with their experts."""
    stack, values = region.stack, region.values
    assert stack is not None
    given = {boundary.path[0]: values[boundary.target] for boundary in region.entries}
    arguments = (given[stack.tokens], given[stack.chosen], given[stack.weights])
    return exchanged(*arguments, values[region.exits[0].source], stack.count, size)


__all__ = ["Layers"]
