"""Open results: layouts that a step leaves to the first operation which combines its result with others.

in:  the layouts that each result could have, with their costs
out: one code for all of them, which stands in states until the result is read, and branches there

    norm(x, emb) -> x, gate, shift, scale, gate   with three layouts each: 243 states, or one

What reads nothing but such a result, and makes one value, leaves that open in turn: each layout goes its own way, at a
cost of its own, and none of them concerns the other values that a state is of. So six projections of two streams, each
with its view and its norm, meet as six values with three layouts, and not as 729 states.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tpplan.compiler.place.body import GONE
from tpplan.compiler.place.solution import Cost, Steps

MANY = 3  # of fewer results the layouts are chosen as they leave
_FIRST = GONE - 1
CROWDED = 32  # with fewer states, a step branches into them
TOO_MANY = 1024  # of so many states, those are kept in which values that will be joined are alike
MOST = 16384  # so many states are kept, the cheapest, and so many ways through a body at the most


@dataclass(frozen=True, slots=True)
class Option:
    """A layout that a result could have.

    Attributes:
        code: the layout's.
        cost: what it takes to make it so.
        trail: what is chosen on the way, in the body in which it stands; newest first.
        decided: whether the step that makes it has left its layout open: who reads it is to note the layout.
    """

    code: int
    cost: Cost
    trail: Steps | None = None
    decided: bool = True


class OpenResults:
    """Numbers choices of layouts, below `GONE`."""

    def __init__(self) -> None:
        """Start without any."""
        self._known: list[Sequence[Option]] = []
        self._codes: dict[Hashable, int] = {}

    def code(self, options: Sequence[Option], key: Hashable = None) -> int:
        """What stands for these in a state; `key` tells them from others, else they do so themselves."""
        key = tuple(options) if key is None else key
        found = self._codes.get(key)
        if found is None:
            found = self._codes[key] = _FIRST - len(self._known)
            self._known.append(options)
        return found

    def forget(self) -> None:
        """Number what comes anew; what has a number keeps it."""
        self._codes.clear()

    def options(self, code: int) -> Sequence[Option]:
        """What a code below zero stands for."""
        return self._known[_FIRST - code]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._known)


__all__ = ["CROWDED", "MANY", "MOST", "TOO_MANY", "OpenResults", "Option"]
