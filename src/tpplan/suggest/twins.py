"""Twins: what a walk says of a layer in one block holds in all blocks that are equal.

in:  the calls of a model; what a walk found
out: the same for the layers' twins, which a walk doesn't get to: after a refusal, what follows says nothing

    layers.0.gate is refused in layers.0   ->   so are layers.1.gate, … layers.93.gate: one walk in place of 94
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from tpplan.compiler.ir.region import Instance
from tpplan.suggest.flow import Flow
from tpplan.suggest.patterns import shape_of
from tpplan.suggest.subject import Column


class Twins:
    """Knows the numbered blocks of a model that are equal: their calls share regions."""

    def __init__(self, root: Instance) -> None:
        """Find the blocks in these calls."""
        regions: dict[str, list[int]] = defaultdict(list)
        for instance in root.walk():
            if instance.frame.module.rpartition(".")[2].isdigit():
                regions[instance.frame.module].append(id(instance.region))
        families: dict[tuple[object, ...], list[str]] = defaultdict(list)
        for block, held in regions.items():
            families[shape_of(block), *held].append(block)
        self._equal = {block: family for family in families.values() if len(family) > 1 for block in family}

    def tell(self, found: Flow, columns: Mapping[str, Column]) -> None:
        """Note in `found` what holds of the twins of what was refused inside of a block, where it says nothing of them.

        Args:
            found: what a walk found.
            columns: how layers were split in it; a twin that was split otherwise isn't one.
        """
        for block in {held for name, place in found.places.items() for held in self._around(name, place)}:
            inside = [name for name, place in found.places.items() if block in self._around(name, place)]
            for other in self._equal[block]:
                names = {name: other + name[len(block) :] for name in inside}
                if other == block or any(columns.get(twin) != columns[name] for name, twin in names.items()):
                    continue
                for name, twin in names.items():
                    if twin in found.refused:
                        continue
                    found.refused[twin] = _renamed(found.refused[name], block, other)
                    if name in found.wanted:
                        found.wanted[twin] = found.wanted[name]
                    if name in found.joining:
                        found.joining.add(twin)
                for held in (found.starved, found.across):
                    for name, sources in [*held.items()]:
                        if sources <= names.keys() and name.startswith(f"{block}."):
                            held.setdefault(other + name[len(block) :], frozenset(names[source] for source in sources))

    def _around(self, name: str, place: str) -> Iterator[str]:
        """The block with twins that both a layer and a module lie in; the outermost, if there are several."""
        parts = name.split(".")
        for count in range(1, len(parts)):
            block = ".".join(parts[:count])
            if block in self._equal and f"{place}.".startswith(f"{block}."):
                yield block
                return


def _renamed(text: str, block: str, other: str) -> str:
    return re.sub(rf"`{re.escape(block)}(?=[.`])", f"`{other}", text)


__all__ = ["Twins"]
