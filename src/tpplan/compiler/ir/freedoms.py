"""Freedoms: what a program may do that costs more, or that takes more to prove, than what is tried first.

in:  nothing: plain data, which `compiler/ladder.py` widens where a plan doesn't compile without
out: `Freedoms`, which the placement and the capture obey
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from tpplan.compiler.ir.layout import Features

Name = tuple[str, int]
"""A region, by the call that it was made from: the module, and the number of the call."""


@dataclass(frozen=True, slots=True)
class Freedoms:
    """What is allowed. Each field is a rung of the ladder, in its order.

    Attributes:
        slice_constants: values without a gradient may be sliced at boundaries, too.
        features: a tensor made anew with a dim of so many features may be split, in these ways.
        heads: a dim of so many heads may be split at any boundary.
        slices: operations may take parts of whole values that their bodies make.
        lengths_as_heads: dims that are as long as the batch or the sequence may be of heads, too.
        once: a value whose gradient is to be partial may cross a boundary to where it is whole.
        unread: layers are placed whose results nobody reads.
        reducing: the bodies of these modules may reduce split classes by a collective; see `ir/class_reductions`.
        moves: operands may be resharded inside of bodies.
        moving: the regions whose operations may have their operands resharded.
        bases: what stands beside the layer that a module wraps may be whole.
    """

    slice_constants: bool = False
    features: Features = frozenset()
    heads: Features = frozenset()
    slices: bool = False
    lengths_as_heads: bool = False
    once: bool = False
    unread: bool = False
    reducing: frozenset[str] = frozenset()
    moves: bool = False
    moving: frozenset[Name] = frozenset()
    bases: bool = False

    def taken(self) -> tuple[str, ...]:
        """The names of those that were granted, in order."""
        return tuple(held.name for held in fields(self) if getattr(self, held.name))

    def everywhere(self) -> tuple[object, ...]:
        """Those that hold in every region."""
        return tuple(getattr(self, held.name) for held in fields(self) if held.name != "moving")


__all__ = ["Freedoms", "Name"]
