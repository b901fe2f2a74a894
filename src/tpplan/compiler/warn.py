"""Warn: what is right but costs more than the plan's author may think, or shows that the plan means something else.

in:  a placed program
out: TP104 for a colwise result that is gathered, TP105 for a rowwise input that is sliced; and where the body that
     reads a gathered result shows why: TP106 if it takes a packed projection apart, TP103 if the axis cuts a head
"""

from __future__ import annotations

from collections import defaultdict

from tpplan.compiler.assign import Assignment, FrameAssignment, PlacedReshard
from tpplan.compiler.bind import Binding, Bound
from tpplan.compiler.dataflow import DataFlow
from tpplan.compiler.origins import Origins
from tpplan.compiler.packing import packed_option
from tpplan.compiler.readers import Readers, Taken
from tpplan.compiler.trace import Trace, quoted
from tpplan.cost.communication import bytes_sent
from tpplan.plan import Diagnostic, Style


def warnings_for(flow: DataFlow, binding: Binding, assignment: Assignment, size: int) -> list[Diagnostic]:
    """Findings on reshards that a plan seldom means, one for each rule."""
    trace, origins, readers = flow.trace, Origins(flow, binding), Readers(flow)
    gathered: dict[int, list[tuple[Bound, PlacedReshard]]] = defaultdict(list)
    sliced: dict[int, list[Bound]] = defaultdict(list)
    for decided in assignment.frames:
        bound = binding.modules.get(decided.frame.module)
        for reshard in (*decided.entries, *decided.exits):
            whose = _gathers_columns(reshard, trace, assignment, origins)
            if whose is not None:
                gathered[id(whose.rule)].append((whose, reshard))
        unasked = bound is not None and bound.style is Style.ROWWISE and bound.rule.input is None
        if bound is not None and unasked and _slices_rows(decided):
            sliced[id(bound.rule)].append(bound)
    found = [_gathered(held, readers, trace, size) for held in gathered.values()]
    return found + [_sliced(held) for held in sliced.values()]


def gathers_columns(flow: DataFlow, binding: Binding, assignment: Assignment) -> bool:
    """Whether a column-wise result is gathered though the plan doesn't ask for it."""
    origins = Origins(flow, binding)
    placed = (r for decided in assignment.frames for r in (*decided.entries, *decided.exits))
    return any(_gathers_columns(reshard, flow.trace, assignment, origins) is not None for reshard in placed)


def _gathers_columns(reshard: PlacedReshard, trace: Trace, assignment: Assignment, origins: Origins) -> Bound | None:
    shape = trace.values[reshard.value].shape
    if not shape or reshard.source.dim != len(shape) - 1 or reshard.target == reshard.source:
        return None
    if reshard.target.is_sharded and reshard.target.dim == reshard.source.dim:
        return None
    bound = origins.rule_behind(reshard.value, assignment.layouts)
    if bound is None or bound.style is not Style.COLWISE or bound.rule.output is not None:
        return None
    return bound


def _slices_rows(decided: FrameAssignment) -> bool:
    return any(r.source.is_replicated and r.target.is_sharded for r in decided.entries)


def _gathered(held: list[tuple[Bound, PlacedReshard]], readers: Readers, trace: Trace, size: int) -> Diagnostic:
    more = (f"the same holds for {len(held) - 1} more",) if len(held) > 1 else ()
    for bound, reshard in held:
        taken = readers.taken_apart(reshard.value)
        if taken is None or bound.packs:
            continue
        where = f"in {quoted(taken.frame.module)}, at {taken.operation.location}"
        if len(taken.stretches) > 1:
            return _packed(bound, taken, trace.values[reshard.value].shape[-1], (where, *more))
        if (taken.heads[0] or 0) % size:
            return _heads(bound, taken, size, (where, *more))
    (bound, reshard), *_ = held
    sent = bytes_sent("all-gather", trace.values[reshard.value].bytes, size)
    return Diagnostic(
        code="TP104",
        message=f"the result of `{bound.name}` is gathered, as nothing that reads it can work on columns",
        span=bound.rule.style_span,
        label=f"each rank sends {sent:,} bytes a call",
        help="make the linear layer that reads it `rowwise`; or write `output: replicate` if the gather is meant, "
        "`output: shard` to hand out the shards",
        notes=more,
        subject=bound.name,
    )


def _packed(bound: Bound, taken: Taken, whole: int, notes: tuple[str, ...]) -> Diagnostic:
    sizes = taken.stretches
    return Diagnostic(
        code="TP106",
        message=f"`{bound.name}` packs {len(sizes)} projections ({' + '.join(map(str, sizes))} of {whole} features), "
        f"which {quoted(taken.frame.module)} takes apart; a plain split gives ranks pieces that cut across them",
        span=bound.rule.style_span,
        label="splits the packed features as if they were one projection",
        help=f"write `{{style: colwise, {packed_option(sizes)}}}` to split each by itself, or `output: replicate` to "
        "gather the result before it is taken apart",
        notes=notes,
        subject=bound.name,
    )


def _heads(bound: Bound, taken: Taken, size: int, notes: tuple[str, ...]) -> Diagnostic:
    heads, module = taken.heads[0], quoted(taken.frame.module)
    return Diagnostic(
        code="TP103",
        message=f"{module} views the result of `{bound.name}` as {heads} heads, which {size} ranks can't share evenly",
        span=bound.rule.style_span,
        label=f"{heads} heads / {size} ranks",
        help=f"use a size of the axis that divides {heads}, or remove the rules for the modules of "
        f"{module}, so that it is replicated",
        notes=notes,
        subject=bound.name,
    )


def _sliced(held: list[Bound]) -> Diagnostic:
    return Diagnostic(
        code="TP105",
        message=f"the input of `{held[0].name}` is replicated, and each rank takes its slice",
        span=held[0].rule.style_span,
        label="fed by something that isn't sharded",
        help="make the linear layer before it `colwise`, so that its work is split too; or write `input: shard` if the "
        "slice is meant",
        notes=(f"the same holds for {len(held) - 1} more",) if len(held) > 1 else (),
        subject=held[0].name,
    )
