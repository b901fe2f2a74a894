"""Correspondence: which values of the trace the values of a run on local shapes stand for.

in:  the root frames of the trace and of a run on local shapes
out: whether an operand of the one run is the same operand of the other

    a - b   where a run on local shapes computes   b - a   ->   the first operand is another value

Values are followed through what only rearranges and through module boundaries, where the two runs may differ.
"""

from __future__ import annotations

from collections.abc import Iterator

from tpplan.compiler.ir.trace import Frame, Operation


class Correspondence:
    """Two runs of one model, matched operation by operation."""

    def __init__(self, whole: Frame, local: Frame, rearranging: tuple[str, ...]) -> None:
        """Match the operations of two runs.

        Args:
            whole: the root of the trace.
            local: the root of the run on local shapes.
            rearranging: the roles of operators whose results stand for their operands.
        """
        self._rearranging = rearranging
        self._whole = _Origins(whole, rearranging)
        self._local = _Origins(local, rearranging)
        # Both runs number what is there before they start (parameters, buffers, inputs) in the same order.
        first = min(self._whole.first, self._local.first)
        self._matched: dict[int, int] = {identifier: identifier for identifier in range(first)}
        frames = {(frame.module, frame.call): frame for frame in whole.walk()}
        for frame in local.walk():
            ours = frames.get((frame.module, frame.call))
            if ours is not None:
                self._match(ours, frame)

    def _match(self, whole: Frame, local: Frame) -> None:
        exits = {crossing.path: crossing for crossing in whole.exits}
        for crossing in local.exits:
            known = exits.get(crossing.path)
            if known is not None and not local.body:  # it didn't run: its results are taken as they were promised
                self._matched[self._local(crossing.target)] = self._whole(known.target)
        for ours, theirs in zip(self._computing(whole), self._computing(local), strict=False):
            if ours.name != theirs.name and not (ours.is_a("split") and theirs.is_a("split")):
                return
            for mine, its in zip(ours.outputs, theirs.outputs, strict=False):
                if mine is not None and its is not None:
                    self._matched[its] = mine

    def _computing(self, frame: Frame) -> Iterator[Operation]:
        return (n for n in frame.body if isinstance(n, Operation) and not n.is_a(*self._rearranging))

    def differs(self, whole: int, local: int) -> bool:
        """Whether two operands are known to be different values."""
        known = self._matched.get(self._local(local))
        return known is not None and known != self._whole(whole)


class _Origins:
    """The value that a value is a rearrangement of."""

    def __init__(self, root: Frame, rearranging: tuple[str, ...]) -> None:
        self.first = 1 << 60
        self._origins: dict[int, int] = {}
        for frame in root.walk():
            for crossing in (*frame.entries, *frame.exits):
                self._note(crossing.target, crossing.source)
            for node in frame.body:
                if isinstance(node, Operation):
                    moved = node.is_a(*rearranging) and len(node.inputs) == 1
                    for output in node.outputs:
                        if output is not None:
                            self._note(output, node.inputs[0] if moved else output)

    def _note(self, value: int, origin: int) -> None:
        self.first = min(self.first, value)
        if value != origin:
            self._origins[value] = origin

    def __call__(self, value: int) -> int:
        while (origin := self._origins.get(value)) is not None:
            value = origin
        return value


__all__ = ["Correspondence"]
