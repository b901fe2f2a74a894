"""Gradient flow: through functions with a backward of their own, which torch runs with gradients off.

in:  the calls, the values, and those that turned out to want a gradient although no operation gave them one
out: the values, where everything between such a value and what its function was called with wants a gradient too

    y = Square.apply(x)   ->   mul(x, x) was recorded without a gradient, yet y has one: so do all values in between

This holds for every `torch.autograd.Function`, reentrant activation checkpointing among them. And where a gradient
ends, as in straight-through estimators:

    w + (q - w).detach()    ->   q has no gradient, though it is made of w
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from tpplan.compiler.ir.trace import Frame, Operation, Trace, Value

Step = tuple[tuple[int, ...], tuple[int, ...]]


def complete_gradients(root: Frame, values: Sequence[Value], surprising: Collection[int]) -> tuple[Value, ...]:
    """Mark the values inside of functions as differentiable.

    Args:
        root: the recorded calls.
        values: by identifier.
        surprising: values that were recorded without a gradient, and had one when they were read.
    """
    if not surprising:
        return tuple(values)
    steps = list(_steps(root))
    reached = {value.identifier for value in values if value.differentiable}
    for inputs, outputs in steps:
        if not reached.isdisjoint(inputs):
            reached.update(outputs)
    wanted = set(surprising)
    for inputs, outputs in reversed(steps):
        if not wanted.isdisjoint(outputs):
            wanted.update(i for i in inputs if i in reached and not values[i].differentiable)
    return tuple(
        replace(value, differentiable=True)
        if value.identifier in wanted and (value.dtype.is_floating_point or value.dtype.is_complex)
        else value
        for value in values
    )


def unanswered(root: Frame, values: Sequence[Value], passed: Collection[int]) -> frozenset[int]:
    """Of the values that modules were called with under `no_grad`, those to which no gradient comes back.

    A function with a backward of its own turns gradients off as well, and what is made inside of it may have one.

    Args:
        root: the recorded calls.
        values: by identifier, with their gradients completed.
        passed: values that modules were called with while gradients were off.
    """
    if not passed:
        return frozenset()
    answered: set[int] = set()
    for inputs, outputs in reversed([*_steps(root)]):
        if any(o in answered or (o not in passed and values[o].differentiable) for o in outputs):
            answered.update(inputs)
    return frozenset(passed) - answered


def answered(trace: Trace) -> frozenset[int]:
    """The values to which a gradient comes back from what a call returns or keeps: past a `detach` none does."""
    found = {*(c.target for c in trace.root.exits), *trace.kept, *trace.left.values(), *trace.hidden}
    found = {value for value in found if trace.values[value].differentiable}
    for inputs, outputs in reversed([*_steps(trace.root)]):
        if not found.isdisjoint(outputs):
            found.update(i for i in inputs if trace.values[i].differentiable)
    return frozenset(found)


def _steps(frame: Frame) -> Iterator[Step]:
    """What is made from what, in order of execution."""
    for crossing in frame.entries:
        yield (crossing.source,), (crossing.target,)
    for node in frame.body:
        if isinstance(node, Operation):
            yield node.inputs, tuple(output for output in node.outputs if output is not None)
        else:
            yield from _steps(node)
    for crossing in frame.exits:
        yield (crossing.source,), (crossing.target,)
