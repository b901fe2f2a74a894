"""Place: choose where values change their layout, so that every body runs on local tensors at the least cost.

in:  regions, with what the plan pins
out: `Assignment`s: a layout for every value, and the reshards at the boundaries, by region

A dynamic program over each region's body in order of execution. Its state is the layouts of the values that are still
to be read; an operation maps a state to one (or refuses it), a boundary branches. Equal states keep the cheapest way
there. A call inside a body is solved once for each choice of its input layouts, and remembered by its region, so that
126 equal layers cost as much as one.

    x: S(1) -> self_attn(x) -> q, k, v: colwise   =>   one all-gather where x enters self_attn; its backward is one
                                                       reduce-scatter for the three gradients
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tpplan.compiler.layout import (
    PARTIAL,
    REPLICATED,
    REPLICATED_PARTIAL,
    Collectives,
    Layout,
    Pack,
    packed,
    reshard_between,
    sharded,
)
from tpplan.compiler.propagate import Outcome, Propagator, Refusal
from tpplan.compiler.recognise import Norm, recognise
from tpplan.compiler.region import Boundary, CallNode, LocalValue, OperationNode, Region
from tpplan.cost.communication import Topology, bytes_sent, ring_steps
from tpplan.plan import Pin, Style

Cost = tuple[int, int]
State = tuple[Layout, ...]
Name = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Solution:
    """One way to run a region for given input layouts.

    Attributes:
        outputs: layouts of the region's outputs.
        cost: (picoseconds, tie-breaker).
        steps: what was chosen, newest first: a linked list of (choice, earlier steps).
    """

    outputs: State
    cost: Cost
    steps: Steps | None


@dataclass(frozen=True, slots=True)
class Steps:
    """A linked list of choices, so that states can share their past."""

    choice: Choice
    before: Steps | None

    def in_order(self) -> list[Choice]:
        """The choices, oldest first."""
        found: list[Choice] = []
        step: Steps | None = self
        while step is not None:
            found.append(step.choice)
            step = step.before
        return found[::-1]


@dataclass(frozen=True, slots=True)
class Entered:
    """The layouts given to the region's entries on the inside."""

    layouts: State


@dataclass(frozen=True, slots=True)
class Ran:
    """An operation ran with this outcome."""

    node: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Called:
    """A call was solved this way for these input layouts."""

    node: int
    inputs: State
    solution: Solution


@dataclass(frozen=True, slots=True)
class Left:
    """The layouts given to the region's exits on the outside."""

    layouts: State
    partial_parameters: frozenset[int] = frozenset()
    replicated_parameters: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Normed:
    """The body, a norm over features that lie so, is replaced by one that sums its statistics over the ranks."""

    norm: Norm
    layout: Layout


Choice = Entered | Ran | Called | Left | Normed


@dataclass(frozen=True, slots=True)
class Failure:
    """Where no way goes on: the operation (or boundary) in the region, with the reason.

    Attributes:
        path: positions of the calls that lead to the region, from the root.
        node: position in the region's body; None for a boundary.
        refusal: why.
        progress: how far the placement got, to choose among failures.
    """

    path: tuple[int, ...]
    node: int | None
    refusal: Refusal
    progress: tuple[int, ...]


@dataclass(slots=True)
class Constraints:
    """What the search must obey beyond the plan; grown by the passes that find a program wanting.

    Attributes:
        unsharded: (region's example, local value): a value that must not be sharded there, as its size is read.
        forgiven: (region's example, node): operations already reported; taken as replicated to find the next mistake.
        whole_gradients: (region's example, local value): parameters whose gradient must not be partial there.
        heads: numbers of heads; a dim of such a size may be split at any boundary. Empty until that is worth a try.
        slice_constants: whether values without a gradient may be sliced at boundaries too.
        sequence: whether layouts split along the sequence are tried.
    """

    unsharded: set[tuple[Name, int]] = field(default_factory=set["tuple[Name, int]"])
    forgiven: set[tuple[Name, int]] = field(default_factory=set["tuple[Name, int]"])
    whole_gradients: set[tuple[Name, int]] = field(default_factory=set["tuple[Name, int]"])
    heads: frozenset[int] = frozenset()
    slice_constants: bool = False
    sequence: bool = False


class Placer:
    """Solves regions for one axis."""

    def __init__(self, propagator: Propagator, topology: Topology, constraints: Constraints) -> None:
        self.propagator = propagator
        self.size = propagator.size
        self.topology = topology
        self.constraints = constraints
        self._solutions: dict[tuple[int, State], list[Solution] | Failure] = {}
        self._norms: dict[int, object] = {}
        self._transfers: dict[tuple[int, int, State], list[Outcome] | Refusal] = {}

    def solve(self, region: Region, inputs: State) -> list[Solution] | Failure:
        """Every undominated way to run `region` for these input layouts, or the failure that got furthest."""
        key = (id(region), inputs)
        if key not in self._solutions:
            if region.style in (Style.ROWWISE, Style.VOCAB):
                self._solutions[key] = self._solve_reduced(region, inputs)
            else:
                self._solutions[key] = self._solve_body(region, inputs)
                normed = self._solve_norm(region, inputs)
                if normed is not None:
                    solved = self._solutions[key]
                    self._solutions[key] = [normed] if isinstance(solved, Failure) else [*solved, normed]
        return self._solutions[key]

    # -- ordinary bodies ------------------------------------------------------------------------------------------
    def _solve_body(self, region: Region, inputs: State) -> list[Solution] | Failure:
        outer = dict(zip(region.inputs, inputs, strict=True))
        live = _liveness(region)
        states: dict[State, tuple[Cost, Steps | None]] = {}
        names = live[0]
        free = {name: held for name, held in outer.items()}
        for chosen, cost in self._entry_choices(region, outer):
            known = free | {b.target: held for b, held in zip(region.entries, chosen, strict=True)}
            _keep(states, tuple(known[name] for name in names), cost, Steps(Entered(chosen), None))
        if not states:
            return self._entry_failure(region, outer)
        for position, node in enumerate(region.nodes):
            following: dict[State, tuple[Cost, Steps | None]] = {}
            failure: Failure | None = None
            for state, (cost, steps) in states.items():
                known = dict(zip(names, state, strict=True))
                if isinstance(node, OperationNode):
                    problem = self._run(region, position, node, known, cost, steps, live[position + 1], following)
                else:
                    problem = self._call(region, position, node, known, cost, steps, live[position + 1], following)
                if problem is not None and (failure is None or problem.progress > failure.progress):
                    failure = problem
            if not following:
                assert failure is not None
                return failure
            states, names = following, live[position + 1]
        return self._leave(region, states, names)

    def _run(
        self,
        region: Region,
        position: int,
        node: OperationNode,
        known: dict[int, Layout],
        cost: Cost,
        steps: Steps | None,
        names: tuple[int, ...],
        following: dict[State, tuple[Cost, Steps | None]],
    ) -> Failure | None:
        outcomes = self._transfer(region, position, node, known)
        if isinstance(outcomes, Refusal):
            return Failure((), position, outcomes, (position,))
        accepted = False
        for outcome in outcomes:
            if any((region.example, i) in self.constraints.whole_gradients for i in outcome.partial_parameters):
                continue
            made = {o: held for o, held in zip(node.outputs, outcome.outputs, strict=True) if o is not None}
            if any(held.is_sharded and (region.example, o) in self.constraints.unsharded for o, held in made.items()):
                continue
            extra = sum(self._gradient_sum(region.values[i]) for i in outcome.partial_parameters)
            after = known | made
            total = (cost[0] + extra, cost[1])
            _keep(following, tuple(after[name] for name in names), total, Steps(Ran(position, outcome), steps))
            accepted = True
        if accepted:
            return None
        return Failure((), position, Refusal("constraint", "would split a value whose size is read", ()), (position,))

    def _transfer(
        self, region: Region, position: int, node: OperationNode, known: dict[int, Layout]
    ) -> list[Outcome] | Refusal:
        def layout(identifier: int) -> Layout:
            held = known.get(identifier)
            return held if held is not None else _source_layout(region.values[identifier])

        inputs = (*node.inputs, *node.overwritten)
        key = (id(region), position, tuple(layout(i) for i in inputs))
        if key not in self._transfers:
            outcomes = self.propagator.outcomes(node, region.values, layout)
            if isinstance(outcomes, Refusal) and (region.example, position) in self.constraints.forgiven:
                outcomes = [Outcome(tuple(REPLICATED for _ in node.outputs))]
            self._transfers[key] = outcomes
        return self._transfers[key]

    def _call(
        self,
        region: Region,
        position: int,
        node: CallNode,
        known: dict[int, Layout],
        cost: Cost,
        steps: Steps | None,
        names: tuple[int, ...],
        following: dict[State, tuple[Cost, Steps | None]],
    ) -> Failure | None:
        inputs = tuple(known.get(i) or _source_layout(region.values[i]) for i in node.inputs)
        solutions = self.solve(node.region, inputs)
        if isinstance(solutions, Failure):
            return Failure(
                (position, *solutions.path), solutions.node, solutions.refusal, (position, *solutions.progress)
            )
        accepted = False
        for solution in solutions:
            made = dict(zip(node.outputs, solution.outputs, strict=True))
            if any(held.is_sharded and (region.example, o) in self.constraints.unsharded for o, held in made.items()):
                continue
            accepted = True
            after = known | made
            total = (cost[0] + solution.cost[0], cost[1] + solution.cost[1])
            choice = Called(position, inputs, solution)
            _keep(following, tuple(after[name] for name in names), total, Steps(choice, steps))
        if accepted:
            return None
        return Failure((), position, Refusal("constraint", "would split a value whose size is read", ()), (position,))

    def _leave(
        self, region: Region, states: dict[State, tuple[Cost, Steps | None]], names: tuple[int, ...]
    ) -> list[Solution] | Failure:
        finished: dict[State, tuple[Cost, Steps | None]] = {}
        failure: Failure | None = None
        for state, (cost, steps) in states.items():
            known = dict(zip(names, state, strict=True))
            branches: list[list[tuple[Layout, Cost]]] = []
            for boundary in region.exits:
                source = known.get(boundary.source) or _source_layout(region.values[boundary.source])
                options = self._exit_options(region, boundary, source)
                if not options:
                    refusal = Refusal(
                        "pin", "can't take the layout that is demanded here", ((boundary.source, source),)
                    )
                    failure = Failure((), None, refusal, (len(region.nodes),))
                branches.append(options)
            for combination in itertools.product(*branches):
                outside = {b.target: held for b, (held, _) in zip(region.exits, combination, strict=True)}
                after = known | outside
                total = cost
                for _, extra in combination:
                    total = (total[0] + extra[0], total[1] + extra[1])
                choice = Left(tuple(held for held, _ in combination))
                outputs = tuple(after.get(o) or _source_layout(region.values[o]) for o in region.outputs)
                _keep(finished, outputs, total, Steps(choice, steps))
        if not finished:
            assert failure is not None
            return failure
        return [Solution(outputs, cost, steps) for outputs, (cost, steps) in finished.items()]

    # -- norms over features that are split ------------------------------------------------------------------------
    def _solve_norm(self, region: Region, inputs: State) -> Solution | None:
        """A norm whose features are split: each rank normalizes its part by statistics of the whole."""
        if len(region.inputs) != 1 or len(region.entries) != 1 or len(region.exits) != 1 or region.style is not None:
            return None
        (held,), value = inputs, region.values[region.entries[0].target]
        if held.dim is None or held.dim != len(value.shape) - 1 or held.interleave != 1 or held.spread != 1:
            return None
        if id(region) not in self._norms:
            self._norms[id(region)] = recognise(region)
        norm = self._norms[id(region)]
        if not isinstance(norm, Norm) or norm.dims != 1:
            return None
        parameters = [i for i in (norm.weight, norm.bias) if i is not None]
        partial = frozenset(i for i in parameters if region.values[i].differentiable)
        split = any(region.values[i].parameter != REPLICATED for i in parameters)
        if split or any((region.example, i) in self.constraints.whole_gradients for i in partial):
            return None
        # No latency is counted: to gather the features would save a step of a ring, and repeat on every rank the work
        # that is done with them, of which this model of cost knows nothing.
        sent = 2 * bytes_sent("all-reduce", statistic_bytes(norm, value.shape), self.size)
        cost = self.topology.time(0, sent) + sum(self._gradient_sum(region.values[i]) for i in partial)
        steps = Steps(Normed(norm, held), Steps(Entered((held,)), None))
        return Solution((held,), (cost, 0), Steps(Left((held,), partial), steps))

    # -- linear layers and tables whose product is partial ----------------------------------------------------------
    def _solve_reduced(self, region: Region, inputs: State) -> list[Solution] | Failure:
        """A rowwise linear or a vocabulary-split table: the product is partial, and is reduced before the bias."""
        outer = dict(zip(region.inputs, inputs, strict=True))
        bias = next((i for i, v in enumerate(region.values) if v.parameter is not None and len(v.shape) == 1), None)
        exit_boundary = region.exits[0]
        finished: dict[State, tuple[Cost, Steps | None]] = {}
        for chosen, cost in self._entry_choices(region, outer):
            for target, extra in self._exit_options(region, exit_boundary, PARTIAL):
                if bias is not None and target == PARTIAL:
                    continue
                partial = replicated = frozenset[int]()
                total = (cost[0] + extra[0], cost[1] + extra[1])
                if bias is not None and region.values[bias].differentiable:
                    if target == REPLICATED:
                        replicated = frozenset({bias})
                    else:
                        if (region.example, bias) in self.constraints.whole_gradients:
                            continue
                        partial = frozenset({bias})
                        total = (total[0] + self._gradient_sum(region.values[bias]), total[1])
                steps = Steps(Left((target,), partial, replicated), Steps(Entered(chosen), None))
                _keep(finished, (target,), total, steps)
        if not finished:
            return self._entry_failure(region, outer)
        return [Solution(outputs, cost, steps) for outputs, (cost, steps) in finished.items()]

    # -- boundaries -------------------------------------------------------------------------------------------------
    def _entry_choices(self, region: Region, outer: dict[int, Layout]) -> Iterable[tuple[State, Cost]]:
        branches = [self._entry_options(region, b, outer.get(b.source, REPLICATED)) for b in region.entries]
        for combination in itertools.product(*branches):
            cost = (sum(c[0] for _, c in combination), sum(c[1] for _, c in combination))
            yield tuple(held for held, _ in combination), cost

    def _entry_options(self, region: Region, boundary: Boundary, source: Layout) -> list[tuple[Layout, Cost]]:
        value = region.values[boundary.target]
        options: list[tuple[Layout, Cost]] = []
        for target in self._targets(region, boundary, value, source, outward=False):
            if target.is_sharded and (region.example, boundary.target) in self.constraints.unsharded:
                continue
            collectives = reshard_between(source, target)
            if collectives is not None:
                tie = 0 if source == target else 100 * (2 if source == PARTIAL else 1) + region.depth
                options.append((target, self._price(collectives, value, tie)))
        return options

    def _exit_options(self, region: Region, boundary: Boundary, source: Layout) -> list[tuple[Layout, Cost]]:
        value = region.values[boundary.target]
        options: list[tuple[Layout, Cost]] = []
        for target in self._targets(region, boundary, value, source, outward=True):
            collectives = reshard_between(source, target)
            if collectives is not None:
                tie = 0 if source == target else (50 - region.depth if source == PARTIAL else 1000)
                options.append((target, self._price(collectives, value, tie)))
        return options

    def _targets(
        self, region: Region, boundary: Boundary, value: LocalValue, source: Layout, outward: bool
    ) -> list[Layout]:
        sequence = self._sequence_layout(value)
        if boundary.pin is not None and value.dtype.is_floating_point and value.shape:
            if boundary.pin is Pin.REPLICATE:
                return [REPLICATED, REPLICATED_PARTIAL] if value.differentiable else [REPLICATED]
            if boundary.pin is Pin.SEQUENCE:
                return [] if sequence is None else [sequence]
            last = len(value.shape) - 1
            whole = boundary.packs or (Pack(value.shape[last]),)
            fits = sum(p.size for p in whole) == value.shape[last] and all(p.fits(self.size) for p in whole)
            return [packed(last, whole)] if fits else []
        if boundary.pin is not None:
            return [REPLICATED]
        if region.depth == 0 and outward:
            if source.is_sharded and self._pinned_inside(region, boundary):
                return [source]
            return [REPLICATED]
        if region.fixed and region.style is None:
            return [source]
        targets = [source]
        if value.differentiable:
            targets += [REPLICATED, REPLICATED_PARTIAL]
        elif not source.is_replicated:
            targets.append(REPLICATED)
        movable = value.differentiable or not source.is_replicated or self.constraints.slice_constants
        if movable and sequence is not None and self.constraints.sequence:
            targets += [REPLICATED, sequence]
        targets += self._head_layouts(value)
        return list(dict.fromkeys(targets))

    def _head_layouts(self, value: LocalValue) -> list[Layout]:
        """The splits by heads: of a dim that counts them, or of dim 0 where it was flattened with the batch."""
        found = [sharded(dim) for dim, count in enumerate(value.shape) if count in self.constraints.heads]
        batch = self.propagator.batch
        if batch > 1 and len(value.shape) == 3 and value.shape[0] in {batch * n for n in self.constraints.heads}:
            found.append(sharded(0, interleave=batch))
        return found if value.dtype.is_floating_point else []

    def _pinned_inside(self, region: Region, boundary: Boundary) -> bool:
        """Whether a value that leaves comes from a module whose output the plan pins, through results alone."""
        identifier = boundary.source
        while True:
            node = next((n for n in region.nodes if isinstance(n, CallNode) and identifier in n.outputs), None)
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

    # -- costs ------------------------------------------------------------------------------------------------------
    def _price(self, collectives: Collectives, value: LocalValue, tie: int) -> Cost:
        ways = [collectives.forward] + ([collectives.backward] if value.differentiable else [])
        time = sum(
            self.topology.time(ring_steps(way, self.size), bytes_sent(way, value.bytes, self.size))
            for way in ways
            if way.communicates
        )
        return (time, tie)

    def _gradient_sum(self, value: LocalValue) -> int:
        """A parameter's share of the coalesced sum; its latency is paid once for all."""
        return 1 + self.topology.time(0, bytes_sent("all-reduce", value.bytes, self.size))

    def _entry_failure(self, region: Region, outer: dict[int, Layout]) -> Failure:
        for boundary in region.entries:
            source = outer.get(boundary.source, REPLICATED)
            if not self._entry_options(region, boundary, source):
                refusal = Refusal("pin", "can't take the layout that is demanded here", ((boundary.target, source),))
                return Failure((), None, refusal, (-1,))
        refusal = Refusal("pin", "no layout of the result is possible here", ())
        return Failure((), None, refusal, (-1,))


def statistic_bytes(norm: Norm, shape: tuple[int, ...]) -> int:
    """Of what a norm over the last dim sums over the ranks, in float32."""
    return (2 if norm.centred else 1) * math.prod(shape[:-1]) * 4


def _source_layout(value: LocalValue) -> Layout:
    return value.parameter if value.parameter is not None else REPLICATED


def _keep(states: dict[State, tuple[Cost, Steps | None]], key: State, cost: Cost, steps: Steps | None) -> None:
    known = states.get(key)
    if known is None or cost < known[0]:
        states[key] = (cost, steps)


def _liveness(region: Region) -> list[tuple[int, ...]]:
    """For each position of the body (and its end), the values made before it that are still to be read."""
    needed: set[int] = {b.source for b in region.exits} | set(region.outputs)
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


def root_solution(solutions: Sequence[Solution]) -> Solution:
    """The cheapest of a root's solutions."""
    return min(solutions, key=lambda solution: solution.cost)
