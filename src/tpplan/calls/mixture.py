"""Mixtures: a call whose branches on data alternate in another way than in any one proof.

in:  the steps of several proofs of one program, and those of a call
out: whether each piece of the call, from branch to branch, is a piece of a proof; else where it isn't

A layer skips some of its experts, another layer others: no proof has to take the same combination. Each piece must
follow the same side of the same branch as in a proof, and the call must end as a proof ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from tpplan.calls.watch import Departure
from tpplan.compiler.ir.locations import Location
from tpplan.compiler.ir.steps import Step

Signature = frozenset[tuple[Location, bool]]
_Position = tuple[int, int]


def signature(steps: Iterable[Step]) -> Signature:
    """Which sides the branches of a run took, in any order."""
    return frozenset((step.location, step.taken) for step in steps if step.taken is not None)


class Mixture:
    """The proved pieces of one program."""

    def __init__(self, proved: Sequence[Sequence[Step]]) -> None:
        """Take the steps of each proof."""
        self._proved = proved
        self._after: dict[Step, list[_Position]] = defaultdict(list)
        for number, steps in enumerate(proved):
            for index, step in enumerate(steps):
                if step.taken is not None:
                    self._after[step].append((number, index + 1))

    def departure(self, steps: Sequence[Step]) -> Departure | None:
        """Where a call leaves the pieces; None if it is made of them."""
        positions: set[_Position] = {(number, 0) for number in range(len(self._proved))}
        for step in steps:
            reached = {(n, at + 1) for n, at in positions if self._step(n, at) == step}
            other = {(n, at) for n, at in positions if _is_other_side(self._step(n, at), step)}
            if step.taken is not None and (reached or other):
                reached.update(self._after.get(step, ()))
            if not reached:
                return Departure(self._any_step(positions), step)
            positions = reached
        if any(self._step(n, at) is None for n, at in positions):
            return None
        return Departure(self._any_step(positions), None)

    def _step(self, number: int, index: int) -> Step | None:
        steps = self._proved[number]
        return steps[index] if index < len(steps) else None

    def _any_step(self, positions: Iterable[_Position]) -> Step | None:
        return self._step(*min(positions))


def _is_other_side(proved: Step | None, real: Step) -> bool:
    return real.taken is not None and proved is not None and proved[:3] == real[:3] and proved.taken != real.taken


__all__ = ["Mixture", "Signature", "signature"]
