"""Warn: what is right but costs more than the plan's author may think, or shows that the plan means something else.

in:  a placed program
out: TP104 for a colwise result that is gathered, TP105 for a rowwise input that is sliced; and where the body that
     reads a gathered result shows why: TP106 if it takes a packed projection apart, TP103 if the axis cuts a head
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tpplan.compiler.assign import Assignment, FrameAssignment, PlacedReshard
from tpplan.compiler.bind import Binding, Bound
from tpplan.compiler.origins import Origins
from tpplan.compiler.trace import Crossing, Frame, Operation, Trace, quoted
from tpplan.cost.communication import bytes_sent
from tpplan.plan import Diagnostic, Style

_SPLITS = frozenset(
    f"aten.{name}"
    for name in ("split.Tensor", "split_with_sizes.default", "unsafe_split.Tensor", "slice.Tensor", "chunk.default")
)
_VIEWS = frozenset(("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"))


@dataclass(frozen=True, slots=True)
class _Taken:
    """How a body takes a gathered result apart: the operation, and the sizes of the parts."""

    frame: Frame
    operation: Operation
    parts: tuple[int, ...]

    @property
    def module(self) -> str:
        return quoted(self.frame.module)


def warnings_for(trace: Trace, binding: Binding, assignment: Assignment, size: int) -> list[Diagnostic]:
    """Findings on reshards that a plan seldom means, one for each rule."""
    origins = Origins(trace, binding)
    readers = _Readers(trace)
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


def gathers_columns(trace: Trace, binding: Binding, assignment: Assignment) -> bool:
    """Whether a column-wise result is gathered though the plan doesn't ask for it."""
    origins = Origins(trace, binding)
    placed = (r for decided in assignment.frames for r in (*decided.entries, *decided.exits))
    return any(_gathers_columns(reshard, trace, assignment, origins) is not None for reshard in placed)


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


class _Readers:
    """Who reads a value, looking through boundaries."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._crossings: dict[int, list[Crossing]] = defaultdict(list)
        self._operations: dict[int, list[tuple[Frame, Operation]]] = defaultdict(list)
        for frame in trace.root.walk():
            for crossing in (*frame.entries, *frame.exits):
                self._crossings[crossing.source].append(crossing)
            for node in frame.body:
                if isinstance(node, Operation):
                    for value in node.inputs:
                        self._operations[value].append((frame, node))

    def of(self, value: int) -> Iterator[tuple[Frame, Operation]]:
        """The operations that read `value` or an alias of it on the other side of a boundary."""
        yield from self._operations[value]
        for crossing in self._crossings[value]:
            yield from self.of(crossing.target)

    def taken_apart(self, value: int) -> _Taken | None:
        """How the last dim of `value` is taken apart, if that is what is done with it."""
        whole = self.trace.values[value].shape
        slices: list[int] = []
        for frame, operation in self.of(value):
            parts = [self.trace.values[o].shape for o in operation.outputs if o is not None]
            if operation.name in _VIEWS and len(parts[0]) > len(whole) and parts[0][: len(whole) - 1] == whole[:-1]:
                return _Taken(frame, operation, parts[0][len(whole) - 1 :])
            if operation.name in _SPLITS and all(p[:-1] == whole[:-1] and p[-1] < whole[-1] for p in parts):
                slices += [part[-1] for part in parts]
                if sum(slices) >= whole[-1]:
                    return _Taken(frame, operation, tuple(slices))
        return None


def _gathered(held: list[tuple[Bound, PlacedReshard]], readers: _Readers, trace: Trace, size: int) -> Diagnostic:
    more = (f"the same holds for {len(held) - 1} more",) if len(held) > 1 else ()
    for bound, reshard in held:
        taken = readers.taken_apart(reshard.value)
        if taken is None:
            continue
        where = f"in {taken.module}, at {taken.operation.location}"
        views = taken.operation.name in _VIEWS
        if not views or len(taken.parts) > 2:
            return _packed(bound, taken, trace.values[reshard.value].shape[-1], views, (where, *more))
        if next(iter(taken.parts), 0) % size:
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


def _packed(bound: Bound, taken: _Taken, whole: int, views: bool, notes: tuple[str, ...]) -> Diagnostic:
    sizes = [whole // taken.parts[0]] * taken.parts[0] if views else list(taken.parts)
    return Diagnostic(
        code="TP106",
        message=f"`{bound.name}` packs {len(sizes)} projections ({' + '.join(map(str, sizes))} of {whole} features), "
        f"which {taken.module} takes apart; a plain split gives ranks pieces that cut across them",
        span=bound.rule.style_span,
        label="splits the packed features as if they were one projection",
        help="write `{style: colwise, output: replicate}` to gather the result before it is taken apart, or remove the "
        "rule; a packed projection can't be split yet",
        notes=notes,
        subject=bound.name,
    )


def _heads(bound: Bound, taken: _Taken, size: int, notes: tuple[str, ...]) -> Diagnostic:
    heads = taken.parts[0]
    return Diagnostic(
        code="TP103",
        message=f"{taken.module} views the result of `{bound.name}` as {heads} heads, which {size} ranks can't "
        "share evenly",
        span=bound.rule.style_span,
        label=f"{heads} heads / {size} ranks",
        help=f"use a size of the axis that divides {heads}, or remove the rules for the modules of "
        f"{taken.module}, so that it is replicated",
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
