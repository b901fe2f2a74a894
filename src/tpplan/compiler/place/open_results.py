"""Open results: layouts that a call leaves to the first operation which reads its result.

in:  the layouts that each result of a call could have outside, with their costs
out: one code for all of them, which stands in states until the result is read, and branches there

    norm(x, emb) -> x, gate, shift, scale, gate   with three layouts each: 243 states, or one
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tpplan.compiler.place.body import Codes
from tpplan.compiler.place.solution import Cost

MANY = 3  # of fewer results the layouts are chosen as they leave

Options = tuple[tuple[int, Cost], ...]


class OpenResults:
    """Numbers choices of layouts, below zero."""

    def __init__(self) -> None:
        """Start without any."""
        self._known: list[Options] = []
        self._codes: dict[Options, int] = {}

    def code(self, options: Options) -> int:
        """What stands for these in a state."""
        found = self._codes.get(options)
        if found is None:
            found = self._codes[options] = -1 - len(self._known)
            self._known.append(options)
        return found

    def branches(self, state: Codes, read: Sequence[int]) -> Iterator[tuple[Codes, Cost, tuple[tuple[int, int], ...]]]:
        """The states in which what stands at these places has a layout: each with its cost, and (place, layout)."""
        places = [place for place in dict.fromkeys(read) if state[place] < 0]
        for chosen in itertools.product(*(self._known[-1 - state[place]] for place in places)):
            after = list(state)
            for place, (code, _) in zip(places, chosen, strict=True):
                after[place] = code
            cost = (sum(c[0] for _, c in chosen), sum(c[1] for _, c in chosen))
            yield tuple(after), cost, tuple((place, code) for place, (code, _) in zip(places, chosen, strict=True))

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._known)


__all__ = ["MANY", "OpenResults", "Options"]
