"""Overlap: find the collectives that can run beside matrix products.

in:  the plan, the trace, the modules of the program
out: `Overlap`s, and TP152 where the plan asks for one that can't be had

    gather_linear     an all-gather of what linear layers multiply    the next part travels while one is multiplied;
                                                                      backward: the reduce-scatter, while dW is computed
    linear_reduce     a reduce-scatter of a linear layer's result     the sum travels while the next part is multiplied;
                                                                      backward: the all-gather, likewise
    weight_gradient   an all-reduce of the gradient of an input       while dW is computed

A layer counts if all that it does is one product with its own weight, and perhaps a bias; the trace says so. `auto`
takes each where the cost model says that it pays, on the default cluster: from so many rows on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tpplan.compiler.bind.bind import Binding
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.layout import Collective, Layout
from tpplan.compiler.ir.overlaps import Overlap
from tpplan.compiler.ir.program import ModuleProgram, Reshard, dtype_name
from tpplan.compiler.ir.trace import Frame, Operation, Reference, Trace
from tpplan.cost.cluster import Cluster, cluster_of
from tpplan.cost.hiding import Layer, Rates, schedules
from tpplan.cost.link_times import Group, collective_seconds
from tpplan.ops.registry import base_name
from tpplan.plan import Diagnostic, OverlapUnit, OverlapWord, Plan, Style

_SHAPES = frozenset(("t", "view", "_unsafe_view", "transpose", "permute", "reshape", "alias", "expand", "flatten"))
_PRODUCTS = frozenset(("mm", "addmm", "matmul", "linear", "bmm"))
_DEFAULT = "h100"
_LARGE = 8192  # rows
_SIZES = tuple(2**power for power in range(6, 24))
_NEVER = 2**40
_ALL = (OverlapUnit.GATHER_LINEAR, OverlapUnit.LINEAR_REDUCE, OverlapUnit.WEIGHT_GRADIENT)


@dataclass(frozen=True, slots=True)
class _Hideable:
    """A reshard that a unit can hide, if linear layers stand there."""

    spec: ModuleProgram
    reshard: Reshard
    inward: bool
    unit: OverlapUnit


def overlaps_of(
    plan: Plan,
    size: int,
    flow: DataFlow,
    binding: Binding,
    modules: Sequence[ModuleProgram],
    differentiates: bool,
) -> tuple[tuple[Overlap, ...], list[Diagnostic]]:
    """What runs beside products, and what the plan asks for in vain.

    Args:
        plan: what is asked for.
        size: the number of ranks.
        flow: of the trace.
        binding: the rules of modules.
        modules: of the program.
        differentiates: whether the model takes gradients in its forward, whose backward no node of ours has.
    """
    asked = _OverlapChoice(plan, binding)
    if size == 1 or not (asked.anything or plan.recompute_gather):
        return (), []
    found: list[Overlap] = []
    reasons: dict[OverlapUnit, str] = {}
    if differentiates:
        reasons = dict.fromkeys(_ALL, "the model takes gradients in its forward, where backwards run as they are")
    else:
        layers, cluster = _Layers(flow, modules), cluster_of(_DEFAULT)
        for place in _places(modules, size, reasons):
            linears = layers.behind(place)
            chosen = tuple(name for name in linears if asked.units(name, place.unit))
            if not linears:
                reasons.setdefault(place.unit, f"no linear layer alone reads {_where(place)}")
            recomputes = plan.recompute_gather and bool(linears) and place.reshard.forward is Collective.ALL_GATHER
            if not chosen and not recomputes:
                continue
            names = chosen or linears
            auto = bool(chosen) and all(asked.is_auto(name) for name in chosen)
            way = _schedule(cluster, place, [layers.part(name, place.inward, size) for name in names], size)
            found.append(
                Overlap(
                    place.spec.name, place.inward, place.reshard.path, names, (place.unit,) if chosen else (),
                    way.groups, way.grouped, way.least if auto else 0, recomputes,
                )
            )  # fmt: skip
    return tuple(found), list(_vain(plan, found, reasons, asked))


class _OverlapChoice:
    """What the plan, and its rules, say of each layer."""

    def __init__(self, plan: Plan, binding: Binding) -> None:
        self._plan = plan
        self._rules = {name: bound.rule.overlap for name, bound in binding.modules.items()}
        every = [plan.overlap, *(held for held in self._rules.values() if held is not None)]
        self.anything = any(held != OverlapWord.NONE and held != () for held in every)
        self.named = {unit for held in every if isinstance(held, tuple) for unit in held}

    def units(self, layer: str, unit: OverlapUnit) -> bool:
        """Whether a unit may be used for a layer."""
        said = self._said(layer)
        return said is OverlapWord.AUTO or (isinstance(said, tuple) and unit in said)

    def is_auto(self, layer: str) -> bool:
        """Whether the cost model decides for a layer."""
        return self._said(layer) is OverlapWord.AUTO

    def _said(self, layer: str) -> object:
        own = self._rules.get(layer)
        return self._plan.overlap if own is None else own


def _places(modules: Sequence[ModuleProgram], size: int, reasons: dict[OverlapUnit, str]) -> Iterator[_Hideable]:
    """The reshards whose collectives can be hidden."""
    for spec in modules:
        for reshard in spec.entries:
            if reshard.aliases:
                continue  # moved once for all places, by a step of its own
            if reshard.forward is Collective.ALL_GATHER:
                if reason := _uneven(reshard.source, reshard, size):
                    reasons[OverlapUnit.GATHER_LINEAR] = reason
                elif reshard.backward in (Collective.REDUCE_SCATTER, Collective.NONE):
                    yield _Hideable(spec, reshard, True, OverlapUnit.GATHER_LINEAR)
            elif reshard.forward is Collective.NONE and reshard.backward is Collective.ALL_REDUCE:
                yield _Hideable(spec, reshard, True, OverlapUnit.WEIGHT_GRADIENT)
        if spec.style == Style.ROWWISE and not spec.walked and spec.body is None:
            for reshard in spec.exits:
                if reshard.forward is not Collective.REDUCE_SCATTER or reshard.path:
                    continue
                if reason := _uneven(reshard.target, reshard, size):
                    reasons[OverlapUnit.LINEAR_REDUCE] = reason
                elif reshard.backward in (Collective.ALL_GATHER, Collective.NONE):
                    yield _Hideable(spec, reshard, False, OverlapUnit.LINEAR_REDUCE)


def _uneven(layout: Layout, reshard: Reshard, size: int) -> str:
    """Why ranks don't hold one even stretch of a dim that isn't the last; empty if they do."""
    if layout.interleave != 1:
        return f"the sequence of {list(reshard.shape)} is flattened with its batch"
    if layout.dim is None or layout.packs or layout.tail or not layout.is_even(reshard.shape[layout.dim], size):
        return f"ranks hold uneven parts of {list(reshard.shape)}"
    return "" if layout.dim < len(reshard.shape) - 1 else f"the features of {list(reshard.shape)} are split"


class _Layers:
    """The linear layers of a trace, and what they read."""

    def __init__(self, flow: DataFlow, modules: Sequence[ModuleProgram]) -> None:
        self._trace = flow.trace
        self._written = flow.written
        self._specs = {spec.name: spec for spec in modules}
        self._frames: dict[str, list[Frame]] = defaultdict(list)
        self._readers: dict[int, list[Frame]] = defaultdict(list)
        for frame in flow.trace.root.walk():
            self._frames[frame.module].append(frame)
            for crossing in frame.entries:
                self._readers[crossing.source].append(frame)

    def behind(self, place: _Hideable) -> tuple[str, ...]:
        """The layers that multiply what a reshard makes, or make what it takes."""
        name, frames = place.spec.name, self._frames[place.spec.name]
        if not frames:
            return ()
        if not place.inward:
            return (name,) if all(_product(self._trace, frame) is not None for frame in frames) else ()
        (target,) = (c.target for c in frames[0].entries if c.path == place.reshard.path)
        if target in self._written:
            return ()
        if place.spec.style == Style.COLWISE:
            readers = [frames[0]]
        else:
            readers = [f for f in self._readers[target] if not (s := self._specs.get(f.module)) or not s.entries]
        return tuple(dict.fromkeys(frame.module for frame in readers if self._counts(frame)))

    def _counts(self, frame: Frame) -> bool:
        spec = self._specs.get(frame.module)
        if spec is None or spec.style != Style.COLWISE or spec.walked or spec.body is not None:
            return False
        return not spec.exits and not spec.random and _product(self._trace, frame) is not None

    def part(self, layer: str, columns: bool, size: int) -> Layer:
        """A rank's part of a layer's weight, which is split by columns or by rows."""
        frame = self._frames[layer][0]
        given, made = (self._trace.values[c[0].target] for c in (frame.entries, frame.exits))
        split = (made.shape[-1] // size, given.shape[-1]) if columns else (made.shape[-1], given.shape[-1] // size)
        return (*split, dtype_name(given.dtype), given.dtype.itemsize)


def _product(trace: Trace, frame: Frame) -> Operation | None:
    """The one product that a call consists of, with the module's own weight; None if it does anything else."""
    found: list[Operation] = []
    if len(frame.entries) != 1 or len(frame.exits) != 1 or frame.backwards:
        return None
    own = {value for value, names in trace.parameters.items() if names[0].rpartition(".")[0] == frame.module}
    for node in frame.body:
        if not isinstance(node, Operation):
            return None
        name = base_name(node.name)
        if name in _PRODUCTS:
            found.append(node)
        elif name not in _SHAPES and not (name == "add" and _adds(node, own)):
            return None
    if len(found) != 1 or any(held != 1 for held in found[0].keywords.values()):
        return None
    return found[0]


def _adds(node: Operation, own: set[int]) -> bool:
    """Whether an addition is that of the module's bias."""
    added = [a.identifier for a in node.arguments if isinstance(a, Reference)]
    return len(added) == 2 and added[1] in own and not node.keywords


@dataclass(frozen=True, slots=True)
class _Schedule:
    """How the parts of a pairwise exchange are multiplied.

    Attributes:
        groups, grouped, least: see `Overlap`.
    """

    groups: tuple[int, ...] = ()
    grouped: int = 0
    least: int = 0


def _schedule(cluster: Cluster, place: _Hideable, layers: Sequence[Layer], size: int) -> _Schedule:
    """What the cost model hides most by, for as many rows as large calls have, and from how many on it hides anything.

    An all-reduce beside products that run anyway costs nothing more, whatever the size.
    """
    if place.unit is OverlapUnit.WEIGHT_GRADIENT:
        return _Schedule()
    rates, group = Rates(cluster, kept=cluster.sustained), Group.of(cluster, size)
    made, given, _, itemsize = layers[0]
    width = (given if place.inward else made) * itemsize

    def hidden(rows: int, groups: tuple[int, ...], grouped: int) -> float:
        alone = collective_seconds(cluster, "all-gather", rows * width, group)
        return rates.pairwise(layers, rows, groups, grouped, alone)

    groups, grouped = max(schedules(size, len(layers)), key=lambda way: hidden(_LARGE, *way))
    least = next((rows for rows in _SIZES if hidden(rows, groups, grouped) > 0), _NEVER)
    return _Schedule(groups if place.inward else groups[::-1], grouped, least)


def _where(place: _Hideable) -> str:
    path = ".".join(map(str, place.reshard.path))
    of = f"`{place.spec.name}`" if place.spec.name else "the model"
    return f"the argument `{path}` of {of}" if place.inward else f"the result of {of}"


_WITHOUT = {
    OverlapUnit.GATHER_LINEAR: "no all-gather stands before linear layers",
    OverlapUnit.LINEAR_REDUCE: "no linear layer's result is summed by a reduce-scatter",
    OverlapUnit.WEIGHT_GRADIENT: "no all-reduce stands behind the gradient of an input of linear layers",
    OverlapUnit.HALF_BATCHES: "halves of a batch aren't computed in turns by this version",
}
_INSTEAD = {
    OverlapUnit.GATHER_LINEAR: "remove it, or give the norms before these layers the style `sequence`",
    OverlapUnit.LINEAR_REDUCE: "remove it, or give the norms after these layers the style `sequence`",
    OverlapUnit.WEIGHT_GRADIENT: "remove it; where a sequence is split, `gather_linear` hides the sum of that gradient",
    OverlapUnit.HALF_BATCHES: "remove it; `weight_gradient` hides the all-reduces of the backward",
}


def _vain(
    plan: Plan, found: Sequence[Overlap], reasons: Mapping[OverlapUnit, str], asked: _OverlapChoice
) -> Iterator[Diagnostic]:
    """Findings of units that are named, and used nowhere."""
    used = {unit for overlap in found for unit in overlap.units}
    for unit in OverlapUnit:
        if unit in asked.named and unit not in used:
            spans = [plan.overlap_span] if isinstance(plan.overlap, tuple) and unit in plan.overlap else []
            rules = [r for r in plan.rules if isinstance(r.overlap, tuple) and unit in r.overlap]
            span = next(iter([*spans, *(rule.span_of("overlap") for rule in rules)]), None)
            yield Diagnostic(
                code="TP152",
                message=f"`overlap: [{unit}]` has no effect: {reasons.get(unit, _WITHOUT[unit])}",
                span=span,
                label="no effect",
                help=_INSTEAD[unit],
            )
    if plan.recompute_gather and not any(overlap.recomputes for overlap in found):
        message = f"`recompute_gather` has no effect: {_WITHOUT[OverlapUnit.GATHER_LINEAR]}"
        yield Diagnostic(code="TP152", message=message, subject=plan.name, help="remove it")


__all__ = ["overlaps_of"]
