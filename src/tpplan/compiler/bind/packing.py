"""Packing: which stretches of a split linear layer's features are shared out by themselves, and over how many ranks.

in:  a trace's data flow and the bound plan
out: the binding, its modules with their packs; findings for packs that don't fit

    {style: colwise, packed: [q, k, v]}, the result split as 32|16|16   ->  packs 32|16|16
    k_proj: colwise, its result viewed as 2 heads, on 4 ranks           ->  one pack with 2 replicas
    q_proj: colwise, its result viewed as 6 heads, on 4 ranks           ->  one pack, in parts of 2, 2, 1 and 1 heads
    o_proj: rowwise, its input made of these                            ->  the same
    k_proj: colwise, its result viewed as 1 head                        ->  replicate, and a note (TP126)
    qkv: colwise, 2 groups of 4 queries, a key and a value, on 4 ranks  ->  packs of each group for 2 of the ranks
    experts.gate_up_proj: colwise, a bare parameter                     ->  the dim that its product makes

A rule on a linear layer that is never called, whose parameters another body reads, is a rule on these parameters; so is
one on a convolution.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from tpplan.compat.modules import named_modules, parametrized_tensors
from tpplan.compiler.bind.bind import Binding, Bound, bind_parameters, once
from tpplan.compiler.bind.computed_weights import Computed, names_among
from tpplan.compiler.bind.in_bodies import computed_by_layers
from tpplan.compiler.bind.linear import Addend, LinearForm, Product, is_grouped_convolution
from tpplan.compiler.bind.misfits import not_followed, of_whole_parts
from tpplan.compiler.bind.products import find_buffer_use, find_use
from tpplan.compiler.bind.readers import Readers, Taken
from tpplan.compiler.bind.shared_features import shared_features
from tpplan.compiler.bind.shared_heads import Axis, Body, Use, heads_of, imbalance, of_body, uneven_heads
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.heads import cannot_share, fitting_ranks
from tpplan.compiler.ir.layout import Features, Pack
from tpplan.compiler.ir.trace import Frame, Operation, quoted
from tpplan.plan import Diagnostic, Style


@dataclass(frozen=True, slots=True)
class Packed:
    """What the pass makes.

    Attributes:
        binding: with the modules' packs.
        findings: packs that don't fit.
        heads: the numbers of heads into which sharded features are viewed, as packs, as far as they can be shared out.
        features: the features that are split, as packs: each stretch, and the stretches of a layer together.
        notes: columns that stay whole, since they make a single head; ranks that have more heads than others.
    """

    binding: Binding
    findings: list[Diagnostic]
    heads: Features
    features: Features
    notes: list[Diagnostic]


def pack(model: nn.Module, flow: DataFlow, binding: Binding, size: int, partly: bool = False) -> Packed:
    """Find the packs of every `colwise` and `rowwise` module.

    Args:
        model, flow, binding: the model, its trace's data flow, and the bound plan.
        size: number of ranks.
        partly: whether parameters with a rule may be left unread.
    """
    frames: dict[str, Frame] = {}
    for frame in flow.trace.root.walk():
        frames.setdefault(frame.module, frame)
    readers = Readers(flow)
    findings: list[Diagnostic] = []
    grouped = {name for name, module in named_modules(model) if is_grouped_convolution(module)}
    computed = computed_by_layers(model, readers)
    modules = _with_parameters(binding, readers, frames, findings, partly, grouped, computed)
    findings += _unfollowed(model, binding, computed, grouped, partly)
    uses: dict[str, Use] = {}
    for name, bound in modules.items():
        if bound.form is not None and bound.style in (Style.COLWISE, Style.ROWWISE):
            found = _use(bound, bound.form, frames.get(name), readers)
            if found is not None:
                uses[name] = replace(found, reader=_reader(readers, name), unit=getattr(bound.form, "unit", 1))
    taken = [way for use in uses.values() if use.taken is not None for way in use.taken.ways]
    counts = {n for way in taken for n in (*way.heads, len(way.stretches)) if n}
    counts |= {(way.heads[0] or 1) * (n or 1) for way in taken if way.group is not None for n in way.group.heads}
    heads = frozenset(n for n in counts if n % size == 0)
    uneven = uneven_heads([*uses.values()], Axis(size, heads))
    features = shared_features(modules, uses, size)
    notes: dict[Body, Diagnostic | None] = {}
    single: list[Diagnostic] = []
    for name, use in uses.items():
        shared = of_body(use, uneven)
        held = _refined(modules[name], use, Axis(size, heads, shared))
        if isinstance(held, Bound) and held.style is modules[name].style:
            held = features.refined(held, use)
        if isinstance(held, Bound) and held.is_parameter and name in readers.named:
            held = _in_entries(held, use.features, readers.trace.values[readers.named[name]].shape, size)
        if isinstance(held, Diagnostic):
            findings.append(held)
            continue
        if held.style is not modules[name].style:
            single.append(_single_head(held, size))
        if use.body is not None and use.body not in notes and shared.queries in shared.parts:
            notes[use.body] = imbalance(held, use.body, shared, size)
        modules[name] = held
    for name, bound in modules.items():
        if bound.wrapper and not bound.is_parameter and name not in frames:
            modules[name] = _like_others(bound, [modules[n] for n in uses])
    for name, bound in modules.items():
        if not partly and isinstance(bound.form, LinearForm) and name not in frames and not bound.wrapper:
            alike = _called_alike(bound, [modules[n] for n in uses])
            modules[name] = bound if alike is None else alike
            findings += [] if alike is not None else [_no_product(bound)]
    if modules != binding.modules:
        binding, _ = bind_parameters(model, modules)
    made = frozenset(packs for b in modules.values() for packs in _made(b))
    by_parts = (Pack(n, parts=held) for in_body in uneven.values() for n, held in in_body.parts.items())
    numbers = frozenset((pack,) for pack in (*map(Pack, heads), *by_parts))
    told = [note for note in notes.values() if note is not None]
    return Packed(binding, once(findings), numbers, made, once([*single, *told]))


def _like_others(bound: Bound, used: Sequence[Bound]) -> Bound:
    """A layer in a wrapper that the call leaves out, placed like one that it calls there."""
    for other in used:
        if other.wrapper == bound.wrapper and isinstance(other.form, LinearForm):
            return replace(bound, packs=other.packs)
        if other.wrapper == bound.wrapper and other.style is Style.REPLICATE:  # a single head
            return replace(bound, style=Style.REPLICATE, form=None)
    return bound


def _called_alike(bound: Bound, used: Sequence[Bound]) -> Bound | None:
    """A layer that the call leaves out, such as an expert picked by number, placed like one that it calls."""
    for other in used:
        same = (other.rule.style, other.rule.packed) == (bound.rule.style, bound.rule.packed)
        named = other.name.rpartition(".")[2] == bound.name.rpartition(".")[2] and not other.is_parameter
        if same and named and other.form == bound.form:
            return replace(bound, packs=other.packs)
        if same and named and other.style is Style.REPLICATE:  # a single head
            return replace(bound, style=Style.REPLICATE, form=None)
    return None


def _made(bound: Bound) -> list[tuple[Pack, ...]]:
    """The features that a column makes: each stretch, and all together."""
    if bound.form is None or bound.style is not Style.COLWISE:
        return []
    packs = bound.packs or (Pack(bound.form.outputs),)
    return [packs, *((pack,) for pack in packs)]


def _with_parameters(
    binding: Binding,
    readers: Readers,
    frames: Mapping[str, Frame],
    findings: list[Diagnostic],
    partly: bool,
    grouped: Collection[str],
    computed: Mapping[str, Sequence[Computed]],
) -> dict[str, Bound]:
    """The binding's modules, and bare parameters with what is done with them."""
    parts = {name: held for tensors in computed.values() for held in tensors for name in held.parts}
    modules: dict[str, Bound] = {}
    for name, bound in binding.modules.items():
        own = [f"{name}.{leaf}" for leaf in ("weight", "bias")]
        read = [leaf for leaf in (*own, *sorted(names_among(computed.get(name, ())))) if leaf in readers.named]
        convolves = bound.form is None and bound.style in (Style.COLWISE, Style.ROWWISE) and not bound.is_parameter
        unread = bound.form is not None and name not in frames and not bound.wrapper
        unread = unread and (partly or any(_is_read(readers, readers.named[leaf]) for leaf in read))
        if read and (convolves or unread):
            modules |= {inner: replace(bound, name=inner, form=None, is_parameter=True) for inner in read}
            pins = bound.input is not None or bound.output is not None
            # What it says of the module's own boundary.
            if convolves and pins and bound.style is Style.COLWISE and name not in grouped:
                modules[name] = replace(bound, style=Style.REPLICATE)
            elif convolves and bound.output is not None and bound.style is Style.ROWWISE:
                modules[name] = replace(bound, style=Style.NONE, rule=replace(bound.rule, input=None))
        else:
            modules[name] = bound
    if partly:
        bare = [n for n, bound in modules.items() if bound.is_parameter and n not in parts]
        unread = {name for name in bare if not _is_read(readers, readers.named.get(name))}
        modules = {name: bound for name, bound in modules.items() if name not in unread}
    for name, bound in modules.items():
        if not bound.is_parameter or bound.style in (Style.REPLICATE, Style.VOCAB):
            continue  # that it is a table is for `lookers` to say
        if name in parts:
            form = parts[name].form_of(name, bound.style) or _own_product(readers, readers.named[name])
            modules[name] = replace(bound, form=form, style=Style.REPLICATE if form is None else bound.style)
            continue
        form = _find_use(readers, readers.named[name], bool(bound.wrapper)) if name in readers.named else None
        if form is None or (isinstance(form, Addend) and not form.is_added and bound.style is Style.ROWWISE):
            beside = _no_product(bound, readers, readers.named.get(name))
            split = "write `colwise`, which splits it with the features or heads that it stands beside, or "
            findings.append(beside if form is None else replace(beside, help=f"{split}{beside.help}"))
        modules[name] = replace(bound, form=form)
    return modules


def _unfollowed(
    model: nn.Module,
    binding: Binding,
    computed: Mapping[str, Sequence[Computed]],
    grouped: Collection[str],
    partly: bool,
) -> list[Diagnostic]:
    """TP112 for layers that compute a weight of which no part is split with it, or a bias that a sum needs once."""
    found: list[Diagnostic] = []
    for name, module in named_modules(model):
        bound, leaves = binding.modules.get(name), parametrized_tensors(module)
        weights = [t for t in computed.get(name, ()) if t.in_body and isinstance(t.use, Product)]
        if bound is not None and weights and not leaves and bound.rule.style in (Style.COLWISE, Style.ROWWISE):
            whole = next((tensor for tensor in weights if not tensor.is_split(bound.rule.style)), None)
            other = Style.ROWWISE if bound.rule.style is Style.COLWISE else Style.COLWISE
            if whole is not None:
                found.append(of_whole_parts(name, bound.rule, whole.parts, other if whole.is_split(other) else None))
        if not leaves or bound is None or bound.style not in (Style.COLWISE, Style.ROWWISE) or bound.is_parameter:
            continue
        held = computed.get(name, ())
        if partly and not held:
            continue
        rows = bound.style is Style.ROWWISE
        makes = name in grouped or any(isinstance(tensor.use, Product) for tensor in held) or "weight" not in leaves
        added = rows and any(isinstance(tensor.use, Addend) and tensor.use.is_added for tensor in held)
        if not makes or added or not all(tensor.is_split(bound.style) for tensor in held):
            found.append(not_followed(module, name, bound.rule))
    return found


def _find_use(readers: Readers, value: int, is_part: bool = False) -> Product | Addend | None:
    return find_buffer_use(readers, value, is_part) if value in readers.trace.buffers else find_use(readers, value)


def _own_product(readers: Readers, value: int) -> Product | None:
    """What a parameter is multiplied by, as it is stored, of what the call is passed."""
    use = _find_use(readers, value)
    return use if isinstance(use, Product) and use.given in readers.trace.given else None


def _is_read(readers: Readers, value: int | None) -> bool:
    return value is not None and next(readers.of(value), None) is not None


def _first_reader(readers: Readers, value: int) -> tuple[Frame, Operation, int] | None:
    """The first operation that reads a value, or a view of it, and makes something else."""
    for frame, node, held in readers.of(value):
        if node.is_a("reshape") and len(node.outputs) == 1 and node.outputs[0] is not None:
            found = _first_reader(readers, node.outputs[0])
            if found is not None:
                return found
        else:
            return frame, node, held
    return None


def _no_product(bound: Bound, readers: Readers | None = None, value: int | None = None) -> Diagnostic:
    """TP101 for a parameter that is no factor of a product; where a body reads it, with the operation that does."""
    read = None if readers is None or value is None else _first_reader(readers, value)
    if readers is not None and read is not None:
        frame, node, held = read
        others = [readers.trace.values[other] for other in node.inputs if other != held]
        given = any(other.identifier in readers.trace.given for other in others)
        scaled = node.is_a("times") and len(others) == 1 and math.prod(others[0].shape) == 1
        return Diagnostic(
            code="TP101",
            message=f"`{bound.style}` splits what a product makes or contracts, but {quoted(frame.module)} reads "
            f"`{bound.name}` by {node.name}{', with what the call is passed,' if given else ''} and what that makes is "
            "no factor of a product, and no sum's addend, that could be split with it",
            span=bound.rule.style_span,
            help="remove the rule, so that the parameter stays replicated"
            + ("; or scale the product's result by that number, instead of the parameter" if scaled else ""),
            notes=(f"in {quoted(frame.module)}, at {node.location}",) if node.location is not None else (),
            subject=bound.name,
        )
    return Diagnostic(
        code="TP101",
        message=f"`{bound.style}` splits what a product makes or contracts, but no body of the model multiplies by "
        f"`{bound.name}` or adds it",
        span=bound.rule.style_span,
        help="remove the rule, so that the parameter stays replicated",
        subject=bound.name,
    )


def _use(bound: Bound, form: LinearForm | Product | Addend, frame: Frame | None, readers: Readers) -> Use | None:
    columns = bound.style is Style.COLWISE
    if isinstance(form, Addend):
        outputs = sum(part.outputs for part in form.parts)
        taken = taken_apart(form.parts, readers)
        return Use(outputs, taken, _parts(form), beside=(None, outputs)) if columns else None
    features = form.outputs if columns else form.inputs
    if isinstance(form, Product):
        if columns:
            return Use(sum(part.outputs for part in form.parts), taken_apart(form.parts, readers), _parts(form))
        joined = readers.joined(form.given, form.given_dim)
        return Use(features, joined=joined, beside=readers.made_of_heads(form.given))
    if frame is None:
        return None
    if columns:
        taken = readers.taken_apart(frame.exits[0].target) if frame.exits else None
        beside = readers.beside_heads(frame.exits[0].target) if frame.exits and taken is None else None
        return Use(features, taken, beside=beside, named=bound.rule.packed is not None)
    given = frame.entries[0].source
    return Use(features, joined=readers.joined(given), beside=readers.made_of_heads(given))


def _parts(form: Product | Addend) -> tuple[int, ...]:
    """The stretches of a parameter that the body takes apart before it uses it."""
    return tuple(part.outputs for part in form.parts) if form.following else ()


def taken_apart(parts: Sequence[Product] | Sequence[Addend], readers: Readers) -> Taken | None:
    """How what a parameter makes is taken apart, if the parameter isn't already."""
    taken = [None if part.made is None else readers.taken_apart(part.made, part.made_dim) for part in parts]
    first = next((held for held in taken if held is not None), None)
    if len(parts) == 1 or first is None:
        return taken[0]
    stretches: list[int] = []
    heads: list[int | None] = []
    for part, held in zip(parts, taken, strict=True):
        whole = held is not None and sum(held.stretches) == part.outputs
        stretches += held.stretches if held is not None and whole else (part.outputs,)
        alone = None if part.made is None or held is not None else readers.heads_of(part.made, part.made_dim)
        heads += held.heads if held is not None and whole else (alone,)
    return replace(first, stretches=tuple(stretches), heads=tuple(heads))


def _refined(bound: Bound, use: Use, axis: Axis) -> Bound | Diagnostic:
    size, whole, taken = axis.size, use.features, use.taken
    sizes: Sequence[int] = (whole,)
    if bound.rule.packed is not None:
        taken = None if taken is None else _as_named(bound, taken)
        seen = taken.stretches if taken is not None else use.joined
        found = _sizes(bound, whole, seen)
        if isinstance(found, Diagnostic):
            return found
        sizes = found
    packs = [Pack(n) for n in sizes]
    if taken is None and use.beside is not None and use.beside[1] in axis.uneven.parts and len(packs) == 1:
        packs = [axis.shared(whole, use.beside[1])]
    if use.outer in axis.uneven.parts:
        packs = [axis.shared(whole, use.outer)]
    if taken is not None and taken.heads == tuple(sizes) and whole in axis.uneven.parts:
        packs = [axis.shared(whole, whole)]  # of a parameter that has heads for a dim of its own
    if taken is not None and taken.stretches == tuple(sizes):
        groups = taken.heads[0]
        if taken.group is not None and groups and groups < size:
            grouped = axis.grouped(groups, taken.group)
            return replace(bound, packs=tuple(grouped)) if grouped else _cut_groups(bound, groups, taken.group, size)
        packs = [axis.shared(n, heads) for n, heads in zip(sizes, heads_of(taken), strict=True)]
        for index, (held, heads) in enumerate(zip(packs, taken.heads, strict=True)):
            if heads is not None and not held.is_even(size) and not held.parts:
                return _cut_heads(bound, index, held, heads, axis)
    few = next((index for index, held in enumerate(packs) if held.replicas == 1 and held.size < size), None)
    if few is not None:
        return _too_few(bound, few, packs[few], size)
    if len(packs) == 1 and 1 < size == packs[0].replicas:
        return replace(bound, style=Style.REPLICATE, form=None)
    several = len(packs) > 1 or packs[0].replicas > 1 or packs[0].parts
    return replace(bound, packs=tuple(packs)) if several else bound


def _reader(readers: Readers, name: str) -> Body | None:
    """The call whose body reads a parameter first; None for a module's name."""
    frame = next((f for f, _, _ in readers.of(readers.named[name])), None) if name in readers.named else None
    return None if frame is None else (frame.module, frame.call)


def _in_entries(bound: Bound, features: int, shape: tuple[int, ...], size: int) -> Bound | Diagnostic:
    """The packs in entries of the tensor, of which each may stand for a group of features, or for a part of one."""
    layout = bound.layout_of("")
    if layout is None or layout.dim is None or shape[layout.dim] == features:
        return bound
    entries, packs = shape[layout.dim], bound.packs or (Pack(features),)
    scaled = [pack.scaled(entries, features) for pack in packs]
    for pack, held in zip(packs, scaled, strict=True):
        cut = [[n * entries for n in pack.part(size, rank)] for rank in range(size)]
        if held is None or any([n * features for n in held.part(size, r)] != cut[r] for r in range(size)):
            return _cut_entries(bound, features, entries, size)
    return replace(bound, packs=tuple(pack for pack in scaled if pack is not None)) if bound.packs else bound


def _cut_entries(bound: Bound, features: int, entries: int, size: int) -> Diagnostic:
    """TP102 for groups of features that are quantised, or packed, together, and that the axis would cut."""
    counted = "outputs" if bound.style is Style.COLWISE else "inputs"
    each = f"groups of {features // entries} {counted}"
    groups = each if features % entries == 0 else f"{entries} groups of {features} {counted}"
    return Diagnostic(
        code="TP102",
        message=f"`{bound.name}` can't be split: its entries stand for {groups}; {-(-features // size)} a rank, on "
        f"{size} ranks, would cut groups",
        span=bound.rule.style_span,
        label=f"{groups}; {-(-features // size)} a rank",
        help=f"{fitting_ranks(entries, size)}, quantise in smaller groups, or remove the rule",
        subject=bound.name,
    )


def _as_named(bound: Bound, taken: Taken) -> Taken:
    """Of the ways in which features are taken apart the one that has the packs that the plan names."""
    named = bound.rule.packed or ()
    sizes = tuple(pack.size for pack in named)
    fitting = [way for way in taken.ways if len(way.stretches) == len(named)]
    exact = [way for way in fitting if None in sizes or way.stretches == sizes]
    return next(iter((*exact, *fitting, taken)))


def _seen(whole: int, seen: Sequence[int]) -> str:
    if len(seen) == 1:
        return f"uses its {whole} features as one"
    return f"takes its {whole} features apart as {' + '.join(map(str, seen))}" if seen else "doesn't show which"


_SIZES = "give their sizes: `packed: {a: 64, b: 32}`"


def _sizes(bound: Bound, whole: int, seen: Sequence[int]) -> tuple[int, ...] | Diagnostic:
    named = bound.rule.packed or ()
    given = tuple(p.size for p in named)
    span, subject = bound.rule.span_of("packed"), bound.name
    if all(n is not None for n in given):
        sizes = tuple(n for n in given if n is not None)
        if sum(sizes) == whole:
            return sizes
        return Diagnostic(
            code="TP106",
            message=f"`{bound.name}` has {whole} features, but its packs have {sum(sizes)} "
            f"({' + '.join(map(str, sizes))})",
            span=span,
            help=_way_out(seen) if sum(seen) == whole else "give sizes that add up to the features",
            subject=subject,
        )
    if len(seen) == len(named) and sum(seen) == whole:
        return tuple(seen)
    return Diagnostic(
        code="TP106",
        message=f"`{bound.name}` packs {len(named)} projections by the plan, but the model " + _seen(whole, seen),
        span=span,
        help=_way_out(seen) if len(seen) > 1 else _SIZES if not seen else "remove `packed`: nothing takes them apart",
        subject=subject,
    )


def packed_option(sizes: Sequence[int]) -> str:
    """What to write in a plan for packs of these sizes."""
    names = {2: ("gate", "up"), 3: ("q", "k", "v")}.get(len(sizes), tuple(f"part{i}" for i in range(len(sizes))))
    if len(set(sizes)) == 1:
        return f"packed: [{', '.join(names)}]"
    return f"packed: {{{', '.join(f'{name}: {n}' for name, n in zip(names, sizes, strict=True))}}}"


def _way_out(sizes: Sequence[int]) -> str:
    return f"write `{packed_option(sizes)}`"


def _cut_heads(bound: Bound, index: int, held: Pack, heads: int, axis: Axis) -> Diagnostic:
    """TP103 for heads that the axis would cut."""
    views = f"its {held.size} features are viewed as {heads} heads"
    found = _cut(bound, index, views, f"{heads} heads", heads, axis.size)
    if not axis.uneven.queries:
        return found
    return replace(found, help=f"use an axis of at most {axis.uneven.queries} ranks, or remove the rule")


def _cut_groups(bound: Bound, groups: int, group: Taken, size: int) -> Diagnostic:
    """TP103 for groups, fewer than the ranks, whose heads can't be shared out among those that a group gets."""
    each = " + ".join(str(n or 1) for n in heads_of(group))
    features = groups * sum(group.stretches)
    views = f"its {features} features are viewed as {groups} groups of {each} heads"
    return _cut(bound, 0, views, f"{groups} groups", groups, size)


def _cut(bound: Bound, index: int, views: str, counted: str, count: int, size: int) -> Diagnostic:
    return Diagnostic(
        code="TP103",
        message=f"{_what(bound, index)} can't be split: {views}, {cannot_share(count, size)}",
        span=bound.rule.span_of("packed"),
        label=f"{counted} / {size} ranks",
        help=f"{fitting_ranks(count, size)}, or remove the rule",
        subject=bound.name,
    )


def _single_head(bound: Bound, size: int) -> Diagnostic:
    """TP126 for a column that is replicated."""
    return Diagnostic(
        code="TP126",
        message=f"`{bound.name}` produces a single head, which all {size} ranks need: it stays whole on every rank",
        span=bound.rule.style_span,
        label="replicated",
        help="nothing is wrong; write `replicate` to make it explicit",
        subject=bound.name,
    )


def _too_few(bound: Bound, index: int, held: Pack, size: int) -> Diagnostic:
    """TP102 for fewer features than ranks."""
    return Diagnostic(
        code="TP102",
        message=f"{_what(bound, index)} can't be split: it has {held.size} features for {size} ranks",
        span=bound.rule.span_of("packed"),
        label="fewer than the ranks",
        help="remove the rule, so that it stays whole",
        subject=bound.name,
    )


def _what(bound: Bound, index: int) -> str:
    named = bound.rule.packed
    return f"`{bound.name}`" if named is None else f"pack `{named[index].name}` of `{bound.name}`"


__all__ = ["Packed", "pack", "packed_option", "taken_apart"]
