"""Ineffective: rules of the plan of which nothing shows in what was decided.

in:  the plan's rules as they were bound, and what came of them
out: TP149 for a module or parameter of which a rule splits nothing

    up: colwise   F.linear(x, cat((a, b)) * k)   ->   TP149: `up.a`, `up.b` and `up.k` stay whole on every rank

A rule is heeded if a tensor under its name is split, or if a note says why there is nothing to split: a single head
(TP126), experts that lie on one rank each (TP148). A layer that the call leaves out may stay whole where its pattern's
others are split, and `sequence` waits for a call that has its module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from tpplan.compiler.bind.bind import Binding, Bound, once, stored_tensors
from tpplan.compiler.ir.layout import REPLICATED
from tpplan.compiler.ir.trace import Frame, Operation, Trace
from tpplan.compiler.place.assign import Assignment
from tpplan.plan import Diagnostic, Style
from tpplan.plan.wording import all_of

_SPLITTING = (Style.COLWISE, Style.ROWWISE, Style.VOCAB, Style.EXPERTS)
_TOLD = ("TP126", "TP148")
_LISTED = 4


def ineffective_rules(
    model: nn.Module,
    ruled: Mapping[str, Bound],
    binding: Binding,
    trace: Trace,
    assignment: Assignment,
    notes: Sequence[Diagnostic],
) -> list[Diagnostic]:
    """The findings.

    Args:
        model: the stock model.
        ruled: the plan's rules by module or parameter, before anything was made of them.
        binding: what was made of them.
        trace, assignment: the call, and how its values lie.
        notes: what was said of rules on the way.
    """
    frames: dict[str, list[Frame]] = {}
    for frame in trace.recorded.walk():
        frames.setdefault(frame.module, []).append(frame)
    told = [note for note in notes if note.code in _TOLD]
    stored = [name for name, _ in stored_tensors(model)]
    split = [name for name in stored if binding.parameters[name] != REPLICATED]
    heeded, without = set[object](), list[Bound]()
    for bound in ruled.values():
        if bound.style in _SPLITTING:
            shown = any(_holds(bound.name, name) for name in split)
        elif bound.style is Style.SEQUENCE and bound.name in frames:
            shown = any(_is_split(frame, assignment) for frame in frames[bound.name])
        else:
            continue
        if shown:
            heeded.add(bound.rule.pattern)
        elif not any(_speaks_of(note, bound) for note in told):
            without.append(bound)
    return once([
        _finding(bound, stored, trace)
        for bound in without
        if bound.is_parameter or bound.name in frames or bound.rule.pattern not in heeded
    ])  # fmt: skip


def _holds(name: str, inner: str) -> bool:
    return inner == name or inner.startswith(f"{name}.")


def _speaks_of(note: Diagnostic, bound: Bound) -> bool:
    """Whether a note is of this rule, or of experts that its module is in."""
    if note.span is not None and note.span == bound.rule.style_span:
        return True
    return note.subject is not None and (_holds(note.subject, bound.name) or _holds(bound.name, note.subject))


def _is_split(frame: Frame, assignment: Assignment) -> bool:
    crossings = (*frame.entries, *frame.exits)
    held = (assignment.layouts.get(value) for c in crossings for value in (c.source, c.target))
    return any(layout is not None and layout != REPLICATED for layout in held)


def _finding(bound: Bound, stored: Sequence[str], trace: Trace) -> Diagnostic:
    whole = [name for name in stored if _holds(bound.name, name)]
    way_out = f"remove the rule, so that `{bound.name}` stays whole"
    places: list[str] = []
    if bound.style is Style.SEQUENCE:
        reason = "nothing that it is passed, or returns, is split along a sequence"
    elif not whole:
        reason = "it has no parameters to split"
    else:
        more = f", and {len(whole) - _LISTED} more," if len(whole) > _LISTED else ""
        reason = f"{all_of(whole[:_LISTED])}{more} {'stay' if whole[1:] else 'stays'} whole on every rank"
        way_out += "; or compute with its parameters so that a dim of theirs counts the features that are split"
        places = [f"{node.name} in `{frame.module}`, at {node.location}" for frame, node in _reading(whole, trace)]
    return Diagnostic(
        code="TP149",
        message=f"`{bound.style}` has no effect on `{bound.name}`: {reason}",
        span=bound.rule.style_span,
        label="no effect",
        help=way_out,
        notes=tuple(f"they are read by {place}" for place in places[:1]),
        subject=bound.name,
    )


def _reading(names: Sequence[str], trace: Trace) -> Iterator[tuple[Frame, Operation]]:
    """The operations that read stored tensors of these names."""
    values = {value for value, held in trace.stored.items() if not {*held}.isdisjoint(names)}
    for frame in trace.recorded.walk():
        for node in frame.body:
            if isinstance(node, Operation) and node.location is not None and not values.isdisjoint(node.inputs):
                yield frame, node


__all__ = ["ineffective_rules"]
