"""Weight norm: a weight of given directions and lengths, where each rank makes whole rows of it.

in:  the operation and the layouts of its operands
out: the layouts of its results, or the reason why there are none

    directions: S(0), lengths: S(0), of rows, dim 0   ->   S(0), and S(0) of the norms
    directions: S(1), of rows, dim 0                  ->   refused: each rank has a part of every row
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tpplan.compiler.ir.layout import Layout
from tpplan.compiler.ir.trace import Reference

WEIGHT_NORM = "aten._weight_norm_interface.default"


def weight_normed(arguments: Sequence[Any], layouts: Mapping[int, Layout]) -> tuple[Layout, ...] | str:
    """The layouts of the results; a text tells why there are none."""
    directions: Reference
    lengths: Reference
    directions, lengths = arguments[:2]
    held = layouts[directions.identifier]
    if held.dim != (arguments[2] if len(arguments) > 2 else 0) or held.interleave != 1 or held.within:
        return "normalizes rows of which each rank has a part"
    if layouts[lengths.identifier] != held:
        return "scales split rows by lengths that aren't split alike (a `colwise` rule does that)"
    return (held, held)


__all__ = ["WEIGHT_NORM", "weight_normed"]
