"""Slices: whole values beside values that are split by heads, of which each rank takes the part of its own heads.

in:  the operands of an operation that can't run as they lie
out: layouts for some of its whole operands, as the results of slices that run inside of the body

    scores: S(1), heads · biases: R·∂P, (heads, length, length)   ->   biases: S(0), from here on

A boundary can't serve a value that its body makes. The value's gradient is partial then, as is that of any value which
is read beside split ones: each rank contributes that of its part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from tpplan.compiler.ir.layout import REPLICATED, REPLICATED_PARTIAL, Layout
from tpplan.compiler.ir.program import splits_sequence
from tpplan.compiler.ir.region import LocalValue

_MOST = 24


def ways_to_slice(
    numbers: Sequence[int], values: Sequence[LocalValue], layout: Callable[[int], Layout]
) -> Iterator[dict[int, Layout]]:
    """Layouts for whole operands as slices, those of fewer operands first.

    Args:
        numbers: of the operands, by local number.
        values: the body's.
        layout: how each operand lies.
    """
    split = {i: layout(i) for i in numbers if _by_heads(layout(i), values[i].shape)}
    whole = [i for i in numbers if _may_be_sliced(values[i], layout(i))]
    if not split or not whole:
        return
    options = [[None, *_parts(values[i].shape, split, values)] for i in whole]
    found = itertools.islice(itertools.product(*options), 1, _MOST)
    for chosen in sorted(found, key=lambda held: len(held) - held.count(None)):
        yield {i: held for i, held in zip(whole, chosen, strict=True) if held is not None}


def _by_heads(held: Layout, shape: tuple[int, ...]) -> bool:
    """Whether a value is split along a dim before its features."""
    if not held.is_sharded or held.within or held.dim is None or len({*held.packs}) > 1:
        return False
    return len(shape) > 2 and held.dim < len(shape) - 1 and not splits_sequence(held, shape)


def _may_be_sliced(value: LocalValue, held: Layout) -> bool:
    if not value.shape:
        return False
    return held == REPLICATED_PARTIAL or (
        held == REPLICATED and (value.parameter is not None or not value.differentiable)
    )


def _parts(shape: tuple[int, ...], split: Mapping[int, Layout], values: Sequence[LocalValue]) -> list[Layout]:
    """The splits of a value of this shape along a dim of as many entries; first along the one that would line up."""
    found: list[Layout] = []
    for other, held in split.items():
        assert held.dim is not None
        count = values[other].shape[held.dim]
        aligned = held.dim - len(values[other].shape) + len(shape)
        dims = sorted((d for d, n in enumerate(shape) if n == count), key=lambda d: d != aligned)
        found += [replace(held, dim=dim) for dim in dims if dim == 0 or held.interleave == 1]
    return [*dict.fromkeys(found)]


__all__ = ["ways_to_slice"]
