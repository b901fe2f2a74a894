"""Overlap: find the collectives that can run beside matrix products.

in:  the plan, the trace, the modules of the program
out: `Overlap`s, the modules with what is gathered again, and TP152 for what the plan asks for and can't be had

    gather_linear     an all-gather of what linear layers multiply    the next part travels while one is multiplied;
                                                                      backward: the reduce-scatter, while dW is computed
    linear_reduce     a reduce-scatter of a linear layer's result     the sum travels while the next part is multiplied;
                                                                      backward: the all-gather, likewise
                      an all-reduce of it                             likewise; nothing in the backward
    weight_gradient   an all-reduce of the gradient of an input       while dW is computed

A layer counts if a lemma says that it is one product with its own weight, and perhaps a bias (`rewrite/lemmas`). `auto`
takes each where the cost model says that it pays, on the default cluster: from so many rows on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tpplan.compiler.bind.bind import Binding
from tpplan.compiler.bind.linear import LinearForm
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.layout import Collective, Layout
from tpplan.compiler.ir.overlaps import Overlap
from tpplan.compiler.ir.program import ModuleProgram, Program, Reshard, dtype_name
from tpplan.compiler.ir.trace import Frame
from tpplan.cost.cluster import Cluster, cluster_of
from tpplan.cost.hiding import LinearPart, Rates, schedules, sums_in_parts
from tpplan.cost.link_times import Group, collective_seconds
from tpplan.plan import Diagnostic, OverlapUnit, OverlapWord, Plan, Style

_DEFAULT = "h100"
_LARGE = 8192  # rows
_SIZES = tuple(2**power for power in range(6, 24))
_NEVER = 2**40
_SUMS = (Collective.ALL_REDUCE, Collective.ONE_SHOT)  # which of the two, each call's size decides
_ALL = (OverlapUnit.GATHER_LINEAR, OverlapUnit.LINEAR_REDUCE, OverlapUnit.WEIGHT_GRADIENT)


@dataclass(frozen=True, slots=True)
class _Hideable:
    """A reshard that a unit can hide, if linear layers stand there."""

    spec: ModuleProgram
    reshard: Reshard
    inward: bool
    unit: OverlapUnit


def overlapped(program: Program, plan: Plan, flow: DataFlow, binding: Binding) -> tuple[Program, list[Diagnostic]]:
    """The program with what runs beside products and what is gathered again; findings of what is asked for in vain."""
    asked = _OverlapChoice(plan, binding)
    size, modules = program.size, program.modules
    if size == 1 or not (asked.anything or plan.recompute_gather or plan.chunks or plan.fused_overlap):
        return program, []
    found: list[Overlap] = []
    again: set[tuple[str, object]] = set()
    reasons: dict[OverlapUnit, str] = {}
    if program.takes_gradients:  # whose backward no node of ours has
        reasons = dict.fromkeys(_ALL, "the model takes gradients in its forward, where backwards run as they are")
    else:
        layers, cluster = _Layers(flow, binding, modules), cluster_of(_DEFAULT)
        for place in _places(modules, size, reasons):
            linears = layers.behind(place)
            chosen = tuple(name for name in linears if asked.units(name, place.unit))
            if not linears:
                reasons.setdefault(place.unit, f"no linear layer alone reads {_where(place)}")
            recomputes = plan.recompute_gather and bool(linears) and place.reshard.forward is Collective.ALL_GATHER
            if not chosen and not recomputes:
                continue
            names = linears if recomputes else chosen  # what a layer outside keeps isn't saved
            auto = bool(chosen) and all(asked.is_auto(name) for name in chosen)
            way = _schedule(
                cluster, place, [layers.part(name, place.inward, size) for name in names], size, plan.chunks
            )
            if recomputes:
                again.add((place.spec.name, place.reshard.path))
            found.append(
                Overlap(
                    place.spec.name, place.inward, place.reshard.path, names, (place.unit,) if chosen else (),
                    way.groups, way.grouped, way.least if auto else 0,
                )
            )  # fmt: skip
    modules = tuple(
        replace(spec, entries=tuple(replace(r, gathered_again=(spec.name, r.path) in again) for r in spec.entries))
        for spec in modules
    )
    program = replace(program, overlaps=tuple(found), modules=modules if again else program.modules)
    program = replace(program, fused_overlap=plan.fused_overlap and any(map(program.exchanges, found)))
    return program, list(_vain(plan, program, reasons, asked, bool(again)))


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
        return said is OverlapWord.AUTO or _names(said, unit)

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
        if spec.style == Style.ROWWISE:
            for reshard in spec.exits:
                if reshard.path:
                    continue
                if reshard.forward in _SUMS and reshard.backward is Collective.NONE:
                    yield _Hideable(spec, reshard, False, OverlapUnit.LINEAR_REDUCE)
                elif reshard.forward is not Collective.REDUCE_SCATTER:
                    continue
                elif reason := _uneven(reshard.target, reshard, size):
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

    def __init__(self, flow: DataFlow, binding: Binding, modules: Sequence[ModuleProgram]) -> None:
        self._trace = flow.trace
        self._binding = binding
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
            return (name,) if self._is_product(name) else ()
        (target,) = (c.target for c in frames[0].entries if c.path == place.reshard.path)
        if target in self._written:
            return ()
        if place.spec.style == Style.COLWISE:
            readers = [frames[0]]
        else:
            readers = [f for f in self._readers[target] if not (s := self._specs.get(f.module)) or not s.entries]
        return tuple(dict.fromkeys(frame.module for frame in readers if self._are_columns(frame.module)))

    def _are_columns(self, layer: str) -> bool:
        spec = self._specs.get(layer)
        return spec is not None and spec.style == Style.COLWISE and not spec.exits and self._is_product(layer)

    def _is_product(self, layer: str) -> bool:
        bound = self._binding.modules.get(layer)
        return bound is not None and isinstance(bound.form, LinearForm) and not bound.walked

    def part(self, layer: str, columns: bool, size: int) -> LinearPart:
        """A rank's part of a layer's weight, which is split by columns or by rows."""
        frame = self._frames[layer][0]
        given, made = (self._trace.values[c[0].target] for c in (frame.entries, frame.exits))
        split = (made.shape[-1] // size, given.shape[-1]) if columns else (made.shape[-1], given.shape[-1] // size)
        return (*split, dtype_name(given.dtype), given.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class _Schedule:
    """How the parts of a pairwise exchange are multiplied.

    Attributes:
        groups, grouped, least: see `Overlap`.
    """

    groups: tuple[int, ...] = ()
    grouped: int = 0
    least: int = 0


def _schedule(
    cluster: Cluster, place: _Hideable, layers: Sequence[LinearPart], size: int, chunks: int | None
) -> _Schedule:
    """What the cost model hides most by, for as many rows as large calls have, and from how many on it hides anything.

    An all-reduce beside products that run anyway costs nothing more, whatever the size.
    """
    if place.unit is OverlapUnit.WEIGHT_GRADIENT:
        return _Schedule()
    rates, group = Rates(cluster, kept=cluster.sustained), Group.of(cluster, size)
    made, given, _, itemsize = layers[0]
    width = (given if place.inward else made) * itemsize
    sums = place.reshard.forward in _SUMS

    def hidden(rows: int, groups: tuple[int, ...], grouped: int) -> float:
        if sums:
            return rates.summed(layers, rows, groups, group)
        alone = collective_seconds(cluster, "all-gather", rows * width, group)
        return rates.pairwise(layers, rows, groups, grouped, alone)

    ways = sums_in_parts(chunks) if sums else schedules(size, len(layers), chunks)
    groups, grouped = max(ways, key=lambda way: hidden(_LARGE, *way))
    least = next((rows for rows in _SIZES if hidden(rows, groups, grouped) > 0), _NEVER)
    return _Schedule(groups if place.inward or sums else groups[::-1], grouped, least)


def _where(place: _Hideable) -> str:
    path = ".".join(map(str, place.reshard.path))
    of = f"`{place.spec.name}`" if place.spec.name else "the model"
    return f"the argument `{path}` of {of}" if place.inward else f"the result of {of}"


_WITHOUT = {
    OverlapUnit.GATHER_LINEAR: "no all-gather stands before linear layers",
    OverlapUnit.LINEAR_REDUCE: "no linear layer's result is summed where the layer ends",
    OverlapUnit.WEIGHT_GRADIENT: "no all-reduce stands behind the gradient of an input of linear layers",
    OverlapUnit.HALF_BATCHES: "halves of a batch aren't computed in turns by this version",
}
_INSTEAD = {
    OverlapUnit.GATHER_LINEAR: "remove it, or give the norms before these layers the style `sequence`",
    OverlapUnit.LINEAR_REDUCE: "remove it, or give the layer the style `rowwise`",
    OverlapUnit.WEIGHT_GRADIENT: "remove it; where a sequence is split, `gather_linear` hides the sum of that gradient",
    OverlapUnit.HALF_BATCHES: "remove it; `linear_reduce` and `weight_gradient` hide all-reduces of whole batches",
}


def _names(overlap: object, unit: OverlapUnit) -> bool:
    return isinstance(overlap, tuple) and unit in overlap


def _vain(
    plan: Plan, program: Program, reasons: Mapping[OverlapUnit, str], asked: _OverlapChoice, again: bool
) -> Iterator[Diagnostic]:
    """Findings of units that are named, and used nowhere."""
    found = program.overlaps
    used = {unit for overlap in found for unit in overlap.units}
    for unit in OverlapUnit:
        if unit in asked.named and unit not in used:
            said = (rule.span_of("overlap") for rule in plan.rules if _names(rule.overlap, unit))
            span = plan.option_spans.get("overlap") if _names(plan.overlap, unit) else next(said, None)
            yield Diagnostic(
                code="TP152",
                message=f"`overlap: [{unit}]` has no effect: {reasons.get(unit, _WITHOUT[unit])}",
                span=span,
                label="no effect",
                help=_INSTEAD[unit],
            )
    if plan.chunks is not None and not any(overlap.groups and overlap.units for overlap in found):
        yield Diagnostic(
            code="TP152",
            message="`chunks` has no effect: no layer's product is made in parts",
            span=plan.option_spans.get("chunks"),
            label="no effect",
            help="remove it" if asked.anything else "remove it, or add `overlap: auto`",
        )
    if plan.fused_overlap and not program.fused_overlap:
        yield Diagnostic(
            code="TP152",
            message="`fused_overlap` has no effect: no gather or reduce-scatter of a split sequence is overlapped",
            span=plan.option_spans.get("fused_overlap"),
            label="no effect",
            help="remove it" if asked.anything else "remove it, or add `overlap: auto`",
        )
    if plan.recompute_gather and not again:
        reason = reasons.get(OverlapUnit.GATHER_LINEAR, _WITHOUT[OverlapUnit.GATHER_LINEAR])
        yield Diagnostic(
            code="TP152",
            message=f"`recompute_gather` has no effect: {reason}",
            span=plan.option_spans.get("recompute_gather"),
            label="no effect",
            help="remove it",
        )


__all__ = ["overlapped"]
