"""Settle: how the values of a record lie on ranks, by the rules that placed the program.

in:  a body's record, and how its arguments, its results and those of its calls lie
out: the layouts of its values; of which whole ones its operations take parts (`rules/slices.py`), and which are
     resharded before them (`rules/moves.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from tpplan.compiler.ir.layout import REPLICATED, Layout, reshard_between
from tpplan.compiler.ir.region import CallNode, Instance, OperationNode, Region
from tpplan.compiler.ir.replaced_bodies import MovedOperand, RecordedBody
from tpplan.compiler.ir.script import ReplayError
from tpplan.compiler.ir.trace import Frame, Trace
from tpplan.compiler.rules.propagate import Outcome, Propagator, Refusal
from tpplan.compiler.rules.weights import Weights

Layouts = Mapping[int, Layout]


@dataclass(frozen=True, slots=True)
class Settled:
    """How a body's values lie, and what happens to operands before operations.

    Attributes:
        layouts: by value of the record.
        slices: by the first result of an operation, the whole operands of which it takes parts, and how these lie.
        moves: likewise, the operands that are resharded, and how they lie then; before they are sliced.
        followed: whether these are the program's.
    """

    layouts: Layouts
    slices: Mapping[int, Layouts]
    moves: Mapping[int, Layouts]
    followed: bool = True

    def also(
        self, layouts: Layouts, slices: Mapping[int, Layouts] | None = None, moves: Mapping[int, Layouts] | None = None
    ) -> Settled:
        """With more of them."""
        return Settled({**self.layouts, **layouts}, {**self.slices, **(slices or {})}, {**self.moves, **(moves or {})})


def settle(root: Instance, trace: Trace, body: RecordedBody, size: int, batch: int) -> Settled:
    """The layouts of a record's values, from those of its arguments and of what its calls return.

    Args:
        root: the record as a region.
        trace: the record.
        body: how values lie at its boundaries, and what is moved between its operations.
        size: the number of ranks.
        batch: the batch size of the model's call, for sequences flattened with their batch.

    Raises:
        ReplayError: an operation can't run on shards that lie so.
    """
    return _Settler(root, trace, body, size, batch).settled()


def moved_operand(region: Region, position: int, number: int, target: Layout) -> MovedOperand:
    """The place of an operand (by its local number) that is moved before the node at a position."""
    node = region.nodes[position]
    assert isinstance(node, OperationNode)
    operand = [*dict.fromkeys(node.inputs)].index(number)
    return MovedOperand(node.name, _number(region, position, node.name), operand, target)


def _number(region: Region, position: int, name: str) -> int:
    return sum(isinstance(node, OperationNode) and node.name == name for node in region.nodes[:position])


class _Settler:
    """Settles one record."""

    def __init__(self, root: Instance, trace: Trace, body: RecordedBody, size: int, batch: int) -> None:
        self.root, self.trace = root, trace
        self.rules = Propagator(size, batch, frozenset(body.heads), frozenset(body.features))
        self.inputs, self.results = dict(body.inputs), dict(body.results)
        self.calls = {(module, call): dict(results) for module, call, results in body.calls}
        self.passed = {(module, call): dict(arguments) for module, call, arguments in body.passed}
        self.moves, self.partial = body.moves, frozenset(body.partial)
        self.averages = body.averages
        self.followed = False
        self.refused: Refusal | None = None
        self.own = {
            v: held.parameter for v, held in zip(root.values, root.region.values, strict=True) if held.parameter
        }
        numbers = {value: number for number, value in enumerate(root.values)}
        passed = {numbers[c.target]: self.inputs.get(c.path, REPLICATED) for c in root.frame.entries
                  if c.path in body.weights}  # fmt: skip
        self.weights = Weights.of(root.region, passed)
        self.live = _live(root)
        self.dead: set[tuple[int, tuple[Layout, ...]]] = set()

    def settled(self) -> Settled:
        known = {c.target: self.inputs.get(c.path, REPLICATED) for c in self.root.frame.entries}
        for followed, slices, moves in self._ways():
            self.followed = followed
            self.rules = self.rules.splitting(
                self.rules.heads, self.rules.features, slices,
                moves=moves, averages=self.averages, extremes=True,
            )  # fmt: skip
            self.dead.clear()
            found = self._from(0, Settled(known, {}, {}))
            if found is not None:
                made = sum(map(len, found.moves.values()))
                return replace(found, followed=followed == bool(self.moves) and made == len(self.moves))
        raise ReplayError(self.refused.reason if self.refused is not None else "its results would have other layouts")

    def _ways(self) -> Iterator[tuple[bool, bool, bool]]:
        """Whether to make the program's moves, and whether to slice, and to move, where an operation can't run.

        As in the placement, whole values are sliced where nothing else works. A record of other sizes, or of a call
        without gradients, may have other operations than the program's.
        """
        if self.moves:
            yield True, True, False
        yield False, False, False
        yield False, True, False
        if self.moves:
            yield False, True, True

    def _from(self, position: int, settled: Settled) -> Settled | None:
        region = self.root.region
        children = self.root.children
        calls = sum(1 for node in region.nodes[:position] if isinstance(node, CallNode))
        while position < len(region.nodes):
            node = region.nodes[position]
            if isinstance(node, CallNode):
                frame = children[calls].frame
                calls += 1
                position += 1
                if not self._passes(frame, settled):
                    return None
                promised = self.calls.get((frame.module, frame.call), {})
                settled = settled.also({c.target: promised.get(c.path, REPLICATED) for c in frame.exits})
                continue
            outcomes = self._outcomes(node, position, settled.layouts)
            if len(outcomes) > 1:
                state = (position, tuple(settled.layouts.get(i, REPLICATED) for i in self.live[position]))
                if state in self.dead:
                    return None
                branches = (self._from(position + 1, self._made(settled, node, o)) for o in outcomes)
                found = next((found for found in branches if found is not None), None)
                if found is None:
                    self.dead.add(state)
                return found
            if not outcomes:
                return None
            settled = self._made(settled, node, outcomes[0])
            position += 1
        return settled if self._leaves(settled.layouts) else None

    def _made(self, settled: Settled, node: OperationNode, outcome: Outcome) -> Settled:
        values = self.root.values
        made = {values[o]: held for o, held in zip(node.outputs, outcome.outputs, strict=True) if o is not None}
        first = values[next(o for o in node.outputs if o is not None)]
        slices, moves = ({values[i]: held for i, held in taken} for taken in (outcome.slices, outcome.moves))
        return settled.also(made, {first: slices} if slices else {}, {first: moves} if moves else {})

    def _outcomes(self, node: OperationNode, position: int, known: Layouts) -> list[Outcome]:
        region, values = self.root.region, self.root.values

        def layout(i: int) -> Layout:
            return known.get(values[i]) or self.own.get(values[i], REPLICATED)

        way = self._moved(node, position, layout) if self.followed else {}
        repeats = node.is_a("expand") and self.weights.compute(node)
        rules = self.rules.repeating(self.weights.widths) if repeats else self.rules
        if way:
            found = rules.moved(node, region.values, layout, way)
        else:
            found = rules.outcomes(node, region.values, layout, self.weights.lasting)
        if isinstance(found, Refusal):
            self.refused = found
            return []
        found = [outcome for outcome in found if not self.moves or self._sums_alike(outcome)]
        return sorted(found, key=lambda o: not o.outputs[0].is_sharded) if self.rules.slices else found

    def _moved(self, node: OperationNode, position: int, layout: Callable[[int], Layout]) -> dict[int, Layout]:
        """What the program moves before an operation; the gradient's side matters where there is one."""
        wanted = [move for move in self.moves if move.operation == node.name]
        if not wanted:
            return {}
        number, operands = _number(self.root.region, position, node.name), [*dict.fromkeys(node.inputs)]
        found: dict[int, Layout] = {}
        for move in wanted:
            if move.number != number or move.operand >= len(operands):
                continue
            i = operands[move.operand]
            differentiable = self.root.region.values[i].differentiable
            target = REPLICATED if move.target.is_replicated and not differentiable else move.target
            if layout(i) != target and reshard_between(layout(i), target) is not None:
                found[i] = target
        return found

    def _sums_alike(self, outcome: Outcome) -> bool:
        """Whether the gradients of parameters come out in parts where the program sums them, and only there."""

        def partial(i: int) -> bool:
            names = self.trace.parameters.get(self.root.values[i], ())
            return not self.partial.isdisjoint(names)

        return all(map(partial, outcome.partial_parameters)) and not any(map(partial, outcome.replicated_parameters))

    def _passes(self, frame: Frame, settled: Settled) -> bool:
        promised = self.passed.get((frame.module, frame.call))
        return promised is None or all(
            self._alike(c.source, settled.layouts, promised.get(c.path, REPLICATED)) for c in frame.entries
        )

    def _leaves(self, known: Layouts) -> bool:
        return all(self._alike(c.source, known, self.results.get(c.path, REPLICATED)) for c in self.root.frame.exits)

    def _alike(self, value: int, known: Layouts, promised: Layout) -> bool:
        """Whether a value lies as promised; its gradient too, if it has one."""
        held = known.get(value) or self.own.get(value, REPLICATED)
        if self.trace.values[value].differentiable:
            return _kind(held) == _kind(promised)
        return (held.forward, held.dim) == (promised.forward, promised.dim)


def _live(root: Instance) -> list[tuple[int, ...]]:
    """For each position of a body, the values that are read from there on."""
    needed = {c.source for c in root.frame.exits}
    found = [tuple(needed)]
    for node in reversed(root.region.nodes):
        needed = needed | {root.values[i] for i in node.inputs}
        found.append(tuple(sorted(needed)))
    return found[::-1]


def _kind(layout: Layout) -> tuple[str, str, int | None]:
    return layout.forward, layout.gradient, layout.dim


__all__ = ["Settled", "moved_operand", "settle"]
