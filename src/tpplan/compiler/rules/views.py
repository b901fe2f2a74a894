"""Views: what a view makes of a sharded dim, found by enumeration.

in:  the shapes before and after, and the layout before
out: of the layouts that the result could have, the one by which every rank holds the very elements, in the very order,
     that its part has before; None if there is none

    (b, s, 3·hd) of S(2, packs=hd|hd|hd)  ->  (b, s, 3, h, d): S(3)
    (b, h, s, d) of S(1)                  ->  (b·h, s, d): S(0), interleaved
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy
from numpy.typing import NDArray

from tpplan.compiler.ir.layout import Layout, Pack, packed, sharded

_LARGEST = 1 << 22


@functools.lru_cache(maxsize=65536)
def viewed(source: tuple[int, ...], target: tuple[int, ...], held: Layout, size: int, batch: int) -> Layout | None:
    """The layout after a view of `source` as `target`; None if a rank's elements are no part of the result."""
    assert held.dim is not None
    if 0 in source:  # any part of nothing has the same elements
        filled = _with_elements(source, target, size)
        return viewed(*filled, held, size, batch or 1)
    last = held.dim + (1 if held.within else 0)
    group = _group(source, target, held.dim, last)
    if group is None:
        return None
    (begin, end), (first, stop) = group
    if math.prod(source[begin:end]) > _LARGEST:
        return None
    inner = replace(held, dim=held.dim - begin)
    ours = [_elements(source[begin:end], inner, size, rank) for rank in range(size)]
    for candidate in _candidates(source[begin:end], target[first:stop], inner, size, batch if first == 0 else 1):
        theirs = (_elements(target[first:stop], candidate, size, rank) for rank in range(size))
        if all(numpy.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)):
            assert candidate.dim is not None
            return replace(candidate, dim=candidate.dim + first)
    return None


def _with_elements(source: tuple[int, ...], target: tuple[int, ...], size: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of an empty tensor before and after a view, with numbers in place of 0 that let it be the same view.

    (0, 32)   and   (0, 8, 32)   on 2 ranks   ->   (16, 32)   and   (2, 8, 32)
    """
    before, after = (math.prod(filter(None, shape)) for shape in (source, target))
    common = math.gcd(before, after)
    numbers = zip((source, target), (size * after // common, size * before // common), strict=True)
    return tuple(tuple(n or (number if i == s.index(0) else 1) for i, n in enumerate(s)) for s, number in numbers)


def _group(
    source: tuple[int, ...], target: tuple[int, ...], dim: int, last: int
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The smallest runs of dims, in both shapes, that cover the same elements and contain `dim` to `last`."""
    i = j = 0
    begin = first = 0
    while i < len(source) or j < len(target):
        ours = theirs = 1
        began = (i, j)
        while True:
            if ours <= theirs and i < len(source):
                ours, i = ours * source[i], i + 1
            elif j < len(target):
                theirs, j = theirs * target[j], j + 1
            else:
                return None
            if ours == theirs and j > began[1]:
                break
        if began[0] <= dim:
            begin, first = began
        if i > last:
            while j < len(target) and target[j] == 1:
                j += 1
            return (begin, i), (first, j)
    return None


def _candidates(
    source: tuple[int, ...], target: tuple[int, ...], held: Layout, size: int, batch: int
) -> Iterator[Layout]:
    assert held.dim is not None
    inner, outer = math.prod(source[held.dim + 1 :]), math.prod(source[: held.dim])
    beside = source[held.dim + 1] if held.within else 0
    yield from _by_parts(held, source, target)
    for position, count in enumerate(target):
        if count % size == 0 or math.prod(target[position + 1 :]) == inner:
            yield sharded(position)
            if position == 0 and batch != 1 and count % (batch * size) == 0:
                yield sharded(0, interleave=batch)
    packs = held.stretches(source[held.dim])
    runs = _runs(held, source, size)
    for position, count in enumerate(target):
        unit = math.prod(target[position + 1 :])
        entries = unit == inner
        scaled = _scaled(packs, inner, unit)
        repeated = [Pack(count // outer, packs[0].replicas)] * outer if count % outer == 0 else []
        again = scaled[: len(packs) // math.prod(target[:position])]  # of packs that come again for each entry before
        joined = [scaled * outer, again] if scaled and held.packs else []
        fewer = packs[0]._replace(size=count, parts=()) if packs[0].among else Pack(count)
        alone = [[fewer], [fewer._replace(replicas=1)]] if packs[0].among else []
        proposals = [scaled, *alone, [Pack(count, packs[0].replicas)], repeated, *joined, _scaled(*runs, unit)]
        yield from (packed(position, held) for held in proposals if _fills(held, count, size, entries))
        after = target[position + 1] if position + 1 < len(target) else 1
        if held.within and after == beside:
            for proposal in (repeated, scaled):
                if _fills(proposal, count, size, entries):
                    yield packed(position, proposal, held.within)
        for replicas in range(2, size):
            holders = Pack(count, replicas)
            if _fills([holders], count, size, False):
                shared = _scaled([p for p in packs if not p.first], inner, unit // after) if packs[0].among else []
                for within in ([Pack(after)], [p._replace(among=0) for p in shared]):
                    if _fills(within, after, replicas, False):
                        yield packed(position, [holders], within)


def _by_parts(held: Layout, source: tuple[int, ...], target: tuple[int, ...]) -> Iterator[Layout]:
    """Of packs with parts the same ones, which a plain split might equal by chance; as one dim, or as two."""
    assert held.dim is not None
    if not any(pack.parts for pack in (*held.packs, *held.within)):
        return
    inner = math.prod(source[held.dim + (2 if held.joint else 1) :])
    outer = math.prod(source[: held.dim])

    def proposals(position: int, dims: int) -> Iterator[list[Pack]]:
        """Packs of so many dims from `position` on in one: the same, once for each entry before, or one of several."""
        scaled = _scaled(held.joint or held.packs, inner, math.prod(target[position + dims :]))
        fewer = scaled[: len(scaled) // math.prod(target[:position])]
        whole = math.prod(target[position : position + dims])
        yield from (p for p in (scaled, scaled * outer, fewer) if p and sum(pack.size for pack in p) == whole)

    for position in range(len(target)):
        yield from (packed(position, proposal) for proposal in proposals(position, 1))
    for position, group in enumerate(target[1:]):
        if target[position] > 1 and group:
            rows = ((proposal, _rows(proposal, group)) for proposal in proposals(position, 2))
            yield from (packed(position, held, both) for both, held in rows if held)


def _rows(both: Sequence[Pack], group: int) -> list[Pack]:
    """Of packs of two dims in one, as keys and their repeats, those of the first; none if a rank's part is no box."""
    found: list[Pack] = []
    for pack in both:
        rows = tuple((first // group, -(-(first + n) // group) - first // group) for first, n in pack.parts)
        if not rows or pack.size % group or not all(n and n % rows[r][1] == 0 for r, (_, n) in enumerate(pack.parts)):
            return []
        found.append(Pack(pack.size // group, parts=rows))
    return found


def _runs(held: Layout, source: tuple[int, ...], size: int) -> tuple[list[Pack], int]:
    """What the holders of a part share out, as packs of the two dims in one, and the size of an entry of these."""
    assert held.dim is not None
    if not held.within or held.joint:
        return [], 1
    holders = held.packs[0].replicas
    found = [p._replace(first=first, among=holders) for first in range(0, size, holders) for p in held.within]
    return found, math.prod(source[held.dim + 2 :])


def _scaled(packs: Sequence[Pack], unit: int, other: int) -> list[Pack]:
    """Packs of entries of size `unit`, in entries of another size; none if they aren't whole."""
    scaled = [p.scaled(unit, other) for p in packs]
    return [p for p in scaled if p is not None] if None not in scaled else []


def _fills(packs: Sequence[Pack], count: int, size: int, entries: bool) -> bool:
    """Whether these could be a dim's packs; uneven ones only where its entries are those of the dim before the view."""
    shared = all(p.size and (p.fits(size) if entries else p.is_even(size)) for p in packs)
    return shared and sum(p.size for p in packs) == count


def _elements(shape: tuple[int, ...], held: Layout, size: int, rank: int) -> NDArray[Any]:
    """The flat positions of the elements that `rank` holds of a tensor of `shape`, in its order."""
    assert held.dim is not None
    whole = numpy.arange(math.prod(shape), dtype=numpy.int64).reshape(shape)
    count = shape[held.dim]
    if held.joint:
        both = whole.reshape((*shape[: held.dim], -1, *shape[held.dim + 2 :]))
        return _elements(both.shape, Layout("S", "S", held.dim, packs=held.joint), size, rank)
    if held.interleave != 1:
        blocks = numpy.arange(count).reshape(held.interleave, size, -1)[:, rank].reshape(-1)
        return numpy.take(whole, blocks, held.dim).reshape(-1)
    parts = [
        numpy.take(whole, range(start, start + length), held.dim) for start, length in held.intervals(count, size, rank)
    ]
    mine = numpy.concatenate(parts, held.dim)
    if held.within:
        parts = [numpy.take(mine, range(start, start + n), held.dim + 1) for start, n in _within(held, size, rank)]
        mine = numpy.concatenate(parts, held.dim + 1)
    return mine.reshape(-1)


def _within(held: Layout, size: int, rank: int) -> list[tuple[int, int]]:
    assert held.dim is not None
    packs, holders, place = held.shares(held.dim + 1, size, rank)
    return Layout("S", "S", 0, packs=packs).intervals(0, holders, place)


__all__ = ["viewed"]
