"""Emit: write what was decided as a `Program`.

in:  trace, bindings, assignment
out: `Program`, and diagnostics for what the plan's author should know
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from tpplan.compat.modules import named_modules, own_buffers, own_parameters
from tpplan.compiler.bind.bind import Binding, Bound
from tpplan.compiler.bind.linear import LinearForm
from tpplan.compiler.emit.class_calls import class_calls, counted_among, statistics
from tpplan.compiler.emit.recurrent_states import gathered_states
from tpplan.compiler.explain.origins import Origins
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.exchanges import exchanged, summed
from tpplan.compiler.ir.layout import (
    PARTIAL,
    REPLICATED,
    REPLICATED_PARTIAL,
    Collective,
    Collectives,
    Layout,
    all_reduce_of,
    reshard_between,
)
from tpplan.compiler.ir.program import (
    Boundary,
    InputRecord,
    KernelUse,
    LeftTensor,
    LocalAttribute,
    ModuleProgram,
    ParameterPlacement,
    Program,
    Reshard,
    dtype_name,
)
from tpplan.compiler.ir.replaced_bodies import SharedExperts, SplitNorm
from tpplan.compiler.ir.trace import Crossing, Frame, Operation, Trace
from tpplan.compiler.place.assign import Assignment, FrameAssignment, PlacedMove, PlacedReshard, record_of
from tpplan.compiler.rules.batch_norm import kept_statistics
from tpplan.compiler.trace.choices import called_with_found
from tpplan.compiler.trace.gradient_flow import answered
from tpplan.compiler.trace.random_draws import drawn_in_parts, random_draws
from tpplan.cost.traffic import reshard_traffic
from tpplan.ops.registry import base_name
from tpplan.plan import Diagnostic, Exchange, Plan, Style


def emit(
    model: nn.Module,
    plan: Plan,
    size: int,
    flow: DataFlow,
    binding: Binding,
    assignment: Assignment,
    attributes: Mapping[str, tuple[LocalAttribute, ...]],
    diagnostics: tuple[Diagnostic, ...] = (),
    kernels: tuple[KernelUse, ...] = (),
    recorded: frozenset[str] = frozenset(),
) -> Program:
    """Write the program. Calls of one module must have been decided alike (see `pipeline.conflicting_modules`)."""
    trace, origins = flow.trace, Origins(flow, binding)
    return Program(
        plan=plan.name,
        model=type(model).__name__,
        axis=plan.axis,
        size=size,
        training=trace.settings.training,
        inputs=tuple(_inputs(trace)),
        parameters=_parameters(model, size, binding, assignment),
        buffers=_buffers(trace, model, size, binding),
        modules=_with_one_shot(
            _modules(model, size, trace, binding, assignment, origins, attributes, recorded), size, plan.one_shot
        ),
        kernels=kernels,
        assumptions=tuple(
            f"{a.module or 'the model'} at {a.location.short if a.location else '?'}"
            for a in trace.branches.assumptions
        ),
        picked=tuple(sorted(called_with_found(trace))),
        left=_left(trace, assignment),
        takes_gradients=trace.gradients.taken_inside,
        drawn=drawn_in_parts(trace, assignment.layouts),
        diagnostics=diagnostics,
        boundaries=_boundaries(trace, assignment),
        varied=_varied(trace, assignment),
        device=str(trace.settings.device),
        one_shot=plan.one_shot,
    )


def _with_one_shot(modules: tuple[ModuleProgram, ...], size: int, one_shot: int) -> tuple[ModuleProgram, ...]:
    """The modules with the all-reduces that are done in one step, at the sizes of the example, named so."""

    def named(reshards: tuple[Reshard, ...]) -> tuple[Reshard, ...]:
        return tuple(map(of, reshards))

    def of(reshard: Reshard) -> Reshard:
        sums = all_reduce_of(reshard.padded_bytes(size), getattr(torch, reshard.dtype), one_shot)
        ways = [sums if way is Collective.ALL_REDUCE else way for way in (reshard.forward, reshard.backward)]
        return replace(reshard, forward=ways[0], backward=ways[1])

    return (
        tuple(
            replace(module, entries=named(module.entries), inner=named(module.inner), exits=named(module.exits))
            for module in modules
        )
        if one_shot
        else modules
    )


def _boundaries(trace: Trace, assignment: Assignment) -> dict[str, tuple[Boundary, ...]]:
    """What isn't whole outside of the modules, or has no gradient in the proof, by their first calls."""
    found: dict[str, tuple[Boundary, ...]] = {}
    for module, held in _outside(trace, assignment):
        found.setdefault(module, held)
    return {module: held for module, held in found.items() if held}


def _varied(trace: Trace, assignment: Assignment) -> frozenset[str]:
    """The modules that are called several times with values that lie differently."""
    seen: dict[str, set[tuple[Boundary, ...]]] = defaultdict(set)
    for module, held in _outside(trace, assignment):
        seen[module].add(tuple(replace(boundary, shape=(), differentiable=True) for boundary in held))
    return frozenset(module for module, every in seen.items() if len(every) > 1)


def _outside(trace: Trace, assignment: Assignment) -> Iterator[tuple[str, tuple[Boundary, ...]]]:
    """By call, what isn't whole outside of a module, or has no gradient in the proof."""
    for frame in trace.root.walk():
        held: list[Boundary] = []
        for inward, crossings in ((True, frame.entries), (False, frame.exits)):
            for crossing in crossings:
                outside = crossing.source if inward else crossing.target
                value, layout = trace.values[outside], assignment.layouts.get(outside, REPLICATED)
                if layout != REPLICATED or (inward and value.dtype.is_floating_point and not value.differentiable):
                    held.append(
                        Boundary(inward, crossing.path, crossing.aliases, layout, value.shape, value.differentiable)
                    )
        yield frame.module, tuple(held)


def _inputs(trace: Trace) -> list[InputRecord]:
    found: list[InputRecord] = []
    for crossing in trace.root.entries:
        value = trace.values[crossing.source]
        found.append(InputRecord(crossing.path, value.shape, dtype_name(value.dtype), value.differentiable))
    return found


def _left(trace: Trace, assignment: Assignment) -> tuple[LeftTensor, ...]:
    held = (
        (path, trace.values[value].shape, assignment.layouts.get(value)) for path, value in trace.effects.left.items()
    )
    return tuple(LeftTensor(path, shape, layout) for path, shape, layout in held if layout not in (None, REPLICATED))


def _parameters(
    model: nn.Module, size: int, binding: Binding, assignment: Assignment
) -> tuple[ParameterPlacement, ...]:
    names: dict[int, list[str]] = defaultdict(list)
    parameters: dict[int, Tensor] = {}
    buffers = ((n, b) for n, b in model.named_buffers(remove_duplicate=False) if _is_stored_in_parts(n, binding))
    for name, parameter in (*model.named_parameters(remove_duplicate=False), *buffers):
        names[id(parameter)].append(name)
        parameters[id(parameter)] = parameter
    found: list[ParameterPlacement] = []
    for key, parameter in parameters.items():
        first = names[key][0]
        layout = PARTIAL if first in assignment.once else binding.parameters[first]
        shape = tuple(parameter.shape)
        owner = binding.owners.get(first)
        found.append(
            ParameterPlacement(
                names=tuple(names[key]),
                shape=shape,
                local_shape=_largest_part(layout, shape, size),
                dtype=dtype_name(parameter.dtype),
                itemsize=parameter.dtype.itemsize,
                layout=layout,
                summed=layout.has_replicas or (first in assignment.partial and not layout.is_sharded),
                trainable=parameter.requires_grad,
                origin=owner.rule.origin if owner is not None else "replicated: no rule shards it",
            )
        )
    return tuple(found)


def _is_stored_in_parts(name: str, binding: Binding) -> bool:
    """Whether each rank stores its part of a buffer alone: of what a layer computes its weight of."""
    return binding.parameters[name] != REPLICATED and bool(binding.owners[name].wrapper)


def _buffers(trace: Trace, model: nn.Module, size: int, binding: Binding) -> tuple[ParameterPlacement, ...]:
    """The buffers that the plan splits, and that each rank stores whole."""
    tensors = dict(model.named_buffers(remove_duplicate=False))
    return tuple(
        ParameterPlacement(
            names=names,
            shape=(shape := tuple(tensors[names[0]].shape)),
            local_shape=_largest_part(layout, shape, size),
            dtype=dtype_name(tensors[names[0]].dtype),
            itemsize=tensors[names[0]].dtype.itemsize,
            layout=layout,
            summed=False,
            trainable=False,
            origin=binding.owners[names[0]].rule.origin,
        )
        for names in trace.buffers.values()
        if (layout := binding.parameters[names[0]]).is_sharded and not _is_stored_in_parts(names[0], binding)
    )


def _modules(
    model: nn.Module,
    size: int,
    trace: Trace,
    binding: Binding,
    assignment: Assignment,
    origins: Origins,
    attributes: Mapping[str, tuple[LocalAttribute, ...]],
    recorded: frozenset[str],
) -> tuple[ModuleProgram, ...]:
    by_module: dict[str, list[FrameAssignment]] = defaultdict(list)
    for decided in assignment.frames:
        by_module[decided.frame.module].append(decided)
    reads, drawn = _reads(trace, binding), random_draws(trace, assignment.layouts)
    of_classes = class_calls(trace, assignment)
    apart = frozenset[str]().union(*(counted_among(trace, module) for module, _ in of_classes))
    splits_sequence = any(bound.style is Style.SEQUENCE for bound in binding.modules.values())
    back = functools.cache(functools.partial(answered, trace))
    found: list[ModuleProgram] = []
    modules = dict(named_modules(model))
    for name, module in modules.items():
        calls = by_module.get(name, [])
        own = _in_order(modules, name, reads.get(name, {}))
        entries = _reshards(trace, calls, origins, inward=True)
        exits = _reshards(trace, calls, origins, inward=False)
        bound = binding.modules.get(name)
        random = drawn.get(name)
        if random is not None and bound is not None and bound.recurrent is not None:
            random = "same"  # the body that takes its place drops what it has gathered
        normed = next((decided for decided in calls if decided.normed is not None), None)
        classes = of_classes.get((name, 0), ())
        experts = _experts(trace, bound, calls, size, splits_sequence)
        changed = own or entries or exits or bound or random or normed or name in attributes or name in recorded
        changed = changed or classes or name in apart
        if not changed and name:
            continue
        body = experts or (bound.recurrent if bound is not None and calls else None)
        if body is None and normed is not None:
            body = _split_norm(trace, normed)
        if body is None and name in recorded:
            body = record_of(assignment, trace, name, size)
        found.append(
            ModuleProgram(
                name=name,
                kind=type(module).__name__,
                style=str(bound.style) if bound is not None and bound.style is not Style.NONE else None,
                origin=bound.rule.origin if bound is not None else "inferred",
                calls=len(calls),
                entries=entries,
                exits=exits,
                reads=own,
                random=random,
                local_attributes=attributes.get(name, ()),
                inner=_inner(trace, assignment, calls, size, bound, experts, back),
                body=body,
                walked=bound is not None and bound.walked,
                class_calls=classes,
                counted_apart=name in apart,
                transposed=bound is not None and isinstance(bound.form, LinearForm) and bound.form.transposed,
            )
        )
    return tuple(found)


def _reads(trace: Trace, binding: Binding) -> dict[str, dict[tuple[str, ...], None]]:
    """The parameters, and buffers with a layout, that each module's own body reads, by module; each with all its names.

    Also by operations whose results nobody reads: they run all the same. So do those of its own that the example leaves
    aside: a call of other sizes may choose another, and a functional call has others in their places.
    """
    found: dict[str, dict[tuple[str, ...], None]] = defaultdict(dict)
    placed = {value: names for value, names in trace.buffers.items() if binding.parameters[names[0]] != REPLICATED}
    stored = trace.parameters | placed
    own: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for names in stored.values():
        for name in names:
            own[name.rpartition(".")[0]].append(names)
    for frame in trace.recorded.walk():
        found[frame.module] |= dict.fromkeys(own[frame.module])
        for node in frame.body:
            inputs = node.inputs if isinstance(node, Operation) else tuple(c.source for c in node.entries)
            for value in inputs:
                if value in stored:
                    found[frame.module][stored[value]] = None
        for crossing in frame.exits:
            if crossing.source in stored:
                found[frame.module][stored[crossing.source]] = None
    order = {names: place for place, names in enumerate(stored.values())}
    return {module: dict.fromkeys(sorted(read, key=order.__getitem__)) for module, read in found.items()}


def _in_order(modules: dict[str, nn.Module], name: str, read: dict[tuple[str, ...], None]) -> tuple[str, ...]:
    """Names to show locally in a body: the module's own, in its order, then every name by which it may read others.

    A tied parameter of its own may be read through a module inside it as well, as in `self.decoder.bias`. A module that
    stands in several places counts by the first of its names.
    """
    prefix = f"{name}." if name else ""
    own = {n for names in read for n in names if n.startswith(prefix) and "." not in n[len(prefix) :]}
    leaves = (*own_parameters(modules[name]), *own_buffers(modules[name]))
    ordered = [f"{prefix}{leaf}" for leaf in leaves if f"{prefix}{leaf}" in own]
    foreign = [
        n
        for names in read
        for n in names
        if n not in own and n.rpartition(".")[0] in modules and (not own.intersection(names) or n.startswith(prefix))
    ]
    return (*ordered, *foreign)


def _reshards(trace: Trace, calls: list[FrameAssignment], origins: Origins, inward: bool) -> tuple[Reshard, ...]:
    """Those of a module, the same in each of its calls; where a value has no gradient, nothing is sent back."""
    merged: dict[tuple[str | int, ...], Reshard] = {}
    for decided in calls:
        for placed in decided.entries if inward else decided.exits:
            made = _reshard(trace, decided.frame, placed, origins, inward)
            known = merged.setdefault(placed.path, made)
            if made.differentiable and not known.differentiable:
                merged[placed.path] = made
    without = Counter(
        c.path
        for decided in calls
        for c in (decided.frame.entries if inward else decided.frame.exits)
        if not trace.sends_back(c.target)
    )
    return tuple(
        replace(made, without_gradient=without[path]) if made.differentiable and without[path] else made
        for path, made in merged.items()
    )


def _reshard(trace: Trace, frame: Frame, placed: PlacedReshard, origins: Origins, inward: bool) -> Reshard:
    value, sends_back = trace.values[placed.value], trace.sends_back(placed.value)
    collectives = reshard_between(placed.source, placed.target)
    assert collectives is not None
    crossing = Crossing(placed.path, placed.value, placed.value)
    return Reshard(
        path=placed.path,
        aliases=placed.aliases,
        source=placed.source,
        target=placed.target,
        forward=collectives.forward,
        backward=collectives.backward if sends_back else Collective.NONE,
        shape=value.shape,
        dtype=dtype_name(value.dtype),
        bytes=value.bytes,
        differentiable=sends_back,
        origin=origins.of_entry(frame, crossing) if inward else origins.of_exit(frame, placed.value),
    )


def _split_norm(trace: Trace, decided: FrameAssignment) -> SplitNorm:
    placed = decided.normed
    assert placed is not None
    module = decided.frame.module

    def name(value: int | None) -> str | None:
        names = () if value is None else trace.parameters[value]
        return next((n for n in names if n.rpartition(".")[0] == module), next(iter(names), None))

    weight, bias = name(placed.weight), name(placed.bias)
    norm = placed.norm
    found = SplitNorm(placed.layout, norm.centred, norm.eps, norm.offset, norm.cast, weight, bias, narrows=norm.narrows)
    if norm.gate is None:
        return found
    gate = str(decided.frame.entries[norm.gate.entry].path[0])
    return replace(found, gate=gate, gated_first=norm.gate.first)


def _largest_part(layout: Layout, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The shape of what the fullest rank holds."""
    return layout.local_shape(shape, size, 0 if layout.dim is None else layout.fullest(shape[layout.dim], size))


def _experts(
    trace: Trace, bound: Bound | None, calls: list[FrameAssignment], size: int, splits_sequence: bool
) -> SharedExperts | None:
    """Whole experts, with how their tokens are exchanged."""
    if bound is None or bound.experts is None or not calls:
        return None
    experts, first = bound.experts, calls[0]
    if experts.owner is not None or not splits_sequence or experts.ranks > 1:
        return replace(experts, exchange=None)
    tokens = next(c.target for c in first.frame.entries if c.path == (experts.tokens,))
    sums = summed(trace.values[tokens], trace.values[first.frame.exits[0].source])
    sent = [_bytes(way, size) for way in (_exchanged(trace, first.frame, experts, size), sums)]
    exchange = None if first.dispatched is None else Exchange.ALL_TO_ALL
    return replace(experts, exchange=exchange, sent=(sent[0], sent[1]))


def _bytes(moves: Iterable[Reshard], size: int) -> int:
    """What a rank sends in a call and its backward."""
    steps = [reshard_traffic(move, size) for move in moves]
    return sum(step.forward.total + step.backward.total for step in steps)


def _exchanged(trace: Trace, frame: Frame, experts: SharedExperts, size: int) -> tuple[Reshard, ...]:
    """What the ranks exchange where tokens go to those with their experts."""
    given = {crossing.path[0]: trace.values[crossing.target] for crossing in frame.entries}
    arguments = (given[experts.tokens], given[experts.chosen], given[experts.weights])
    return exchanged(*arguments, trace.values[frame.exits[0].source], experts.count, size)


def _inner(
    trace: Trace,
    assignment: Assignment,
    calls: list[FrameAssignment],
    size: int,
    bound: Bound | None,
    experts: SharedExperts | None,
    back: Callable[[], Collection[int]],
) -> tuple[Reshard, ...]:
    """What the ranks exchange inside of a body; `back` has the values to which a gradient comes back."""
    if bound is not None and bound.recurrent is not None:
        return gathered_states(trace, assignment, [decided.frame for decided in calls], bound.recurrent)
    normed = next((decided for decided in calls if decided.normed is not None), None)
    if normed is not None:
        return _statistics(trace, normed)
    if experts is not None and experts.dispatches:
        return _exchanged(trace, calls[0].frame, experts, size)
    if not calls:
        return ()
    return (
        *statistics(calls[0].frame, trace, assignment, size),
        *(_moved(trace, move, move.value in back()) for move in calls[0].moves if not move.again),
        *_kept(trace, assignment, calls[0].frame),
    )


def _moved(trace: Trace, move: PlacedMove, sends_back: bool) -> Reshard:
    """A value that a body moves between its operations."""
    value, location = move.moved(trace), move.operation.location
    ways = reshard_between(move.source, move.target)
    assert ways is not None
    if move.backward is not None:  # a gradient, or what is compared with one
        ways, sends_back = Collectives(Collective.NONE, ways.forward), True
    where = f" at {location.short}" if location is not None else ""
    name, place = base_name(move.place.operation).strip("_"), move.place
    name = name if move.backward is None else f"{name} of a backward"
    return Reshard(
        path=(name, place.number, place.operand), source=move.source, target=move.target, forward=ways.forward,
        backward=ways.backward if sends_back else Collective.NONE, shape=value.shape,
        dtype=dtype_name(value.dtype), bytes=value.bytes, differentiable=sends_back,
        origin=f"`{place.operation}`{where} can't run on what a rank has of it",
    )  # fmt: skip


def _kept(trace: Trace, assignment: Assignment, frame: Frame) -> Iterator[Reshard]:
    """The buffers that a body writes a part of, which is made whole after it."""
    written = [v for n in frame.body if isinstance(n, Operation) for v in kept_statistics(n.name, n.arguments)]
    for buffer in dict.fromkeys(written):
        value, layout = trace.values[buffer], assignment.layouts.get(buffer, REPLICATED)
        if layout.is_sharded:
            yield Reshard(
                path=(trace.buffers[buffer][0],), aliases=(), source=layout, target=REPLICATED,
                forward=Collective.ALL_GATHER, backward=Collective.NONE, shape=value.shape,
                dtype=dtype_name(value.dtype), bytes=value.bytes, differentiable=False,
                origin="the statistics that a batch norm keeps of split channels",
            )  # fmt: skip


def _statistics(trace: Trace, decided: FrameAssignment) -> tuple[Reshard, ...]:
    """The sums over the ranks of a norm over split features: of the squares, and before that of what is centred."""
    placed, value = decided.normed, trace.values[decided.frame.entries[0].target]
    assert placed is not None
    shape = (*value.shape[:-1], 1)
    dtype = torch.float32 if value.dtype.itemsize < 4 or placed.norm.narrows else value.dtype
    origin = "the statistic of a norm over split features"
    return tuple(
        Reshard(
            path=(name,), aliases=(), source=PARTIAL, target=REPLICATED_PARTIAL, forward=Collective.ALL_REDUCE,
            backward=Collective.ALL_REDUCE if value.differentiable else Collective.NONE, shape=shape,
            dtype=dtype_name(dtype), bytes=math.prod(shape) * dtype.itemsize, differentiable=value.differentiable,
            origin=origin,
        )
        for name in (("mean", "variance") if placed.norm.centred else ("mean square",))
    )  # fmt: skip


__all__ = ["emit"]
