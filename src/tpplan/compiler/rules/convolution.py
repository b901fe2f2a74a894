"""Convolution: grouped convolutions over channels that are split, of which each rank computes whole groups.

in:  a convolution and the layouts of its operands
out: the layout of its result, or the reason why there is none; and how many groups a rank has

    x: R·∂P, weight: S(0), bias: S(0)                      ->   S(1): every rank makes its own channels
    x: S(1), weight: S(1), bias: P                         ->   P: every rank has its channels' part of the sums
    x: S(1), weight: S(0), bias: S(0), groups = channels   ->   S(1): every rank convolves its own channels
    x: S(2), its length                                    ->   refused: at the edges it needs what other ranks hold
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpplan.compiler.ir.layout import PARTIAL, Layout, Pack, packed
from tpplan.compiler.ir.region import LocalValue
from tpplan.compiler.ir.trace import Reference

GROUPS = 8  # the position of this argument
TRANSPOSED = 6


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
    if arguments[GROUPS] == 1:
        beside = layouts[bias.identifier] if isinstance(bias, Reference) else None
        return _multiplied(layouts[x.identifier], layouts[weight.identifier], beside, arguments[TRANSPOSED])
    split = weight_layout(arguments, values, layouts[x.identifier], size)
    if isinstance(split, str):
        return split
    if layouts[weight.identifier] != split or (isinstance(bias, Reference) and layouts[bias.identifier] != split):
        return "convolves split channels with a weight or a bias that isn't split alike (a `colwise` rule does that)"
    return (replace(split, dim=1),)


def _multiplied(x: Layout, weight: Layout, bias: Layout | None, transposed: bool) -> tuple[Layout] | str:
    """The layout of a convolution of all channels with each other: a product by its channels."""
    made, contracted = (1, 0) if transposed else (0, 1)
    if any(held.interleave != 1 or held.within for held in (x, weight)):
        return "needs values that other ranks hold"
    if x.is_replicated and weight.dim == made:
        if bias is not None and bias != replace(weight, dim=0):
            return "makes split channels with a bias that isn't split alike (a `colwise` rule does that)"
        return (replace(weight, dim=1),)
    if any(pack.replicas > 1 or pack.among for pack in x.packs):
        return "sums over channels that several ranks share"
    if x.dim == 1 and weight == replace(x, dim=contracted):
        if bias not in (None, PARTIAL):
            return "adds a whole bias to the sums of each rank (a `rowwise` rule adds it on one)"
        return (PARTIAL,)
    return "mixes channels that several ranks hold"


def weight_layout(arguments: Sequence[Any], values: Sequence[LocalValue], held: Layout, size: int) -> Layout | str:
    """How the weight and the bias have to lie where the input lies like `held`; a text tells why nothing will do."""
    x: Reference
    weight: Reference
    groups: int
    x, weight, groups = arguments[0], arguments[1], arguments[GROUPS]
    if held.dim != 1 or held.interleave != 1 or held.within or arguments[TRANSPOSED]:
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
    if groups == 1:
        return 1
    return groups if layout.dim != 1 else groups * layout.local_size(channels, size, rank) // channels


__all__ = ["GROUPS", "TRANSPOSED", "convolved", "local_groups", "weight_layout"]
