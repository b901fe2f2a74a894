"""Compare: one call's run on local shapes, step by step, against the call in the trace.

in:  a frame of the trace, the same call's frame of a run on local shapes, and what was promised
out: the first `Mismatch`, or None

    view -> (2, 16, 8, 4) where (2, 16, 4, 8) was promised   ->   Mismatch, with both shapes

Operations that only rearrange (views, copies) may differ from the trace, as a rank with a single head takes other
paths; all others must come in the same order, with the same scalars, and make results of the promised local shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.compiler.check.correspond import Correspondence
from tpplan.compiler.ir.layout import REPLICATED, Layout, Pack
from tpplan.compiler.ir.observations import CaptureSettings
from tpplan.compiler.ir.region import Instance, picks_of
from tpplan.compiler.ir.trace import Crossing, ForeignBackward, Frame, Operation, Path, Reference, Trace, Value
from tpplan.compiler.place.assign import Assignment
from tpplan.compiler.rules.own_arguments import with_own_arguments
from tpplan.compiler.trace.recorder import Recorder
from tpplan.ops.dim_map import is_sized, picked_dim

REARRANGING = (
    "reshape", "strided reshape", "expand", "copy", "transposition", "unsqueeze", "squeeze", "alias", "detach",
    "strided", "part taken",
)  # fmt: skip
_OF_GENERATORS = (
    "draw from torch's default generator, by leaving out `generator`; or make the numbers in `__init__` and keep them "
    "in a buffer"
)


# By rank: what `_LocalBoundary` knows equal calls by.
Shown = frozenset[tuple[int, object]]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where a run on local shapes departs from what was promised.

    Attributes:
        frame: the call in the trace.
        operation: the operation in the trace that should have come; None at a boundary or past the end.
        position: its position in the frame's body.
        expected, found: local shapes, or numbers passed to the operation, where these differ.
        reason: in words.
        rank: whose shapes they are.
        backward: the code in the call's backward that isn't right on a rank's part, where the forward is.
        cut: the value whose first entries it takes, all of them in the example alone.
        way_out: what to do about it, where that is known.
        when: the positions, from the root's body inwards, of the calls that lead to it, and its own: of two, the one
            that comes first in the run is the smaller.
        shown: what tells the calls before it, which the run has shown right, from others.
    """

    frame: Frame
    operation: Operation | None
    position: int
    expected: tuple[int, ...] | None
    found: tuple[int, ...] | None
    reason: str
    rank: int = 0
    when: tuple[int, ...] = ()
    backward: ForeignBackward | None = None
    cut: int | None = None
    shown: Shown = field(default=frozenset(), compare=False, repr=False)
    way_out: str = ""

    def sizes(self, ranks: int) -> list[int]:
        """Global sizes of which the run on local shapes saw only a rank's part."""
        if self.expected is None or self.found is None or len(self.expected) != len(self.found):
            return []
        pairs = [(a, b) for a, b in zip(self.expected, self.found, strict=True) if a != b]
        return [ours for ours, theirs in pairs if Pack(ours).local(ranks, self.rank) == theirs]


@dataclass(frozen=True, slots=True)
class CheckInput:
    """What a check needs to know.

    `rank` is whose shapes it runs on, `parts` the inputs that don't come whole; `surprising` whether functions with a
    backward of their own hide which values have a gradient; `recorder` makes that of the run; `symbolic` whether its
    sizes are symbols, at whose values in the example all was shown.
    """

    model: nn.Module
    trace: Trace
    assignment: Assignment
    instance: Instance
    size: int
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    results: Mapping[tuple[str, int], Any]
    parts: Mapping[Path, Layout] = field(default_factory=dict[Path, Layout])
    rank: int = 0
    surprising: bool = False
    recorder: Callable[[CaptureSettings], Recorder] = Recorder
    symbolic: bool = False

    @property
    def batch(self) -> int:
        """The example's batch size."""
        return self.trace.batch


def promised_shape(given: CheckInput, value: Value) -> tuple[int, ...]:
    """The local shape that the assignment promises of a value of the trace."""
    layout: Layout = given.assignment.layouts.get(value.identifier, REPLICATED)
    return layout.local_shape(value.shape, given.size, given.rank)


def compare(
    given: CheckInput,
    whole: Frame,
    local: Frame,
    values: Sequence[Value],
    operands: Correspondence,
    unfinished: bool,
    failure: str,
) -> Mismatch | None:
    """The first difference between a call's body in the trace and the same body on local shapes."""
    steps = [(i, n) for i, n in enumerate(whole.body) if isinstance(n, Operation) and not n.is_a(*REARRANGING)]
    runs = [n for n in local.body if isinstance(n, Operation) and not n.is_a(*REARRANGING)]
    rearranged = zip(_rearranging_before(whole), _rearranging_before(local), strict=False)
    for (position, ours), theirs in zip(steps, runs, strict=False):
        found = _compare_rearranged(given, whole, *next(rearranged), values)
        found = found or _compare_operation(given, whole, position, ours, theirs, values)
        found = found or _compare_operands(given, whole, position, ours, theirs, operands, values)
        if found is not None:
            return found
    if failure:
        return _failed_at(given, whole, local, values, failure.splitlines()[0])
    if unfinished:
        return None
    end = len(whole.body)
    if len(steps) != len(runs):
        return Mismatch(whole, None, end, None, None, f"runs {len(runs)} operations instead of {len(steps)}")
    found = _compare_rearranged(given, whole, *next(rearranged), values)
    return found or _compare_crossings(given, whole, whole.exits, local.exits, values, end)


_Rearranging = list[tuple[int, Operation]]


def _rearranging_before(frame: Frame) -> Iterator[_Rearranging]:
    """For each operation that computes, the views and copies since the one before; at last, those at the end."""
    since: _Rearranging = []
    for position, node in enumerate(frame.body):
        if not isinstance(node, Operation):
            continue
        if node.is_a(*REARRANGING):
            since.append((position, node))
        else:
            yield since
            since = []
    yield since


def _compare_rearranged(
    given: CheckInput, whole: Frame, ours: _Rearranging, theirs: _Rearranging, values: Sequence[Value]
) -> Mismatch | None:
    """Views and copies must yield what's promised too, wherever the two runs take the same ones."""
    orders = [[_order(o) for _, o in held if o.is_a("transposition", "strided")] for held in (ours, theirs)]
    if orders[0] != orders[1]:
        position, mine = next(((p, o) for p, o in ours if o.is_a("transposition", "strided")), (0, None))
        return Mismatch(whole, mine, position, None, None, "dims are permuted in another order")
    if [o.target for _, o in ours] != [o.target for _, o in theirs]:
        return None
    for (position, mine), (_, its) in zip(ours, theirs, strict=True):
        found = _compare_shapes(given, whole, position, mine, its, values)
        if found is not None:
            return found
    return None


def _order(operation: Operation) -> object:
    return operation.name, None if operation.is_a("strided") else scalars(operation)  # strides are a part's own


def _compare_crossings(
    given: CheckInput,
    whole: Frame,
    ours: Sequence[Crossing],
    theirs: Sequence[Crossing],
    values: Sequence[Value],
    position: int,
) -> Mismatch | None:
    for mine, its in zip(ours, theirs, strict=False):
        layouts = given.assignment.layouts
        expected, found = promised_shape(given, given.trace.values[mine.target]), values[its.target].shape
        if mine.target in layouts and mine.path == its.path and expected != found:
            reason = f"`{'.'.join(map(str, mine.path)) or 'the result'}` has a different shape"
            return Mismatch(whole, None, position, expected, found, reason)
    return None


def compare_call(
    given: CheckInput,
    caller: Frame,
    position: int,
    whole: Frame,
    local: Frame,
    values: Sequence[Value],
    operands: Correspondence,
) -> Mismatch | None:
    """What is wrong with the arguments of a call that wasn't run, and so doesn't read them."""
    reason = compare_passed(given, whole.entries, local.entries, values, operands)
    if reason:
        return Mismatch(caller, None, position, None, None, f"of what it passes to `{whole.module}`, {reason}")
    return compare_entries(given, caller, position, whole, local, values)


def compare_entries(
    given: CheckInput, caller: Frame | None, position: int, whole: Frame, local: Frame, values: Sequence[Value]
) -> Mismatch | None:
    """The first argument with another shape than was promised; where it had that before the boundary, in the caller.

    A caller that makes it by views alone is noticed here first.
    """
    found = _compare_crossings(given, whole, whole.entries, local.entries, values, 0)
    if found is None or caller is None:
        return found
    for mine, its in zip(whole.entries, local.entries, strict=False):
        if mine.path != its.path or mine.source not in given.assignment.layouts:
            continue
        expected, shape = promised_shape(given, given.trace.values[mine.source]), values[its.source].shape
        if expected != shape:
            path = ".".join(map(str, mine.path))
            reason = f"of what it passes to `{whole.module}`, `{path}` has a different shape"
            return Mismatch(caller, None, position, expected, shape, reason)
    return found


def compare_passed(
    given: CheckInput,
    ours: Sequence[Crossing],
    theirs: Sequence[Crossing],
    values: Sequence[Value],
    operands: Correspondence,
) -> str:
    """In what way the tensors that a body passes or returns aren't those of the trace; "" if they are."""
    mine, its = ({path: c.source for c in held for path in (c.path, *c.aliases)} for held in (ours, theirs))
    for path in (*mine, *(path for path in its if path not in mine)):
        reason = f"is a tensor only {'in the unsharded model' if path in mine else 'on a rank'}"
        if path in mine and path in its:
            reason = differing(given, mine[path], its[path], values, operands)
        if reason:
            return f"`{'.'.join(map(str, path)) or 'the result'}` {reason}"
    return ""


def differing(given: CheckInput, mine: int, its: int, values: Sequence[Value], operands: Correspondence) -> str:
    """In what way a value isn't the one of the trace; "" if it is."""
    if operands.differs(mine, its):
        return "is another value than in the unsharded model"
    if not given.surprising and values[its].differentiable != given.trace.values[mine].differentiable:
        return f"{'has a' if values[its].differentiable else 'has no'} gradient only on a rank's part"
    return ""


def _compare_operation(
    given: CheckInput, whole: Frame, position: int, ours: Operation, theirs: Operation, values: Sequence[Value]
) -> Mismatch | None:
    splits = ours.is_a("split") and theirs.is_a("split")  # of an empty dim, `chunk` takes the other one
    if ours.target is not theirs.target and not splits:
        return Mismatch(
            whole, ours, position, None, None, f"runs {theirs.name} where the unsharded model runs {ours.name}"
        )
    found = _compare_shapes(given, whole, position, ours, theirs, values)
    if found is not None:
        return found
    for mine, its in zip(ours.inputs, theirs.inputs, strict=False):
        if not _same_numbers(_numbers_on_rank(given, ours, mine), values[its].numbers):
            return Mismatch(whole, ours, position, None, None, f"{ours.name} reads a constant with other values")
    ours = with_own_arguments(ours, given.trace.values, given.assignment.layouts, given.size, given.rank)
    if not _same_scalars(given, ours, theirs):
        if _generators(ours) and _generators(theirs):
            reason = f"{ours.name} draws from a generator of the model's own, of which nothing shows that it is alike"
            return Mismatch(whole, ours, position, None, None, reason, way_out=_OF_GENERATORS)
        mine, its = (tuple(n for n in scalars(held) if type(n) is int) for held in (ours, theirs))
        reason = f"{ours.name} is called with {_shown(theirs)} instead of {_shown(ours)}"
        return Mismatch(whole, ours, position, *((mine, its) if mine != its else (None, None)), reason)
    return None


def _compare_operands(
    given: CheckInput,
    whole: Frame,
    position: int,
    ours: Operation,
    theirs: Operation,
    operands: Correspondence,
    values: Sequence[Value],
) -> Mismatch | None:
    for place, (mine, its) in enumerate(zip(ours.inputs, theirs.inputs, strict=False)):
        reason = differing(given, mine, its, values, operands)
        if reason:
            return Mismatch(whole, ours, position, None, None, f"operand {place + 1} of {ours.name} {reason}")
    return None


def _compare_shapes(
    given: CheckInput, whole: Frame, position: int, ours: Operation, theirs: Operation, values: Sequence[Value]
) -> Mismatch | None:
    layouts = given.assignment.layouts
    reason = f"{ours.name} makes a different shape"
    if len(ours.outputs) != len(theirs.outputs):
        reason = f"{ours.name} makes {len(theirs.outputs)} parts instead of {len(ours.outputs)}"
    for mine, its in zip(ours.outputs, theirs.outputs, strict=False):
        if mine is None or its is None or mine not in layouts:
            continue
        expected = promised_shape(given, given.trace.values[mine])
        if expected != values[its].shape:
            return Mismatch(whole, ours, position, expected, values[its].shape, reason)
    if len(ours.outputs) != len(theirs.outputs):
        return Mismatch(whole, ours, position, None, None, reason)
    return None


def _same_numbers(ours: Tensor | None, theirs: Tensor | None) -> bool:
    return ours is None or theirs is None or torch.equal(ours, theirs)


def _numbers_on_rank(given: CheckInput, operation: Operation, value: int) -> Tensor | None:
    """The numbers of a constant; where they pick stretches of a packed dim, as they have to be on a rank."""
    numbers = given.trace.values[value].numbers
    picks = picks_of(numbers)
    if picks is None or not operation.is_a("pick"):
        return numbers
    rank = len(given.trace.values[operation.inputs[0]].shape)
    along = picked_dim(operation.arguments, rank)
    made = next(o for o in operation.outputs if o is not None)
    if along is None or not _packs_along(given, operation, along):
        return numbers
    first = _start_on_rank(given, operation, along, picks[0])
    return torch.arange(first, first + promised_shape(given, given.trace.values[made])[along])


def _failed_at(given: CheckInput, whole: Frame, local: Frame, values: Sequence[Value], failure: str) -> Mismatch:
    """For a body that raised: the first view or copy whose shape already was another, or the one that raised."""
    ours = [(i, n) for i, n in enumerate(whole.body) if isinstance(n, Operation)]
    theirs = [n for n in local.body if isinstance(n, Operation)]
    for (position, mine), its in zip(ours, theirs, strict=False):
        if mine.target is not its.target:
            return Mismatch(whole, mine, position, None, None, failure)
        same = _compare_shapes if mine.is_a(*REARRANGING) else _compare_operation
        found = same(given, whole, position, mine, its, values)
        if found is not None:
            return found
    if len(theirs) >= len(ours):
        return Mismatch(whole, None, len(whole.body), None, None, failure)
    position, mine = ours[len(theirs)]
    made = next((o for o in mine.outputs if o is not None), None)
    expected = None if made is None else promised_shape(given, given.trace.values[made])
    return Mismatch(whole, mine, position, expected, None, failure)


def _same_scalars(given: CheckInput, ours: Operation, theirs: Operation) -> bool:
    if ours.is_a("slice", "select"):
        return _local_start(given, ours) == theirs.arguments[1:3] and ours.arguments[4:] == theirs.arguments[4:]
    if ours.is_a("split"):
        return ours.arguments[2:] == theirs.arguments[2:]  # the results' shapes show the sizes
    mine, its = scalars(ours), scalars(theirs)
    return len(mine) == len(its) and all(a is b or _equal(a, b) for a, b in zip(mine, its, strict=True))


def _equal(ours: object, theirs: object) -> bool:
    try:
        return bool(ours == theirs) or (ours != ours and theirs != theirs)  # nan is no other number than nan
    except Exception:  # some objects of torch can't be compared
        return False


def _local_start(given: CheckInput, operation: Operation) -> tuple[Any, ...]:
    """The dim and the start of a slice, or the place of an entry, counted on one rank where the dim is packed.

    A slice of every so many entries begins alike on each rank.
    """
    held: tuple[Any, ...] = operation.arguments[1:3]
    steps = operation.arguments[4:5] not in ((), (1,))
    if len(held) < 2 or not held[1] or steps or not _packs_along(given, operation, held[0]):
        return held
    return (held[0], _start_on_rank(given, operation, held[0], held[1]))


def _packs_along(given: CheckInput, operation: Operation, dim: int) -> tuple[Pack, ...]:
    """The packs of a dim of the first operand."""
    layout = given.assignment.layouts.get(operation.inputs[0], REPLICATED)
    return layout.shares(dim % len(given.trace.values[operation.inputs[0]].shape), given.size, given.rank)[0]


def _start_on_rank(given: CheckInput, operation: Operation, dim: int, start: int) -> int:
    """Where a stretch of a packed dim of the first operand begins on a rank, counted from the same end."""
    shape = given.trace.values[operation.inputs[0]].shape
    layout, along = given.assignment.layouts[operation.inputs[0]], dim % len(shape)
    return layout.local_start(along, start, shape[along], given.size, given.rank)


def _generators(operation: Operation) -> bool:
    return any(isinstance(held, torch.Generator) for held in scalars(operation))


def _shown(operation: Operation) -> str:
    return ", ".join(str(n) for n in scalars(operation) if type(n) in (int, float, tuple))


def scalars(operation: Operation) -> list[object]:
    """The arguments that aren't tensors. Sizes are left out where they show in the results' shapes.

    Of a row of tensors it is the places that have none, as in `x[:, picks]`.
    """
    held = (*operation.arguments, *operation.keywords.values())
    sized = is_sized(operation.target)
    kept: list[Any] = [a for a in held if not (isinstance(a, Reference) or (isinstance(a, tuple) and sized))]
    return [_places_without(a) if isinstance(a, tuple) and _has_tensors(a) else a for a in kept]


def _places_without(items: Any) -> tuple[int, ...]:
    return tuple(place for place, item in enumerate(items) if not isinstance(item, Reference))


def _has_tensors(items: Any) -> bool:
    return any(isinstance(item, Reference) for item in items)


__all__ = [
    "REARRANGING",
    "CheckInput",
    "Mismatch",
    "Shown",
    "compare",
    "compare_call",
    "compare_entries",
    "compare_passed",
    "differing",
    "promised_shape",
    "scalars",
]
