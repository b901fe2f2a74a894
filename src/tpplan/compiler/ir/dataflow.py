"""Data flow: who makes and who reads each value of a trace, for the passes that follow values through it.

in:  a trace
out: `DataFlow`: by value, the operation that made it, the operations that read it, and the crossings on either side;
     each table is made when it is first asked for, once for all passes
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

from tpplan.compat.schemas import schema_mutates
from tpplan.compiler.ir.trace import Frame, Operation, Reference, Trace


class DataFlow:
    """The edges of one trace."""

    def __init__(self, trace: Trace) -> None:
        """Look at `trace`."""
        self.trace = trace

    @cached_property
    def made(self) -> dict[int, Operation]:
        """The operation that made a value."""
        return {
            output: node
            for frame in self._frames
            for node in frame.body
            if isinstance(node, Operation)
            for output in node.outputs
            if output is not None
        }

    @cached_property
    def source(self) -> dict[int, int]:
        """For a value made by a crossing, that on the other side."""
        return {c.target: c.source for frame in self._frames for c in (*frame.entries, *frame.exits)}

    @cached_property
    def targets(self) -> dict[int, list[int]]:
        """The values that crossings make of a value."""
        found: dict[int, list[int]] = defaultdict(list)
        for target, source in self.source.items():
            found[source].append(target)
        return found

    @cached_property
    def operations(self) -> dict[int, list[tuple[Frame, Operation]]]:
        """The operations that read a value, with their frames, in order of execution."""
        found: dict[int, list[tuple[Frame, Operation]]] = defaultdict(list)
        for frame in self._frames:
            for node in frame.body:
                if isinstance(node, Operation):
                    for value in dict.fromkeys(node.inputs):
                        found[value].append((frame, node))
        return found

    @cached_property
    def written(self) -> frozenset[int]:
        """The values that operations write to, in whatever way, also where nobody reads them afterwards."""
        found: set[int] = set()
        for frame in self.trace.recorded.walk():
            for node in frame.body:
                if isinstance(node, Operation) and (places := schema_mutates(node.target)):
                    found.update(node.overwritten)
                    given = (a for place in places for a in node.arguments[place : place + 1])
                    found.update(a.identifier for a in given if isinstance(a, Reference))
        return frozenset(found)

    @cached_property
    def left(self) -> frozenset[int]:
        """The values that the call leaves with its caller, as in a cache."""
        return frozenset(self.trace.effects.left.values())

    @cached_property
    def _frames(self) -> tuple[Frame, ...]:
        return tuple(self.trace.root.walk())


__all__ = ["DataFlow"]
