"""Warn: what is right but costs more than the plan's author may think.

in:  a placed program
out: warnings: a colwise result that is gathered, a rowwise input that is sliced
"""

from __future__ import annotations

from tpplan.compiler.assign import Assignment, FrameAssignment, PlacedReshard
from tpplan.compiler.bind import Binding, Bound
from tpplan.compiler.origins import Origins
from tpplan.compiler.trace import Trace
from tpplan.cost.communication import bytes_sent
from tpplan.plan import Diagnostic, Style


def warnings_for(trace: Trace, binding: Binding, assignment: Assignment, size: int) -> list[Diagnostic]:
    """Findings on reshards that a plan seldom means, one for each rule."""
    origins = Origins(trace, binding)
    gathered: dict[int, list[tuple[Bound, int]]] = {}
    sliced: dict[int, list[Bound]] = {}
    for decided in assignment.frames:
        bound = binding.modules.get(decided.frame.module)
        for reshard in (*decided.entries, *decided.exits):
            whose = _gathers_columns(reshard, trace, assignment, origins)
            if whose is not None:
                sent = bytes_sent("all-gather", trace.values[reshard.value].bytes, size)
                gathered.setdefault(id(whose.rule), []).append((whose, sent))
        if bound is not None and bound.style is Style.ROWWISE and _slices_rows(decided):
            sliced.setdefault(id(bound.rule), []).append(bound)
    found = [_gathered(held) for held in gathered.values()]
    return found + [_sliced(held) for held in sliced.values()]


def _gathers_columns(reshard: PlacedReshard, trace: Trace, assignment: Assignment, origins: Origins) -> Bound | None:
    shape = trace.values[reshard.value].shape
    if not reshard.source.is_sharded or reshard.source.dim != len(shape) - 1 or reshard.target == reshard.source:
        return None
    if reshard.target.is_sharded and reshard.target.dim == reshard.source.dim:
        return None
    bound = origins.rule_behind(reshard.value, assignment.layouts)
    if bound is None or bound.style is not Style.COLWISE or bound.rule.output is not None:
        return None
    return bound


def _slices_rows(decided: FrameAssignment) -> bool:
    return any(r.source.is_replicated and r.target.is_sharded for r in decided.entries)


def _gathered(held: list[tuple[Bound, int]]) -> Diagnostic:
    bound, sent = held[0]
    count = f", and so are {len(held) - 1} more" if len(held) > 1 else ""
    return Diagnostic(
        code="TP104",
        message=f"the result of `{bound.name}` is gathered, as nothing that reads it can work on columns{count}",
        span=bound.rule.style_span,
        label=f"each rank sends {sent:,} bytes a call",
        help="make the linear layer that reads it `rowwise`; or write `output: replicate` if the gather is meant, "
        "`output: shard` to hand out the shards",
        subject=bound.name,
    )


def _sliced(held: list[Bound]) -> Diagnostic:
    count = f", and so is that of {len(held) - 1} more" if len(held) > 1 else ""
    return Diagnostic(
        code="TP105",
        message=f"the input of `{held[0].name}` is replicated, and each rank takes its slice{count}",
        span=held[0].rule.style_span,
        label="fed by something that isn't sharded",
        help="make the linear layer before it `colwise`, so that its work is split too; or write `input: shard` if the "
        "slice is meant",
        subject=held[0].name,
    )
