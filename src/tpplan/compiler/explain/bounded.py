"""Bounded: where the placement had more ways than it follows, and how many it gave up.

in:  regions, how many ways weren't followed in each
out: TP137 for each module whose program may cost more than it has to
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from tpplan.compiler.ir.region import Instance
from tpplan.compiler.ir.trace import quoted
from tpplan.plan import Diagnostic


def bounded(root: Instance, cut: Mapping[int, int]) -> list[Diagnostic]:
    """A note for each module with ways that weren't followed, by the first of those that share its regions."""
    first: dict[int, str] = {}
    for held in root.walk():
        first.setdefault(id(held.region), held.frame.module)
    counts: dict[str, int] = defaultdict(int)
    for region, module in first.items():
        counts[module] += cut.get(region, 0)
    return [
        Diagnostic(
            code="TP137",
            message=f"{quoted(module)} has too many ways to lay out its values: {count:,} weren't followed",
            help="what is found is right, but another way may send less; pins (`input`, `output`) leave fewer ways",
            subject=module,
        )
        for module, count in counts.items()
        if count
    ]


__all__ = ["bounded"]
