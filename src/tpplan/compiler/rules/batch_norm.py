"""Batch norm: each rank normalizes its own channels, and keeps their running statistics.

in:  a batch norm and the layouts of its operands
out: the layouts of its results, or the reason why there are none; and the statistics that it writes

    x: S(1), weight, bias, running mean and variance: S(0)   ->   S(1), and S(0) of the batch's statistics
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpplan.compiler.ir.layout import Layout, sharded
from tpplan.compiler.ir.region import LocalValue
from tpplan.compiler.ir.trace import Reference
from tpplan.ops.registry import has_role

_STATISTICS, _TRAINING = slice(3, 5), 5  # the positions of these arguments


def batch_normed(
    arguments: Sequence[Any], values: Sequence[LocalValue], layouts: Mapping[int, Layout]
) -> tuple[Layout, ...] | str:
    """The layouts of the results; a text tells why there are none. See `convolution.convolved` for the arguments."""
    x, *beside = (held for held in arguments[:_TRAINING] if isinstance(held, Reference))
    held = layouts[x.identifier]
    if held.dim != 1 or held.interleave != 1 or held.within:
        return "needs values that other ranks hold"
    if held.has_replicas:
        return "normalizes channels that several ranks share"
    by_channel = replace(held, dim=0)
    if any(values[i].parameter is None for i in _kept(arguments)):
        return "writes to statistics that are no buffers, or that no rule splits"
    if any(layouts[reference.identifier] != by_channel for reference in beside):
        return (
            "scales split channels by a weight, a bias or statistics that aren't split alike (a `colwise` rule does "
            "that)"
        )
    of_batch = by_channel if arguments[_TRAINING] else sharded(0)  # of which there are none otherwise
    return (held, of_batch, of_batch)


def kept_statistics(name: str, arguments: Sequence[Any]) -> tuple[int, ...]:
    """The running statistics that an operation writes to, which its schema doesn't tell."""
    return _kept(arguments) if has_role(name, "batch norm") else ()


def _kept(arguments: Sequence[Any]) -> tuple[int, ...]:
    if not arguments[_TRAINING]:
        return ()
    return tuple(held.identifier for held in arguments[_STATISTICS] if isinstance(held, Reference))


__all__ = ["batch_normed", "kept_statistics"]
