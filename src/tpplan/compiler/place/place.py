"""Place: choose where values change their layout, so that every body runs on local tensors at the least cost.

in:  regions, with what the plan pins
out: the ways to run the root's region, each with all that was chosen on it

A dynamic program over each region's body in order of execution. Its state is the layouts of the values that are still
to be read; an operation maps a state to one (or refuses it), a boundary branches. Equal states keep the cheapest way
there. A call inside a body is solved once for each choice of its input layouts, and remembered by its region, so that
126 equal layers cost as much as one. What is remembered outlives a round of the search, except for the regions that the
new constraints concern.

    x: S(1) -> self_attn(x) -> q, k, v: colwise   =>   one all-gather where x enters self_attn; its backward is one
                                                       reduce-scatter for the three gradients
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tpplan.compiler.ir.class_reductions import CLASS_OPERATIONS
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, REPLICATED_PARTIAL, Layout
from tpplan.compiler.ir.region import CallNode, OperationNode, Region, RegionBoundary
from tpplan.compiler.place.apart import apart
from tpplan.compiler.place.body import GONE, Body, Codes, Numbering
from tpplan.compiler.place.boundaries import Boundaries
from tpplan.compiler.place.dead_results import kept_exits
from tpplan.compiler.place.entry_layouts import Entries, States, combined, keep
from tpplan.compiler.place.layer_regions import Layers
from tpplan.compiler.place.open_results import CROWDED, MANY, MOST, TOO_MANY, OpenResults, Option
from tpplan.compiler.place.solution import (
    Called,
    Choice,
    Constraints,
    Cost,
    Decided,
    Entered,
    Failure,
    Left,
    Name,
    PlacedRun,
    Solution,
    State,
    Steps,
)
from tpplan.compiler.place.split_norms import SplitNorms
from tpplan.compiler.rules.propagate import Outcome, Propagator, Refusal
from tpplan.compiler.rules.weights import Weights
from tpplan.cost.communication import Topology

# What a step makes of its operands: the layouts of its results, its cost, and the choice as it is told later, which is
# none where it depends on a layout that is left open.
_Step = tuple[Codes, Cost, Choice | None]
_Way = tuple[int, Cost, Steps | None]
_Solved = list[tuple[Codes, Solution]] | Failure


class Placer:
    """Solves regions for one axis. Regions must live as long as it does: it knows them by identity.

    Attributes:
        cut: how many states weren't followed in a region, by its identity, as there were too many.
    """

    def __init__(self, propagator: Propagator, topology: Topology) -> None:
        """Solve by these rules and costs."""
        self._topology = topology
        self._numbering = Numbering()
        self._obey(propagator, Constraints())
        self._norms = SplitNorms(propagator.size, topology)
        self._open = OpenResults()
        self.cut: dict[int, int] = {}
        self._bodies: dict[int, Body] = {}
        self._solved: dict[int, dict[Codes, _Solved]] = {}
        self._steps: dict[int, list[dict[Codes, list[_Step] | Failure]]] = {}
        self._inside: dict[int, frozenset[Name]] = {}
        self._kept: Mapping[int, frozenset[int]] = {}
        self._weights: dict[int, Weights] = {}
        self._of_classes: dict[int, bool] = {}
        self._after: dict[tuple[int, int, int], list[_Step] | Failure] = {}
        self._from: dict[int, dict[Codes, States | Failure]] = {}
        self._taken: dict[tuple[int, int, int], list[_Way]] = {}
        self._exits: dict[tuple[int, int, int], list[tuple[Cost, Steps]] | None] = {}

    def solve(self, region: Region, inputs: State, constraints: Constraints) -> list[Solution] | Failure:
        """Every undominated way to run `region` for these input layouts, or the failure that got furthest."""
        self._note_inside(region)
        self._forget(constraints)
        self._keep(region, constraints)
        self._obey(self.propagator, constraints)
        solved = self._solve(region, tuple(map(self._numbering.code, inputs)))
        return solved if isinstance(solved, Failure) else [solution for _, solution in solved]

    def _obey(self, propagator: Propagator, constraints: Constraints) -> None:
        self.constraints, free = constraints, constraints.freedoms
        self.propagator = propagator.splitting(free.heads, free.features)
        self._slicing = propagator.splitting(free.heads, free.features, free.slices)
        self._comparing = propagator.splitting(free.heads, free.features, free.slices, extremes=True)
        self._moving = propagator.splitting(
            free.heads, free.features, free.slices, moves=True, averages=True, extremes=True
        )
        self.boundaries = Boundaries(self.propagator, self._topology, constraints)
        self._entries = Entries(self.boundaries, self._numbering)
        self._layers = Layers(self._entries)

    def _forget(self, constraints: Constraints) -> None:
        """Drop what is remembered of regions for which other constraints will hold."""
        if constraints.everywhere != self.constraints.everywhere:
            for kept in (self._solved, self._steps, self._from, self.cut):
                kept.clear()
            self._forget_open()
            return
        changed = constraints.differing(self.constraints)
        if changed:
            self._forget_open()
        for key, names in self._inside.items():
            if not changed.isdisjoint(names):
                for kept in (self._solved, self._steps, self._from, self.cut):
                    kept.pop(key, None)

    def _forget_open(self) -> None:
        self._after.clear()
        self._taken.clear()
        self._exits.clear()
        self._open.forget()

    def _keep(self, region: Region, constraints: Constraints) -> None:
        """Note the results that nobody reads but whose layouts are constrained, and forget what was made without."""
        kept = kept_exits(region, constraints.unsharded | constraints.whole)
        if kept != self._kept:
            self._kept = kept
            for remembered in (self._bodies, self._solved, self._steps, self._from, self.cut):
                remembered.clear()
            self._forget_open()

    def _note_inside(self, region: Region) -> frozenset[Name]:
        """The names of a region and of those that it calls."""
        if id(region) not in self._inside:
            inner = [self._note_inside(node.region) for node in region.nodes if isinstance(node, CallNode)]
            self._inside[id(region)] = frozenset({region.example}).union(*inner)
        return self._inside[id(region)]

    def _solve(self, region: Region, inputs: Codes) -> _Solved:
        solved = self._solved.setdefault(id(region), {})
        if inputs not in solved:
            finished = self._layers.solve(region, inputs)
            finished = self._solve_body(region, inputs) if finished is None else finished
            if isinstance(finished, Failure):
                solved[inputs] = finished
            else:
                layouts = self._numbering.known
                solved[inputs] = [(o, Solution(layouts(o), cost, steps)) for o, (cost, steps) in finished.items()]
            normed = None
            if not (region.reduced or region.shared or region.recurrent):
                normed = self._norms.solve(region, self._numbering.layouts(inputs), self.boundaries)
            if normed is not None:
                known = solved[inputs]
                ways = [] if isinstance(known, Failure) else known
                made = [self._numbering.code(held) for held in normed.outputs if held is not None]
                solved[inputs] = [*ways, (tuple(made), normed)]
        return solved[inputs]

    # -- ordinary bodies ------------------------------------------------------------------------------------------
    def _solve_body(self, region: Region, inputs: Codes) -> States | Failure:
        body = self._bodies.get(id(region))
        if body is None:
            body = self._bodies[id(region)] = Body(region, self._numbering, self._kept.get(id(region), ()))
        states: States = {}
        for inside, cost, layouts in self._entries.ways(region, body, inputs):
            keep(states, body.start(inputs + inside + body.constants), cost, Entered(layouts), None)
        if not states:
            return self._entries.failure(region, body, inputs)
        return self._went(region, body, states) if len(states) < CROWDED else self._each_went(region, body, states)

    def _each_went(self, region: Region, body: Body, states: States) -> States | Failure:
        """As `_went`. What becomes of a state is remembered, as other inputs lead to the same ones."""
        known = self._from.setdefault(id(region), {})
        finished: States = {}
        failure: Failure | None = None
        for state, (cost, steps) in states.items():
            if state not in known:
                known[state] = self._went(region, body, {state: ((0, 0), None)})
            found = known[state]
            if isinstance(found, Failure):
                failure = found if failure is None or found.progress > failure.progress else failure
                continue
            for after, (extra, later) in found.items():
                total, before = (cost[0] + extra[0], cost[1] + extra[1]), finished.get(after)
                if before is None or total < before[0]:
                    finished[after] = (total, steps if later is None else Steps(later, steps))
        if not finished:
            assert failure is not None
            return failure
        return finished

    def _went(self, region: Region, body: Body, states: States) -> States | Failure:
        """What becomes of states at a body's beginning."""
        memos = self._steps.setdefault(id(region), [{} for _ in range(len(region.nodes) + 1)])
        constants, tried = body.constants, 0
        for position, memo in enumerate(memos):
            operands_of, following_of, alone = body.operands[position], body.following[position], body.alone[position]
            following: States = {}
            failure: Failure | None = None
            if body.leaving[position]:
                states = self._let_go(region, states, body.leaving[position])
            if len(states) >= CROWDED and len(states) != tried:
                states = apart(states, self._open)
                tried = len(states)
            crowded = len(states) >= CROWDED
            if len(states) >= TOO_MANY:
                states = self._fewer(region, states, body.joined(position))
            if self._open:
                states = self._decided(region, body, position, states, alone if crowded else None)
                if not states:
                    return self._constrained(position)
            single = crowded and position < len(region.nodes) and _makes_one(region.nodes[position])
            for state, (cost, steps) in states.items():
                if alone is not None and state[alone] < GONE:
                    found = self._gone_on(region, body, position, state, memo)
                else:
                    operands = operands_of(state + constants)
                    found = memo.get(operands)
                    if found is None:
                        found = memo[operands] = self._step(region, position, operands)
                    if single and not isinstance(found, Failure) and len(found) > 1:
                        found = self._opened(region, position, operands, found)
                if isinstance(found, Failure):
                    # Of two that got as far the first counts; of exits the last.
                    if failure is None or found.progress > failure.progress or position == len(region.nodes):
                        failure = found
                    continue
                for made, extra, choice in found:  # as `_keep`, which is too dear here
                    after = following_of(state + made + constants)
                    total = (cost[0] + extra[0], cost[1] + extra[1])
                    known = following.get(after)
                    if known is None or total < known[0]:
                        following[after] = (total, steps if choice is None else Steps(choice, steps))
                if len(following) > 4 * MOST:
                    following = self._cheapest(region, following)
            if not following:
                assert failure is not None
                return failure
            states = following
        return self._cheapest(region, states)

    def _fewer(self, region: Region, states: States, joined: Iterable[Sequence[int]]) -> States:
        """Of many states those in which values that wait to be joined are alike, and of these the cheapest."""
        alike = _alike(states, joined)
        if len(alike) < len(states):
            self.cut[id(region)] = self.cut.get(id(region), 0) + len(states) - len(alike)
        return self._cheapest(region, alike)

    def _cheapest(self, region: Region, states: States) -> States:
        if len(states) <= MOST:
            return states
        self.cut[id(region)] = self.cut.get(id(region), 0) + len(states) - MOST
        return dict(heapq.nsmallest(MOST, states.items(), key=lambda way: way[1][0]))

    def _opened(self, region: Region, position: int, operands: Codes, found: list[_Step]) -> list[_Step]:
        """One step for all that the result of a step could be."""
        options: list[Option] = []
        for made, cost, choice in found:
            if choice is None or made[0] < GONE:  # its layouts are open already
                return found
            options.append(Option(made[0], cost, Steps(choice, None), decided=False))
        return [((self._open.code(options, (id(region), position, operands)),), (0, 0), None)]

    def _gone_on(
        self, region: Region, body: Body, position: int, state: Codes, memo: dict[Codes, list[_Step] | Failure]
    ) -> list[_Step] | Failure:
        """One step for all that a step makes of what is open, and of nothing else."""
        place = body.alone[position]
        assert place is not None
        key = (id(region), position, state[place])
        known = self._after.get(key)
        if known is not None:
            return known
        cheapest: dict[int, Option] = {}
        failure: Failure | None = None
        for option in self._open.options(state[place]):
            before = (*state[:place], option.code, *state[place + 1 :])
            trail = self._trail(region, body.names[position][place], option)
            if trail is None:
                continue
            operands = body.operands[position](before + body.constants)
            if operands not in memo:
                memo[operands] = self._step(region, position, operands)
            found = memo[operands]
            if isinstance(found, Failure):
                failure = found if failure is None or found.progress > failure.progress else failure
                continue
            for (made,), extra, choice in found:
                cost = (option.cost[0] + extra[0], option.cost[1] + extra[1])
                for code, price, decided in self._closed(made, cost):
                    if code not in cheapest or price < cheapest[code].cost:
                        held = trail if choice is None else Steps(choice, trail)
                        cheapest[code] = Option(code, price, held, decided)
        if not cheapest:
            result: list[_Step] | Failure = failure or self._constrained(position)
        else:
            result = [((self._open.code([*cheapest.values()], key),), (0, 0), None)]
        self._after[key] = result
        return result

    def _closed(self, made: int, cost: Cost) -> Iterator[tuple[int, Cost, bool]]:
        """The layouts that a result could have: one, or those that its callee has left open."""
        if made >= GONE:
            yield made, cost, False
            return
        for option in self._open.options(made):
            yield option.code, (cost[0] + option.cost[0], cost[1] + option.cost[1]), True

    def _trail(self, region: Region, value: int, option: Option) -> Steps | None:
        """What is chosen where a value gets this layout; None if it may not have it."""
        if not option.decided:
            return option.trail
        (layout,) = self._numbering.layouts((option.code,))
        if self._splits_unsharded(region, ((value, layout),)):
            return None
        return Steps(Decided(value, layout), option.trail)

    def _step(self, region: Region, position: int, operands: Codes) -> list[_Step] | Failure:
        if position == len(region.nodes):
            return self._left(region, operands)
        node = region.nodes[position]
        found = (
            self._ran(region, position, node, operands)
            if isinstance(node, OperationNode)
            else self._called(region, position, node, operands)
        )
        return found if isinstance(found, Failure) or found else self._constrained(position)

    def _constrained(self, position: int) -> Failure:
        refusal = Refusal("constraint", "would split a value whose size is read", ())
        return Failure((), position, refusal, (position,))

    def _decided(self, region: Region, body: Body, position: int, states: States, alone: int | None) -> States:
        """The states in which what is read here has a layout, where a step left that open; but what may stay so."""
        names = body.names[position]
        for place in body.read[position]:
            if place == alone or all(state[place] >= GONE for state in states):
                continue
            found: States = {}
            for state, (cost, steps) in states.items():
                head, code, tail = state[:place], state[place], state[place + 1 :]
                open_here = code < GONE
                for layout, extra, trail in (
                    self._ways(region, names[place], code) if open_here else ((code, (0, 0), None),)
                ):
                    after, total = (*head, layout, *tail), (cost[0] + extra[0], cost[1] + extra[1])
                    known = found.get(after)
                    if known is None or total < known[0]:
                        found[after] = (total, steps if trail is None else Steps(trail, steps))
            states = found
            if len(states) >= TOO_MANY:
                here = [[other for other in group if other <= place] for group in body.joined(position)]
                states = self._fewer(region, states, [group for group in here if len(group) > 1])
        return states

    def _ways(self, region: Region, value: int, code: int) -> list[_Way]:
        """The layouts that an open value may have here, with their costs, and what is chosen on the way."""
        key = (id(region), value, code)
        if key not in self._taken:
            held = [(option, self._trail(region, value, option)) for option in self._open.options(code)]
            self._taken[key] = [(option.code, option.cost, trail) for option, trail in held if trail is not None]
        return self._taken[key]

    def _let_go(self, region: Region, states: States, leaving: Sequence[tuple[int, RegionBoundary]]) -> States:
        """The states once what leaves the model here has left: how it does so concerns nothing that comes later.

        States in which it can't leave end here, unless none is left then: these tell at the exit why.
        """
        for place, boundary in leaving:
            found: States = {}
            for state, (cost, steps) in states.items():
                ways = self._ways_out(region, boundary, state[place])
                if ways is None:
                    found[state] = (cost, steps)
                for extra, trail in ways or ():
                    after = (*state[:place], GONE, *state[place + 1 :])
                    total = (cost[0] + extra[0], cost[1] + extra[1])
                    known = found.get(after)
                    if known is None or total < known[0]:
                        found[after] = (total, Steps(trail, steps))
            states = found or states
        return states

    def _ways_out(self, region: Region, boundary: RegionBoundary, code: int) -> list[tuple[Cost, Steps]] | None:
        """The cheapest way for what has this layout, or has it open, to leave whole; None if it may leave otherwise."""
        key = (id(region), id(boundary), code)
        if key not in self._exits:
            ways: list[_Way] = [(code, (0, 0), None)]
            if code < GONE:
                held = [(option, self._trail(region, boundary.source, option)) for option in self._open.options(code)]
                ways = [(option.code, option.cost, trail) for option, trail in held if trail is not None]
            found: list[tuple[Cost, Cost, Steps]] = []
            pinned = False
            for inner, cost, trail in ways:
                (layout,) = self._numbering.layouts((inner,))
                for target, extra in self.boundaries.exit_options(region, boundary, layout):
                    if target == REPLICATED or (boundary.dead and target == REPLICATED_PARTIAL):
                        total = (cost[0] + extra[0], cost[1] + extra[1])
                        found.append((total, extra, Steps(Decided(boundary.target, target), trail)))
                    else:
                        pinned |= not boundary.dead  # where it is made
            found.sort(key=lambda way: way[:2])  # of equal ways, that which moves it further inside
            self._exits[key] = None if pinned else [(cost, trail) for cost, _, trail in found[:1]]
        return self._exits[key]

    def _ran(self, region: Region, position: int, node: OperationNode, operands: Codes) -> list[_Step] | Failure:
        numbers = (*node.inputs, *node.overwritten)
        known = dict(zip(numbers, self._numbering.layouts(operands), strict=True))
        sliced = region.example[0] and region.example not in self.constraints.unsliced
        weights = self._weights_of(region)
        of_weights = region.of_weights or weights.compute(node)
        inside = region.has_own_backward and any(o is not None and region.values[o].gradless for o in node.outputs)
        moving = (of_weights or region.example in self.constraints.freedoms.moving) and not inside
        comparing = self._slicing if self._calls_classes(region) else self._comparing
        recorded = self._moving if moving else comparing
        rules = recorded if sliced else self.propagator
        if of_weights and sliced and node.is_a("expand"):
            rules = rules.repeating(weights.widths)
        outcomes = rules.outcomes(node, region.values, known.__getitem__, weights.lasting)
        if isinstance(outcomes, Refusal):
            if (region.example, position) not in self.constraints.forgiven:
                return Failure((), position, outcomes, (position,))
            outcomes = [Outcome(tuple(REPLICATED for _ in node.outputs))]
        found: list[_Step] = []
        for outcome in outcomes:
            if any((region.example, i) in self.constraints.whole_gradients for i in outcome.partial_parameters):
                continue
            made = [(o, held) for o, held in zip(node.outputs, outcome.outputs, strict=True) if o is not None]
            if self._splits_unsharded(region, made):
                continue
            extra = sum(self.boundaries.gradient_sum(region.values[i]) for i in outcome.partial_parameters)
            cost = (extra, len(outcome.slices))
            for i, held in outcome.moves:
                price = self.boundaries.move(known[i], held, region.values[i])
                cost = (cost[0] + price[0], cost[1] + price[1])
            for o, held in made if outcome.sums else ():
                price = self.boundaries.move(PARTIAL, held, region.values[o])
                cost = (cost[0] + price[0], cost[1] + price[1])
            codes = tuple(self._numbering.code(held) for _, held in made)
            found.append((codes, cost, PlacedRun(position, outcome)))
        return found

    def _calls_classes(self, region: Region) -> bool:
        """Whether a body calls functions over classes, which no record knows."""
        if id(region) not in self._of_classes:
            nodes = (node for node in region.nodes if isinstance(node, OperationNode))
            self._of_classes[id(region)] = any(node.target in CLASS_OPERATIONS for node in nodes)
        return self._of_classes[id(region)]

    def _weights_of(self, region: Region) -> Weights:
        if id(region) not in self._weights:
            self._weights[id(region)] = Weights.of(region)
        return self._weights[id(region)]

    def _called(self, region: Region, position: int, node: CallNode, operands: Codes) -> list[_Step] | Failure:
        solutions = self._solve(node.region, operands)
        if isinstance(solutions, Failure):
            path, progress = (position, *solutions.path), (position, *solutions.progress)
            return Failure(path, solutions.node, solutions.refusal, progress)
        inputs = self._numbering.layouts(operands)
        return [
            (outputs, solution.cost, Called(position, inputs, solution))
            for outputs, solution in solutions
            if not self._splits_unsharded(
                region, [(o, held) for o, held in zip(node.outputs, solution.outputs, strict=True) if held is not None]
            )
        ]

    def _splits_unsharded(self, region: Region, made: Iterable[tuple[int, Layout]]) -> bool:
        unsharded, whole = self.constraints.unsharded, self.constraints.whole
        if not whole:
            return any(held.is_sharded and (region.example, o) in unsharded for o, held in made)
        return any(
            (held.is_sharded and (region.example, o) in unsharded)
            or (held != REPLICATED and (region.example, o) in whole)
            for o, held in made
        )

    # -- boundaries -------------------------------------------------------------------------------------------------
    def _left(self, region: Region, sources: Codes) -> list[_Step] | Failure:
        """The layouts that the exits could have outside."""
        branches: list[Sequence[tuple[Layout | None, Cost]]] = []
        trails: list[dict[Layout, Steps | None]] = []
        failure: Failure | None = None
        for boundary, code in zip(region.exits, sources, strict=True):
            trails.append({})
            if code == GONE:
                branches.append(((None if boundary.dead else REPLICATED, (0, 0)),))
                continue
            options: dict[Layout, tuple[Cost, Steps | None]] = {}
            ways: list[_Way] = [(code, (0, 0), None)] if code > GONE else self._ways(region, boundary.source, code)
            for inner, cost, trail in ways:
                (source,) = self._numbering.layouts((inner,))
                for target, extra in self.boundaries.exit_options(region, boundary, source):
                    total = (cost[0] + extra[0], cost[1] + extra[1])
                    if target not in options or total < options[target][0]:
                        options[target] = (total, trail)
            found = sorted(options.items(), key=lambda way: way[1][0]) if code < GONE else options.items()
            branches.append([(target, cost) for target, (cost, _) in found])
            if code < GONE:
                trails[-1] = {target: trail for target, (_, trail) in found}
            if not options:
                (source,) = self._numbering.layouts((ways[0][0],)) if ways else (REPLICATED,)
                refusal = Refusal("pin", "can't take the layout that is required here", ((boundary.source, source),))
                failure = Failure((), None, refusal, (len(region.nodes),))
        if failure is not None:
            return failure
        if region.depth and (any(trails) or sum(len(options) > 1 for options in branches) >= MANY):
            return [self._left_open(branches, trails)]
        return [(tuple(map(self._code, held)), cost, Left(held)) for held, cost in combined(branches)]

    def _code(self, layout: Layout | None) -> int:
        return GONE if layout is None else self._numbering.code(layout)

    def _left_open(
        self, branches: Sequence[Sequence[tuple[Layout | None, Cost]]], trails: Sequence[Mapping[Layout, Steps | None]]
    ) -> _Step:
        """All that exits could be outside, at once: whoever reads a result chooses its layout."""
        coded = [tuple(Option(self._code(held), cost) for held, cost in options) for options in branches]
        single = [options[0] if len(options) == 1 else None for options in branches]
        sure = [held[1] for held in single if held is not None]
        codes = [held[0].code if len(held) == 1 else self._open.code(held) for held in coded]
        cost = (sum(c[0] for c in sure), sum(c[1] for c in sure))
        return tuple(codes), cost, Left(tuple(None if held is None else held[0] for held in single), ways=tuple(trails))


def _alike(states: States, joined: Iterable[Sequence[int]]) -> States:
    """Of states that differ in values only which wait to be joined, those in which these have one layout.

    So many states come of a loop, such as a scan over a sequence, whose results are stacked at its end.
    """
    for places in joined:
        others = [place for place in range(len(next(iter(states)))) if place not in places]
        rest = operator.itemgetter(*others) if others else len
        even = {state for state in states if len({state[place] for place in places}) == 1}
        known = set(map(rest, even))
        states = {state: way for state, way in states.items() if state in even or rest(state) not in known}
    return states


def _makes_one(node: OperationNode | CallNode) -> bool:
    overwrites = isinstance(node, OperationNode) and bool(node.overwritten)
    return not overwrites and len(node.outputs) == 1 and node.outputs[0] is not None


def root_solution(solutions: Sequence[Solution]) -> Solution:
    """The cheapest of a root's solutions."""
    return min(solutions, key=lambda solution: solution.cost)


__all__ = ["Placer", "root_solution"]
