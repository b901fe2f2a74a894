"""Group norm: channels that are split into whole groups, of which each rank normalizes its own.

in:  a group norm and the layouts of its operands
out: the layouts of its results, or the reason why there are none; and its sizes on a rank

    x: S(1), weight: S(0), bias: S(0), 8 groups on 4 ranks   ->   S(1), and S(1) of the statistics by group
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpplan.compiler.ir.layout import Layout, Pack, packed
from tpplan.compiler.ir.region import LocalValue
from tpplan.compiler.ir.trace import Reference

CHANNELS, GROUPS = 4, 6  # the positions of these arguments


def group_normed(
    arguments: Sequence[Any], values: Sequence[LocalValue], layouts: Mapping[int, Layout], size: int
) -> tuple[Layout, ...] | str:
    """The layouts of the results; a text tells why there are none. See `convolution.convolved` for the arguments."""
    x, *beside = (held for held in arguments[:3] if isinstance(held, Reference))
    held = layouts[x.identifier]
    each = arguments[CHANNELS] // arguments[GROUPS]
    if held.dim != 1 or held.interleave != 1 or held.within:
        return "needs values that other ranks hold"
    stretches = held.stretches(values[x.identifier].shape[1])
    if not all(pack.is_even(size) and pack.local(size, 0) % each == 0 for pack in stretches):
        return "normalizes groups of channels that several ranks hold"
    if any(layouts[reference.identifier] != replace(held, dim=0) for reference in beside):
        return "scales split channels by a weight or a bias that isn't split alike (a `colwise` rule does that)"
    by_group = packed(1, [Pack(pack.size // each, pack.replicas) for pack in stretches])
    return (held, by_group, by_group)


def local_sizes(arguments: Sequence[Any], layout: Layout, size: int, rank: int) -> tuple[int, int]:
    """How many channels and groups of an input that lies like `layout` a rank has."""
    channels, groups = arguments[CHANNELS], arguments[GROUPS]
    own = channels if layout.dim != 1 else layout.local_size(channels, size, rank)
    return own, groups * own // channels


__all__ = ["CHANNELS", "GROUPS", "group_normed", "local_sizes"]
