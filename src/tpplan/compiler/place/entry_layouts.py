"""Entries: the layouts that a call's arguments could have inside of it, all combinations of them.

in:  a region, the layouts of its inputs
out: for each combination the codes, its cost, and the choice; or the failure, if there is none
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeVar

from tpplan.compiler.ir.layout import PARTIAL, Layout
from tpplan.compiler.ir.region import Region
from tpplan.compiler.place.body import Body, Codes, Numbering
from tpplan.compiler.place.boundaries import Boundaries
from tpplan.compiler.place.solution import Choice, Cost, Failure, State, Steps
from tpplan.compiler.rules.propagate import Refusal

States = dict[Codes, tuple[Cost, Steps | None]]
_Entry = tuple[Codes, Cost, State]
_Held = TypeVar("_Held", bound=Layout | None)


class Entries:
    """Enters regions, by one placement's boundaries and numbers of layouts."""

    def __init__(self, boundaries: Boundaries, numbering: Numbering) -> None:
        """Enter by these."""
        self.boundaries = boundaries
        self.numbering = numbering

    def ways(self, region: Region, body: Body, inputs: Codes) -> Iterator[_Entry]:
        """The layouts that the entries could have inside."""
        sources, code = self.numbering.layouts(body.entries(inputs + body.constants)), self.numbering.code
        ways: list[tuple[Codes, State, int, int]] = [((), (), 0, 0)]
        for boundary, source in zip(region.entries, sources, strict=True):
            options = [
                ((code(held),), (held,), *cost)
                for held, cost in self.boundaries.entry_options(region, boundary, source)
            ]
            ways = [
                (codes + one, layouts + held, cost + more, tie + further)
                for codes, layouts, cost, tie in ways
                for one, held, more, further in options
            ]
        for codes, layouts, cost, tie in ways:
            yield codes, (cost, tie), layouts

    def failure(self, region: Region, body: Body, inputs: Codes) -> Failure:
        """Why there is no way in, or none out of it."""
        sources = self.numbering.layouts(body.entries(inputs + body.constants))
        for boundary, source in zip(region.entries, sources, strict=True):
            if not self.boundaries.entry_options(region, boundary, source):
                refusal = Refusal("pin", "can't take the layout that is required here", ((boundary.target, source),))
                return Failure((), None, refusal, (-1,))
        result = tuple((boundary.source, PARTIAL) for boundary in region.exits[:1])
        refusal = Refusal("pin", "no layout of the result is possible here", result)
        return Failure((), None, refusal, (-1,))


def combined(branches: Sequence[Sequence[tuple[_Held, Cost]]]) -> Iterator[tuple[tuple[_Held, ...], Cost]]:
    """Every combination of options, and its cost."""
    for combination in itertools.product(*branches):
        cost = (sum(c[0] for _, c in combination), sum(c[1] for _, c in combination))
        yield tuple(held for held, _ in combination), cost


def keep(states: States, key: Codes, cost: Cost, choice: Choice, before: Steps | None) -> None:
    """Note a state, unless there is a cheaper way to it."""
    known = states.get(key)
    if known is None or cost < known[0]:
        states[key] = (cost, Steps(choice, before))


__all__ = ["Entries", "States", "combined", "keep"]
