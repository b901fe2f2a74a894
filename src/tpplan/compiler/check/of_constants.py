"""Of constants: what a body that runs from its record computes of constants alone, which the trace has no record of.

in:  the trace, and the run on local shapes
out: that run, without such operations where the trace has none

    mask = torch.ones(n, n).tril(), made on the CPU     whole: q @ k, + biases     local: where(mask, 0, -inf), q @ k, +

A tensor that a model makes of Python's numbers keeps these in the capture, and what is done with it is done, not
recorded. A record is made of its arguments' shapes. So each of these operations is the stock code's own, on what the
caller passes; what it makes is checked where it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from tpplan.compiler.check.same_steps import REARRANGING
from tpplan.compiler.ir.trace import Frame, Operation


def without_constants(whole: Frame, local: Frame, recorded: Collection[str]) -> Frame:
    """The run, of which the bodies of `recorded` modules lack what follows from constants, if the trace lacks it."""
    if not recorded:
        return local
    known = {(frame.module, frame.call): frame for frame in whole.walk()}
    made = {o for f in local.walk() for node in f.body if isinstance(node, Operation) for o in node.outputs}
    made |= {c.target for f in local.walk() for c in (*f.entries, *f.exits)}
    first = min((value for value in made if value is not None), default=0)  # what is there before comes before it

    def copied(frame: Frame) -> Frame:
        ours = known.get((frame.module, frame.call))
        body = tuple(copied(node) if isinstance(node, Frame) else node for node in frame.body)
        if frame.module in recorded and ours is not None and _names(body) != _names(ours.body):
            read = {i for node in body if isinstance(node, Operation) for i in node.inputs}
            shorter = _without(body, {i for i in read - made if i > first})
            body = shorter if _names(shorter) == _names(ours.body) else body
        return replace(frame, body=body)

    return copied(local)


def _without(body: tuple[Operation | Frame, ...], constants: set[int]) -> tuple[Operation | Frame, ...]:
    """A body without what is computed of these values, and of tensors made for that, alone."""
    created = {o for n in body if isinstance(n, Operation) and not n.inputs for o in n.outputs if o is not None}
    held, dropped = set(constants), set[int]()
    for place, node in enumerate(body):
        inputs = node.inputs if isinstance(node, Operation) else ()
        if isinstance(node, Operation) and not held.isdisjoint(inputs) and (held | created).issuperset(inputs):
            dropped.add(place)
            held.update(o for o in node.outputs if o is not None)
    kept = {i for place, node in enumerate(body) if place not in dropped for i in _read(node)}
    needless = created.difference(kept)
    return tuple(
        node
        for place, node in enumerate(body)
        if place not in dropped
        and not (isinstance(node, Operation) and not node.inputs and needless.issuperset(node.outputs))
    )


def _read(node: Operation | Frame) -> Iterable[int]:
    return node.inputs if isinstance(node, Operation) else (crossing.source for crossing in node.entries)


def _names(body: Iterable[Operation | Frame]) -> list[str]:
    return [n.name for n in body if isinstance(n, Operation) and not n.is_a(*REARRANGING)]


__all__ = ["without_constants"]
