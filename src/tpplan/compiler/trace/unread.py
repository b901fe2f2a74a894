"""Unread: calls that the model makes, and of which nobody reads what they compute.

in:  a trace
out: the same, in which layers that compute for nobody count as those do whose results are read

    text = self.to_add_out(text)   ->   in the last block of two streams, in which only the picture is read on

Nothing has to be known of such a call where it can work on whatever it gets. A layer can't that multiplies by whole
weights what is split, or the other way round: it has to be placed, though no gradient comes back from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from dataclasses import replace

from tpplan.compiler.ir.trace import Crossing, Frame, Operation, Trace
from tpplan.compiler.trace.capture import without_dead_operations


def with_unread(trace: Trace) -> Trace:
    """The trace with the calls of layers that compute for nobody, and with what these read."""
    live = live_values(trace.root)
    made = {
        crossing.source
        for frame in trace.recorded.walk()
        if _reads_parameters(frame, trace) and live.isdisjoint(c.source for c in frame.exits)
        for crossing in frame.exits
    }
    if not made:
        return trace
    root = without_dead_operations(trace.recorded, {*trace.effects.made, *made})
    unanswered = {value for value in _values(root) if value not in live}
    read = {value for frame in root.walk() for n in frame.body if isinstance(n, Operation) for value in n.inputs}
    read.update(crossing.source for crossing in _crossings(root))
    unread = frozenset(c.target for frame in root.walk() for c in frame.exits) - read - live
    gradients = replace(trace.gradients, unanswered=trace.gradients.unanswered | unanswered)
    return replace(trace, root=root, gradients=gradients, unread=unread)


def are_read_for_nobody(trace: Trace, names: Set[str]) -> bool:
    """Whether any of these parameters, which the trace doesn't read, is read by a call that it leaves out."""
    held = {value for value, own in trace.parameters.items() if not names.isdisjoint(own)}
    operations = (n for frame in with_unread(trace).root.walk() for n in frame.body if isinstance(n, Operation))
    return bool(held) and any(not held.isdisjoint(n.inputs) for n in operations)


def is_unread(trace: Trace, frame: Frame, position: int) -> bool:
    """Whether the step at this position of a call's body is left out of the trace, as nobody reads what it makes."""
    kept = _same_call(trace.root.walk(), frame)
    if kept is None or position >= len(frame.body):
        return False
    step = frame.body[position]
    if isinstance(step, Operation):
        made = {o for n in kept.body if isinstance(n, Operation) for o in (*n.outputs, *n.overwritten)}
        return made.isdisjoint((*step.outputs, *step.overwritten))
    inner = next(
        (n for n in kept.body if isinstance(n, Frame) and (n.module, n.call) == (step.module, step.call)), None
    )
    return inner is None or not any(isinstance(n, Operation) for f in inner.walk() for n in f.body)


def _same_call(frames: Iterator[Frame], wanted: Frame) -> Frame | None:
    return next((f for f in frames if (f.module, f.call) == (wanted.module, wanted.call)), None)


def _reads_parameters(frame: Frame, trace: Trace) -> bool:
    return any(not trace.parameters.keys().isdisjoint(n.inputs) for n in frame.body if isinstance(n, Operation))


def live_values(root: Frame) -> set[int]:
    """The values that anybody reads in a trace, and what is made in it for its own sake, such as what is written."""
    held = [n for frame in root.walk() for n in frame.body if isinstance(n, Operation)]
    live = {value for n in held for value in (*n.inputs, *n.overwritten)}
    live.update(value for crossing in root.exits for value in (crossing.source, crossing.target))
    for crossing in reversed([*_crossings(root)]):
        if crossing.target in live:
            live.add(crossing.source)
    alone = [[o for o in n.outputs if o is not None] for n in held]
    live.update(o for outputs in alone if live.isdisjoint(outputs) for o in outputs)
    return live


def final_values(root: Frame, dead: Collection[int]) -> set[int]:
    """The results of calls that leave the model, and that nobody reads before, but for exits that are dead."""
    frames = [*root.walk()]
    read = {value for f in frames for n in f.body if isinstance(n, Operation) for value in (*n.inputs, *n.overwritten)}
    read.update(crossing.source for frame in frames for crossing in frame.entries)
    final = {crossing.target for crossing in root.exits}
    for crossing in reversed([*_crossings(root)]):
        if crossing.target in final - read:
            final.add(crossing.source)
        elif crossing.target not in dead:
            read.add(crossing.source)
    return final - read


def _values(root: Frame) -> Iterator[int]:
    for frame in root.walk():
        yield from (o for n in frame.body if isinstance(n, Operation) for o in n.outputs if o is not None)
    yield from (crossing.target for crossing in _crossings(root))


def _crossings(root: Frame) -> Iterator[Crossing]:
    """In the order in which they are crossed."""
    return (node for _, node in root.in_order() if isinstance(node, Crossing))


__all__ = ["final_values", "is_unread", "live_values", "with_unread"]
