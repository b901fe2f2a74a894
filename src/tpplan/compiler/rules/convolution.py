"""Convolution: grouped convolutions over channels that are split, of which each rank computes whole groups.

in:  a convolution and the layouts of its operands
out: the layout of its result, or the reason why there is none; and how many groups a rank has

    x: S(1), weight: S(0), bias: S(0), groups = channels   ->   S(1): every rank convolves its own channels
    x: S(2), its length                                    ->   refused: at the edges it needs what other ranks hold
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpplan.compiler.ir.layout import Layout, Pack, packed
from tpplan.compiler.ir.region import LocalValue
from tpplan.compiler.ir.trace import Reference

CONVOLUTION = "aten.convolution.default"
GROUPS = 8  # the position of this argument
_TRANSPOSED = 6


def convolved(
    arguments: Sequence[Any], values: Sequence[LocalValue], layouts: Mapping[int, Layout], size: int
) -> tuple[Layout] | str:
    """The layout of a convolution's result; a text tells why there is none.

    Args:
        arguments: the operation's; tensors are references into `values`.
        values: their geometry.
        layouts: of its operands, by number.
        size: of the axis.
    """
    x: Reference
    weight: Reference
    x, weight, bias = arguments[:3]
    split = weight_layout(arguments, values, layouts[x.identifier], size)
    if isinstance(split, str):
        return split
    if layouts[weight.identifier] != split or (isinstance(bias, Reference) and layouts[bias.identifier] != split):
        return "convolves split channels with a weight or a bias that isn't split alike (a `colwise` rule does that)"
    return (replace(split, dim=1),)


def weight_layout(arguments: Sequence[Any], values: Sequence[LocalValue], held: Layout, size: int) -> Layout | str:
    """How the weight and the bias have to lie where the input lies like `held`; a text tells why nothing will do."""
    x: Reference
    weight: Reference
    groups: int
    x, weight, groups = arguments[0], arguments[1], arguments[GROUPS]
    if held.dim != 1 or held.interleave != 1 or held.within or arguments[_TRANSPOSED]:
        return "needs values that other ranks hold"
    shape = values[weight.identifier].shape
    each, made = shape[1], shape[0] // groups
    stretches = held.stretches(values[x.identifier].shape[1])
    if not all(_holds_groups(stretch, each, made, size) for stretch in stretches):
        return "mixes channels of a group that several ranks hold"
    made_of = (s if s.parts else Pack(s.size // each * made, s.replicas) for s in stretches)
    return packed(0, made_of)


def _holds_groups(stretch: Pack, each: int, made: int, size: int) -> bool:
    """Whether every rank's part of the channels is whole groups of `each` channels, of which `made` are made."""
    if each == made == 1:
        return stretch.fits(size)
    return stretch.is_even(size) and stretch.local(size, 0) % each == 0


def local_groups(groups: int, layout: Layout, channels: int, size: int, rank: int) -> int:
    """How many of a convolution's groups `rank` computes, of an input of so many channels that lies like `layout`."""
    return groups if layout.dim != 1 else groups * layout.local_size(channels, size, rank) // channels


__all__ = ["CONVOLUTION", "GROUPS", "convolved", "local_groups", "weight_layout"]
