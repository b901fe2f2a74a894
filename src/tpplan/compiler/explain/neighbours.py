"""Neighbours: the linear layers around a value, by what the data flow makes of its features.

in:  the placed instance, a value and how it is split
out: `Reach`: the layers that would contract the split features, those whose whole results meet them on the way and
     would have to be split as well, and the operation that needs all of them

    w2(silu(w1(x)) * w3(x)), from w1's result   ->  read by w2, if w3 is split too
    down(softmax(up(x))), from up's result      ->  stopped at the softmax
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from tpplan.compat.modules import named_modules
from tpplan.compiler.bind.linear import linear_form
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.layout import REPLICATED, REPLICATED_PARTIAL, Layout, sharded
from tpplan.compiler.ir.locations import Location
from tpplan.compiler.ir.region import Instance, OperationNode
from tpplan.compiler.ir.trace import Frame
from tpplan.compiler.rules.propagate import Outcome, Propagator, Refusal

_ROUNDS = 4  # what meets the features may in turn meet something whole, as keys and then values do


@dataclass(frozen=True, slots=True)
class WalkStop:
    """An operation that can't go on with split features: its name, what holds it up, and where it stands."""

    operation: str
    reason: str
    location: Location | None

    def __str__(self) -> str:
        place = f" at {self.location.short}" if self.location is not None else ""
        return f"`{self.operation.split('.')[1].strip('_')}`{place} {self.reason}"


@dataclass(frozen=True, slots=True)
class Reach:
    """Where split features get to.

    Attributes:
        rows: linear layers that would contract them, in order.
        missing: linear layers whose results meet them on the way, and would have to be split as well.
        stop: what needs all of them; None if nothing does.
        leaves: whether they leave the model.
    """

    rows: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    stop: WalkStop | None = None
    leaves: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether the features can stay split until linear layers contract them."""
        return bool(self.rows) and self.stop is None and not self.leaves


class Neighbours:
    """Looks around in one trace."""

    def __init__(self, model: nn.Module, flow: DataFlow, instance: Instance, propagator: Propagator) -> None:
        """Look at the calls of `instance`, by the rules of `propagator`."""
        self.flow = flow
        self.instance = instance
        self.propagator = propagator
        self.linears: dict[int, Frame] = {}
        modules = dict(named_modules(model))
        called = {frame.module for frame in flow.trace.root.walk()}
        linear = {name for name in called if linear_form(modules[name]) is not None}
        for frame in flow.trace.root.walk():
            if frame.module in linear and frame.entries and frame.exits:
                self.linears[frame.exits[0].target] = frame

    def reached(self, value: int, held: Layout) -> Reach:
        """Where the features of `value` get to if it is split so, and layers whose results meet it are split too."""
        seeds, missing = {value: held}, list[str]()
        walk = _Walk(self, seeds)
        for _ in range(_ROUNDS):
            found = [made for beside in walk.beside for made in self.makers(beside)]
            made = [i for i in dict.fromkeys(found) if i not in seeds]
            if not made:
                break
            seeds |= {i: self._columns(i) for i in made}
            missing += [self.linears[i].module for i in made]
            walk = _Walk(self, seeds)
        leaves = any(crossing.target in walk.layouts for crossing in self.instance.frame.exits)
        return Reach(tuple(walk.rows), tuple(dict.fromkeys(missing)), walk.stop, leaves)

    def made_by(self, row: Frame) -> tuple[str, ...]:
        """The linear layers that, if they were all split by columns, would give `row` its input split; none if none."""
        given = row.entries[0].target
        made = self.makers(given)
        walk = _Walk(self, {i: self._columns(i) for i in made})
        goes_on = walk.stop is None and row.module in walk.rows
        return tuple(dict.fromkeys(self.linears[i].module for i in made)) if goes_on else ()

    def reads(self, frame: Frame) -> bool:
        """Whether `frame` is a linear layer's call."""
        return bool(frame.exits) and self.linears.get(frame.exits[0].target) is frame

    def _columns(self, made: int) -> Layout:
        return sharded(len(self.flow.trace.values[made].shape) - 1)

    def makers(self, value: int) -> list[int]:
        """The results of linear layers that `value` was computed from, and nothing else of the call; none if not so."""
        found: dict[int, None] = {}
        seen, waiting = set[int](), [value]
        trace = self.flow.trace
        while waiting:
            current = waiting.pop()
            if current in seen or current in trace.stored:
                continue
            seen.add(current)
            if current in self.linears:
                found[current] = None
            elif current in self.flow.source:
                waiting.append(self.flow.source[current])
            elif current in self.flow.made:
                waiting.extend(i for i in self.flow.made[current].inputs if trace.values[i].differentiable)
            else:
                return []
        return sorted(found)


class _Walk:
    """One walk along the trace, from the values that are split at first."""

    def __init__(self, around: Neighbours, seeds: Mapping[int, Layout]) -> None:
        self.around = around
        self.seeds = seeds
        self.layouts = dict(seeds)
        self.rows: dict[str, None] = {}
        self.beside: dict[int, None] = {}
        self.stop: WalkStop | None = None
        self._frame(around.instance)

    def _frame(self, instance: Instance) -> None:
        frame = instance.frame
        for crossing in frame.entries:
            self._copy(crossing.source, crossing.target)
        if not (self.around.reads(frame) and self._contracts(frame)):
            children = iter(instance.children)
            for node in instance.region.nodes:
                if isinstance(node, OperationNode):
                    self._operation(instance, node)
                else:
                    self._frame(next(children))
        for crossing in frame.exits:
            self._copy(crossing.source, crossing.target)

    def _contracts(self, row: Frame) -> bool:
        """Whether a linear layer takes whole values, or split features, which it sums over."""
        given = row.entries[0].target
        held = self.layouts.get(given)
        if held is None:
            return True
        along = held.dim == len(self.around.flow.trace.values[given].shape) - 1
        self.rows |= {row.module: None} if along else {}
        return along

    def _copy(self, source: int, target: int) -> None:
        if source in self.layouts and target not in self.seeds:
            self.layouts[target] = self.layouts[source]

    def _operation(self, instance: Instance, node: OperationNode) -> None:
        outer = instance.values
        if not any(outer[i] in self.layouts for i in node.inputs):
            return
        answer, beside = self._ask(instance, node, {}), dict[int, Layout]()
        if isinstance(answer, Refusal):
            beside = dict(self._split_too(instance, node))
            second = self._ask(instance, node, beside) if beside else answer
            beside = {} if isinstance(second, Refusal) else beside
            answer = answer if isinstance(second, Refusal) else second
        if isinstance(answer, Refusal) or any(held.forward == "P" for held in answer.outputs):
            reason = answer.reason if isinstance(answer, Refusal) else "sums over the split features"
            self.stop = self.stop or WalkStop(node.name, reason, node.location)
            return
        wanted = [outer[i] for i in beside if instance.region.values[i].differentiable]
        if any(not self.around.makers(i) for i in wanted):
            self.stop = self.stop or WalkStop(node.name, "reads a whole value beside it", node.location)
            return
        self.beside |= dict.fromkeys(wanted)
        for output, held in zip(node.outputs, answer.outputs, strict=True):
            if output is not None and held.is_sharded and outer[output] not in self.seeds:
                self.layouts[outer[output]] = held

    def _ask(self, instance: Instance, node: OperationNode, instead: Mapping[int, Layout]) -> Outcome | Refusal:
        values = instance.region.values

        def layout(i: int) -> Layout:
            whole = values[i].differentiable and values[i].parameter is None
            held = instead.get(i) or self.layouts.get(instance.values[i])
            return held or (REPLICATED_PARTIAL if whole else REPLICATED)

        answer = self.around.propagator.outcomes(node, values, layout)
        return answer if isinstance(answer, Refusal) else answer[0]

    def _split_too(self, instance: Instance, node: OperationNode) -> Iterator[tuple[int, Layout]]:
        """The whole operands as they would lie if they were split like the one that is."""
        values, outer = instance.region.values, instance.values
        split = next(i for i in node.inputs if outer[i] in self.layouts)
        held = self.layouts[outer[split]]
        assert held.dim is not None
        for i in dict.fromkeys((*node.inputs, *node.overwritten)):
            dim = held.dim - len(values[split].shape) + len(values[i].shape)
            fits = dim >= 0 and values[i].shape[dim] == values[split].shape[held.dim]
            if outer[i] not in self.layouts and values[i].parameter is None and fits:
                yield i, replace(held, dim=dim)


__all__ = ["Neighbours", "Reach", "WalkStop"]
