"""Class calls: what a program says of functions over classes, such as a loss, that are split over the ranks.

in:  trace and assignment
out: by module, the calls of such functions that its body makes, in order; and what each of them sends
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from tpplan.compiler.ir.class_functions import CROSS_ENTROPY, LOG_SOFTMAX, NLL_LOSS
from tpplan.compiler.ir.class_reductions import CLASS_OPERATIONS, GATHER, REDUCTIONS, SOFTMAX, SUMS
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, REPLICATED_PARTIAL, Collective, Layout, sharded
from tpplan.compiler.ir.look_ups import LOOK_UPS
from tpplan.compiler.ir.program import ClassCalls, Reshard, SplitClasses, dtype_name
from tpplan.compiler.ir.trace import Frame, Operation, Trace, Value
from tpplan.compiler.place.assign import Assignment
from tpplan.compiler.rules.classes import class_dim, splits_classes


def class_calls(trace: Trace, assignment: Assignment) -> dict[tuple[str, int], ClassCalls]:
    """Of each call of a module that runs such functions on split classes: these, in order, None for any other."""
    found: dict[tuple[str, int], ClassCalls] = {}
    for frame in trace.recorded.walk():
        every = [(node, _of(node, trace, assignment)) for node in _class_operations(frame)]
        for kind in (REDUCTIONS, LOOK_UPS):  # the runtime doesn't look at a kind of which none is split
            if not any(call for node, call in every if node.target in kind):
                every = [(node, call) for node, call in every if node.target not in kind]
        calls = tuple(call for _, call in every)
        if any(call is not None for call in calls):
            found[frame.module, frame.call] = calls
    return found


def losses(trace: Trace, assignment: Assignment) -> Iterator[tuple[str, Operation, bool]]:
    """Every call of a cross entropy: the module whose body makes it, the call, whether its classes are split."""
    for frame in trace.recorded.walk():
        for node in _class_operations(frame):
            if node.target is CROSS_ENTROPY:
                yield frame.module, node, _of(node, trace, assignment) is not None


def counted_among(trace: Trace, module: str) -> frozenset[str]:
    """The modules that a module's body calls: what they call themselves isn't counted with its own calls."""
    frames = (frame for frame in trace.recorded.walk() if frame.module == module)
    return frozenset(node.module for frame in frames for node in frame.body if isinstance(node, Frame))


def statistics(frame: Frame, trace: Trace, assignment: Assignment, size: int) -> Iterator[Reshard]:
    """What the ranks exchange for the class calls of a body."""
    for node in _class_operations(frame):
        held = _layout(node, assignment)
        if splits_classes(node.target, node.arguments, held):
            made = node.outputs[0] or 0
            if node.target in LOOK_UPS and assignment.layouts.get(made) == PARTIAL:
                continue
            partial = assignment.layouts.get(made) == REPLICATED_PARTIAL
            yield from _exchanged(node, trace.values[node.inputs[0]], trace.values[made], size, partial)


def _exchanged(node: Operation, logits: Value, result: Value, size: int, partial: bool) -> Iterator[Reshard]:
    name = node.name.split(".")[1]
    rows = math.prod(logits.shape) // logits.shape[class_dim(node.arguments, node.target)]
    wide = logits.dtype if logits.dtype == torch.float64 else torch.float32
    gradient = result.differentiable

    def reshard(source: Layout, target: Layout, ways: tuple[Collective, Collective], numbers: int) -> Reshard:
        return Reshard(
            path=(name,), source=source, target=target, forward=ways[0], backward=ways[1],
            shape=(numbers, rows), dtype=dtype_name(wide), bytes=numbers * rows * wide.itemsize,
            differentiable=gradient, origin=f"`{name}` over split {'rows' if node.target in LOOK_UPS else 'classes'}",
        )  # fmt: skip

    if node.target in LOOK_UPS:
        wide = result.dtype
    if node.target is GATHER or node.target in LOOK_UPS:
        rows = math.prod(result.shape)
    if node.target in (NLL_LOSS, GATHER) or node.target in SUMS | LOOK_UPS:
        yield reshard(PARTIAL, REPLICATED, (Collective.ALL_REDUCE, Collective.NONE), 1)
    else:
        numbers = 2 if node.target is not CROSS_ENTROPY else 4 if node.arguments[6] else 3
        yield reshard(sharded(0), REPLICATED, (Collective.ALL_GATHER, Collective.NONE), numbers * size)
    if (node.target in (LOG_SOFTMAX, SOFTMAX) or partial) and gradient:
        yield reshard(REPLICATED, REPLICATED_PARTIAL, (Collective.NONE, Collective.ALL_REDUCE), 1)


def _class_operations(frame: Frame) -> list[Operation]:
    return [node for node in frame.body if isinstance(node, Operation) and node.target in CLASS_OPERATIONS]


def _of(node: Operation, trace: Trace, assignment: Assignment) -> SplitClasses | None:
    held = _layout(node, assignment)
    if not splits_classes(node.target, node.arguments, held):
        return None
    dim = class_dim(node.arguments, node.target)
    made = assignment.layouts.get(node.outputs[0] or 0)
    count = trace.values[node.inputs[0]].shape[dim]
    return SplitClasses(
        node.name.split(".")[1], count, made == REPLICATED_PARTIAL, node.target in LOOK_UPS and made == PARTIAL
    )


def _layout(node: Operation, assignment: Assignment) -> Layout:
    return assignment.layouts.get(node.inputs[0], REPLICATED)


__all__ = ["class_calls", "counted_among", "losses", "statistics"]
