"""Warn: what is right but costs more than the plan's author may think, or shows that the plan means something else.

in:  a placed program
out: TP104 for a colwise result that is gathered, TP105 for a rowwise input that is sliced; and where the body that
     reads a gathered result shows why: TP106 if it takes a packed projection apart, TP103 if the axis cuts a head;
     TP147 for a body that exchanges a value between its operations.
     What to do about the first two is read off the data flow, see `neighbours`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from tpplan.compiler.bind.bind import Binding, Bound
from tpplan.compiler.bind.computed_weights import layer_of
from tpplan.compiler.bind.packing import packed_option
from tpplan.compiler.bind.readers import Readers, Taken
from tpplan.compiler.explain.neighbours import Neighbours, Reach
from tpplan.compiler.explain.origins import Origins
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.heads import cannot_share, fitting_ranks
from tpplan.compiler.ir.layout import PARTIAL, Features, reshard_between
from tpplan.compiler.ir.trace import Frame, Trace, quoted
from tpplan.compiler.place.assign import Assignment, FrameAssignment, PlacedMove, PlacedReshard
from tpplan.compiler.trace.gradient_flow import answered
from tpplan.cost.communication import bytes_sent
from tpplan.plan import Diagnostic, Style
from tpplan.plan.wording import all_of

_OTHERWISE = "or write `output: replicate` if you want the gather"


def warnings_for(
    flow: DataFlow, binding: Binding, assignment: Assignment, size: int, around: Callable[[], Neighbours]
) -> list[Diagnostic]:
    """Findings on reshards that a plan seldom means, one for each rule; `around` is asked for if there are any."""
    trace, origins, readers = flow.trace, Origins(flow, binding), Readers(flow)
    gathered: dict[int, list[tuple[Bound, PlacedReshard]]] = defaultdict(list)
    sliced: dict[int, list[tuple[Bound, Frame]]] = defaultdict(list)
    for decided in assignment.frames:
        bound = binding.modules.get(decided.frame.module)
        for reshard in (*decided.entries, *decided.exits):
            whose = _gathers_columns(reshard, trace, assignment, origins)
            if whose is not None:
                gathered[id(whose.rule)].append((whose, reshard))
        unasked = bound is not None and bound.style is Style.ROWWISE and bound.rule.input is None
        if bound is not None and unasked and _slices_rows(decided):
            sliced[id(bound.rule)].append((bound, decided.frame))
    if not gathered and not sliced:
        return []
    seen = _Seen(binding, origins, readers, around())
    found = [_gathered(held, seen, trace, size) for held in gathered.values()]
    return found + [_sliced(held, seen) for held in sliced.values()]


def exchanges(trace: Trace, binding: Binding, assignment: Assignment, size: int) -> list[Diagnostic]:
    """Findings on bodies that exchange values between their operations; one for all that do the same by one rule."""
    found: dict[object, dict[str, Diagnostic]] = defaultdict(dict)
    back = answered(trace) if any(decided.moves for decided in assignment.frames) else frozenset[int]()
    for decided in assignment.frames:
        moves = [(move, _sent(move, trace, size, back)) for move in decided.moves if not move.again]
        moves = [(move, sent) for move, sent in moves if sent]
        name = decided.frame.module
        if not moves:
            continue
        owners = (bound for parameter, bound in binding.owners.items() if parameter.startswith(f"{name}."))
        bound = binding.first_inside(name) or next(owners, None) or binding.first_inside(layer_of(name) or name)
        span = bound.rule.style_span if bound is not None else None
        places = ", and ".join(dict.fromkeys(_exchange(move) for move, _ in moves))
        found[span, places].setdefault(
            name,
            Diagnostic(
                code="TP147",
                message=f"`{name}` exchanges values between its operations: {places}",
                span=span,
                label=f"each rank sends {sum(sent for _, sent in moves):,} bytes a step",
                help=f"nothing is wrong; if the split isn't worth that, remove the rules for what `{name}` reads there",
                subject=name,
            ),
        )
    merged: list[Diagnostic] = []
    for first, *rest in (held.values() for held in found.values()):
        merged.append(replace(first, notes=_same_for(len(rest))))
    return merged


def _sent(move: PlacedMove, trace: Trace, size: int, back: Collection[int]) -> int:
    """Bytes that each rank sends for a move, forward and backward, where its gradient is among those that come back."""
    ways, value = reshard_between(move.source, move.target), move.moved(trace)
    assert ways is not None
    answered = move.backward is None and move.value in back
    return sum(
        bytes_sent(way, value.bytes * (size if move.source.is_extreme else 1), size)
        for way in (ways.forward, *([ways.backward] if answered else []))
        if way.communicates
    )


def _exchange(move: PlacedMove) -> str:
    """What is exchanged, in words."""
    location = move.operation.location
    where = f" at {location.short}" if location is not None else ""
    if move.source.is_replicated:
        return f"the gradient of what `{move.operation.name}` reads{where} is summed"
    how = "compared" if move.source.is_extreme else "summed" if move.source == PARTIAL else "gathered"
    return f"what `{move.operation.name}` reads{where} is {how}"


@dataclass(frozen=True, slots=True)
class _Seen:
    """What findings are explained by."""

    binding: Binding
    origins: Origins
    readers: Readers
    around: Neighbours

    def without(self, style: Style, names: Sequence[str]) -> list[str]:
        """Those of the modules that the plan doesn't give the style."""
        held = ((name, self.binding.modules.get(name)) for name in names)
        return [name for name, bound in held if bound is None or bound.style is not style]


def gathered_columns(
    flow: DataFlow, binding: Binding, assignment: Assignment, heads: Features = frozenset()
) -> frozenset[str]:
    """The modules at whose boundaries a column-wise result is gathered though the plan doesn't ask for it.

    With `heads`, also once it is viewed as so many heads, as where a norm of each head stands.
    """
    counts = {pack.size for (pack,) in heads}
    origins = Origins(flow, binding)
    placed = ((decided, r) for decided in assignment.frames for r in (*decided.entries, *decided.exits))
    return frozenset(
        decided.frame.module
        for decided, reshard in placed
        if _gathers_columns(reshard, flow.trace, assignment, origins, counts) is not None
    )


def _gathers_columns(
    reshard: PlacedReshard, trace: Trace, assignment: Assignment, origins: Origins, heads: Collection[int] = ()
) -> Bound | None:
    shape, dim = trace.values[reshard.value].shape, reshard.source.dim
    by_features = dim == len(shape) - 1 or (dim is not None and shape[dim] in heads)
    if not shape or not by_features or reshard.target == reshard.source:
        return None
    if reshard.target.is_sharded and reshard.target.dim == reshard.source.dim:
        return None
    bound = origins.rule_behind(reshard.value, assignment.layouts)
    if bound is None or bound.style is not Style.COLWISE or bound.rule.output is not None:
        return None
    return bound


def _slices_rows(decided: FrameAssignment) -> bool:
    return any(r.source.is_replicated and r.target.is_sharded for r in decided.entries)


def _gathered(held: list[tuple[Bound, PlacedReshard]], seen: _Seen, trace: Trace, size: int) -> Diagnostic:
    more = _same_for(len(held) - 1)
    for bound, reshard in held:
        taken = seen.readers.taken_apart(reshard.value)
        if taken is None or bound.packs:
            continue
        where = f"in {quoted(taken.frame.module)}, at {taken.operation.location}"
        if len(taken.stretches) > 1:
            return _packed(bound, taken, trace.values[reshard.value].shape[-1], (where, *more))
        if (taken.heads[0] or 0) % size:
            return _heads(bound, taken, size, (where, *more))
    (bound, reshard), *_ = held
    sent = bytes_sent("all-gather", trace.values[reshard.value].bytes, size)
    reach = seen.around.reached(seen.origins.crossed_from(reshard.value), reshard.source)
    why, way_out = _why_gathered(reach, seen)
    return Diagnostic(
        code="TP104",
        message=f"the result of `{bound.name}` is gathered, as {why}",
        span=bound.rule.style_span,
        label=f"each rank sends {sent:,} bytes a call",
        help=way_out,
        notes=(*((f"{reach.stop}",) if reach.stop is not None else ()), *more),
        subject=bound.name,
    )


def _why_gathered(reach: Reach, seen: _Seen) -> tuple[str, str]:
    """Why a result is gathered, and what to do about it."""
    missing, rows = seen.without(Style.COLWISE, reach.missing), seen.without(Style.ROWWISE, reach.rows)
    if reach.goes_on and missing:
        also = f", and {all_of(rows)} `rowwise`" if rows else ""
        why = f"it meets the whole {'result' if len(missing) == 1 else 'results'} of {all_of(missing)}"
        return why, f"make {all_of(missing)} `colwise` as well{also}; {_OTHERWISE}"
    if reach.goes_on and rows:
        verb = "reads it and isn't" if len(rows) == 1 else "read it and aren't"
        return f"{all_of(rows)} {verb} `rowwise`", f"make {all_of(rows)} `rowwise`; {_OTHERWISE}"
    if reach.leaves and not reach.rows and reach.stop is None:
        return "it leaves the model", f"{_OTHERWISE.removeprefix('or ')}, `output: shard` to hand out the shards"
    return (
        "nothing that reads it can work on columns",
        f"remove the rule, so that it stays whole; {_OTHERWISE}, `output: shard` to hand out the shards",
    )


def _same_for(others: int) -> tuple[str, ...]:
    return (f"the same holds for {others} more",) if others else ()


def _packed(bound: Bound, taken: Taken, whole: int, notes: tuple[str, ...]) -> Diagnostic:
    sizes = taken.stretches
    return Diagnostic(
        code="TP106",
        message=f"`{bound.name}` packs {len(sizes)} projections ({' + '.join(map(str, sizes))} of {whole} features), "
        f"which {quoted(taken.frame.module)} takes apart; a plain split cuts across them",
        span=bound.rule.style_span,
        label="splits the packed features as if they were one projection",
        help=f"write `{{style: colwise, {packed_option(sizes)}}}` to split each by itself, or `output: replicate` to "
        "gather the result before it is taken apart",
        notes=notes,
        subject=bound.name,
    )


def _heads(bound: Bound, taken: Taken, size: int, notes: tuple[str, ...]) -> Diagnostic:
    heads, module = taken.heads[0] or 0, quoted(taken.frame.module)
    return Diagnostic(
        code="TP103",
        message=f"{module} views the result of `{bound.name}` as {heads} heads, {cannot_share(heads, size)}",
        span=bound.rule.style_span,
        label=f"{heads} heads / {size} ranks",
        help=f"{fitting_ranks(heads, size)}, or remove the rules for the modules of {module}, so that it is replicated",
        notes=notes,
        subject=bound.name,
    )


def _sliced(held: list[tuple[Bound, Frame]], seen: _Seen) -> Diagnostic:
    (bound, frame), *_ = held
    makers = seen.around.made_by(frame)
    whole = seen.without(Style.COLWISE, makers)
    before = f"{all_of(whole)}, whose {'result' if len(whole) == 1 else 'results'} it reads," if whole else ""
    return Diagnostic(
        code="TP105",
        message=f"the input of `{bound.name}` is replicated, and each rank takes its slice",
        span=bound.rule.style_span,
        label="fed by something that isn't sharded",
        help=(
            f"make {before} `colwise`, so that the work is split too; or write `input: shard` if you want the slice"
            if whole
            else "remove the rule, so that it stays whole; or write `input: shard` if you want the slice"
        ),
        notes=_same_for(len(held) - 1),
        subject=bound.name,
    )
