"""Weights that a body computes: which of its operations do, and how finely what is repeated beside them is shared out.

in:  a region
out: `Weights`: its values that follow from parameters alone, those that follow from split ones, and the widths of these

    w / w.norm(dim=1, keepdim=True).expand_as(w)   with w: S(1)   ->   all three; the norms are repeated for a part of w
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tpplan.compiler.ir.layout import Features, Layout, Pack
from tpplan.compiler.ir.region import OperationNode, Region


@dataclass(frozen=True, slots=True)
class Weights:
    """What of a body's values are weights.

    Attributes:
        lasting: the values that follow from parameters, and from what is there before a call, alone.
        split: of these the ones that follow from a split parameter.
        widths: the split dims of the parameters, as packs.
    """

    lasting: frozenset[int]
    split: frozenset[int]
    widths: Features

    @classmethod
    def of(cls, region: Region, passed: Mapping[int, Layout] | None = None) -> Weights:
        """Those of a region, which may be passed further ones that lie so."""
        passed, values = passed or {}, [*enumerate(region.values)]
        lasting = {i for i, held in values if held.parameter is not None or held.constant or held.weight} | {*passed}
        split = {i for i, held in values if held.weight} | {i for i, held in passed.items() if held.is_sharded}
        for node in region.nodes:
            if isinstance(node, OperationNode) and lasting.issuperset(node.inputs):
                made = [o for o in node.outputs if o is not None]
                lasting.update(made)
                split.update(made if not split.isdisjoint(node.inputs) else ())
        layouts = {i: held.parameter for i, held in values if held.parameter is not None} | {**passed}
        return cls(frozenset(lasting), frozenset(split), _widths(region, layouts))

    def compute(self, node: OperationNode) -> bool:
        """Whether an operation computes of parameters alone, of which one is split."""
        return self.lasting.issuperset(node.inputs) and not self.split.isdisjoint(node.inputs)


def _widths(region: Region, layouts: Mapping[int, Layout]) -> Features:
    found: set[tuple[Pack, ...]] = set()
    for i, held in layouts.items():
        if held.dim is not None and not held.within:
            found.add(held.packs or (Pack(region.values[i].shape[held.dim]),))
    if region.of_weights:  # of what it is passed, the layout isn't known yet
        found |= {(Pack(size),) for held in region.values if held.weight for size in held.shape if size > 1}
    return frozenset(found)


__all__ = ["Weights"]
