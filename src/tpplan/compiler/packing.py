"""Packing: which stretches of a split linear layer's features are shared out by themselves, and over how many ranks.

in:  a trace and the bound plan
out: the binding, its modules with their packs; findings for packs that don't fit

    {style: colwise, packed: [q, k, v]}, the result split as 32|16|16   ->  packs 32|16|16
    k_proj: colwise, its result viewed as 2 heads, on 4 ranks           ->  one pack with 2 replicas
    k_proj: colwise, its result viewed as 1 head                        ->  replicate
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from tpplan.compiler.bind import Binding, Bound, bind_parameters, once
from tpplan.compiler.layout import Pack
from tpplan.compiler.linear import LinearForm
from tpplan.compiler.readers import Readers, Taken
from tpplan.compiler.trace import Frame, Trace
from tpplan.plan import Diagnostic, Style


@dataclass(frozen=True, slots=True)
class Packed:
    """What the pass makes.

    Attributes:
        binding: with the modules' packs.
        findings: packs that don't fit.
        heads: the numbers of heads into which sharded features are viewed, as far as the axis divides them.
    """

    binding: Binding
    findings: list[Diagnostic]
    heads: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Axis:
    """The number of ranks, and the numbers of heads that they can share out evenly."""

    size: int
    heads: frozenset[int]

    def shared(self, count: int, heads: int | None) -> Pack:
        """A stretch of so many heads: key and value heads fewer than the ranks are held by several ranks each."""
        if heads is None or heads >= self.size or self.size % heads:
            return Pack(count)
        queries = any(number % heads == 0 for number in self.heads)
        return Pack(count, self.size // heads) if queries else Pack(count)


def pack(model: nn.Module, trace: Trace, binding: Binding, size: int) -> Packed:
    """Find the packs of every `colwise` and `rowwise` module."""
    frames: dict[str, Frame] = {}
    for frame in trace.root.walk():
        frames.setdefault(frame.module, frame)
    readers = Readers(trace)
    findings: list[Diagnostic] = []
    modules = dict(binding.modules)
    taken = {
        name: readers.taken_apart(frames[name].exits[0].target)
        for name, bound in modules.items()
        if bound.style is Style.COLWISE and name in frames and frames[name].exits
    }
    counts = {n for t in taken.values() if t is not None for n in (*t.heads, len(t.stretches)) if n is not None}
    heads = frozenset(n for n in counts if n % size == 0)
    for name, bound in binding.modules.items():
        if bound.form is None or name not in frames or bound.style not in (Style.COLWISE, Style.ROWWISE):
            continue
        held = _refined(bound, bound.form, frames[name], taken.get(name), readers, _Axis(size, heads))
        if isinstance(held, Diagnostic):
            findings.append(held)
        else:
            modules[name] = held
    if modules != binding.modules:
        binding, _ = bind_parameters(model, modules)
    return Packed(binding, once(findings), heads)


def _refined(
    bound: Bound, form: LinearForm, frame: Frame, taken: Taken | None, readers: Readers, axis: _Axis
) -> Bound | Diagnostic:
    size = axis.size
    columns = bound.style is Style.COLWISE
    whole = form.outputs if columns else form.inputs
    sizes: Sequence[int] = (whole,)
    if bound.rule.packed is not None:
        seen = taken.stretches if taken is not None else readers.joined(frame.entries[0].source)
        found = _sizes(bound, whole, () if columns and taken is None else seen)
        if isinstance(found, Diagnostic):
            return found
        sizes = found
    packs = [Pack(n) for n in sizes]
    if taken is not None and taken.stretches == tuple(sizes):
        # Beside parts that are viewed as heads, one that isn't is a single head.
        single = 1 if any(taken.heads) else None
        packs = [axis.shared(n, heads or single) for n, heads in zip(sizes, taken.heads, strict=True)]
        for index, (held, heads) in enumerate(zip(packs, taken.heads, strict=True)):
            if heads is not None and not held.is_even(size):
                return _cut_heads(bound, index, held, heads, size)
    few = next((index for index, held in enumerate(packs) if held.replicas == 1 and held.size < size), None)
    if few is not None:
        return _too_few(bound, few, packs[few], size)
    if len(packs) == 1 and packs[0].replicas == size:
        return replace(bound, style=Style.REPLICATE, form=None)
    return replace(bound, packs=tuple(packs)) if len(packs) > 1 or packs[0].replicas > 1 else bound


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
        message=f"`{bound.name}` packs {len(named)} projections by the plan, but the model "
        + (f"takes its {whole} features apart as {' + '.join(map(str, seen))}" if seen else "doesn't show which"),
        span=span,
        help=_way_out(seen) if len(seen) > 1 else "give their sizes: `packed: {a: 64, b: 32}`",
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


def _cut_heads(bound: Bound, index: int, held: Pack, heads: int, size: int) -> Diagnostic:
    """TP102 for heads that the axis would cut."""
    return Diagnostic(
        code="TP102",
        message=f"{_what(bound, index)} can't be split: its {held.size} features are viewed as {heads} heads, which "
        f"{size} ranks can't share evenly",
        span=bound.rule.span_of("packed"),
        label=f"{heads} heads / {size} ranks",
        help=f"use a size of the axis that divides {heads} ({_divisors(heads)}), or remove the rule",
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


def _divisors(count: int) -> str:
    found = [str(n) for n in range(2, 65) if count % n == 0]
    return ", ".join(found[:6]) if found else "none up to 64 does"


__all__ = ["Packed", "pack", "packed_option"]
