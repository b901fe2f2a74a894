"""Recurrent layers: what a program says of the hidden states that their bodies gather.

in:  the calls of such a layer
out: a reshard for each layer and direction, with the number of its steps
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from tpplan.compiler.ir.layout import REPLICATED, Collective
from tpplan.compiler.ir.program import Reshard, dtype_name
from tpplan.compiler.ir.replaced_bodies import Recurrence
from tpplan.compiler.ir.trace import Frame, Trace, Value
from tpplan.compiler.place.assign import Assignment
from tpplan.compiler.rules.recurrent import GATHERED, Gathers, gathers, gathers_first


def gathered_states(
    trace: Trace, assignment: Assignment, frames: Sequence[Frame], recurrence: Recurrence
) -> tuple[Reshard, ...]:
    """The reshards inside of all calls of a layer; calls with as many sequences count together."""
    counted: Counter[tuple[Gathers, Value, bool]] = Counter()
    for frame in frames:
        first = next(trace.values[c.target] for c in frame.entries if c.path == ("input",))
        every = tuple(gathers(recurrence, first.shape))
        for crossing in frame.entries:
            value, layout = trace.values[crossing.target], assignment.layouts.get(crossing.target, REPLICATED)
            if gathers_first(recurrence, crossing.path, layout):
                whole = Gathers("", 0, math.prod(value.shape[:-1]), 0)
                counted[whole, _alike(first), value.differentiable] += 1
        for held, differentiable in zip(every, _differentiable(trace, frame, recurrence, every), strict=True):
            counted[held._replace(times=0), _alike(first), differentiable] += held.times
    source, target = GATHERED
    return tuple(
        Reshard(
            path=(f"h{held.suffix}",), source=source, target=target, forward=Collective.ALL_GATHER,
            backward=Collective.REDUCE_SCATTER if differentiable else Collective.NONE,
            shape=(held.batch, recurrence.features), dtype=dtype_name(first.dtype),
            bytes=held.batch * recurrence.features * first.dtype.itemsize, differentiable=differentiable,
            origin="each step reads all of the hidden state", times=times,
        )
        for (held, first, differentiable), times in counted.items()
    )  # fmt: skip


def _alike(value: Value) -> Value:
    """What counts of an input here: its dtype."""
    return Value(0, (), (), value.dtype, False)


def _differentiable(trace: Trace, frame: Frame, recurrence: Recurrence, every: Sequence[Gathers]) -> Iterator[bool]:
    """Whether the hidden state of each layer's direction has a gradient."""
    if not any(trace.values[c.target].differentiable for c in frame.exits):
        yield from (False for _ in every)
        return
    trained = {
        name for value, names in trace.parameters.items() for name in names if trace.values[value].differentiable
    }
    states = any(trace.values[c.target].differentiable for c in frame.entries if c.path != ("input",))
    given = any(trace.values[c.target].differentiable for c in frame.entries if c.path == ("input",))
    for layer in range(recurrence.layers):
        found = [
            given or states or any(f"{frame.module}.{leaf}" in trained for leaf in recurrence.parameters(held.suffix))
            for held in every
            if held.layer == layer
        ]
        given = any(found)
        yield from found


__all__ = ["gathered_states"]
