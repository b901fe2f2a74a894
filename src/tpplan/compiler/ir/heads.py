"""Heads that the axis doesn't divide: which of the queries, and of the keys that they use, each rank has.

in:  the numbers of query and key heads, and of ranks
out: for each rank the queries and the keys that it holds, each as start and length

    6 queries with 6 keys on 4 ranks    ->  2, 2, 1, 1 queries
    28 queries with 4 keys on 8 ranks   ->  4, 3, 4, 3, 4, 3, 4, 3, each pair of ranks with one key
    14 queries with 2 keys on 3 ranks   ->  5 of the first key, 2 of either, 5 of the second
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

Parts = tuple[tuple[int, int], ...]

ROW_BYTES = 16
"""What torch's product of grouped rows asks of each row, forward and backward: it starts at a multiple of so many."""


class HeadParts(NamedTuple):
    """What each rank holds, as start and length."""

    queries: Parts
    keys: Parts


def cannot_share(count: int, ranks: int) -> str:
    """Why so many heads, or other parts, can't lie on `ranks` ranks, to go on a sentence about them."""
    return f"fewer than the {ranks} ranks" if count < ranks else f"which {ranks} ranks can't split evenly"


def fitting_ranks(heads: int, ranks: int) -> str:
    """What to do about heads that `ranks` ranks can't share out, as an instruction."""
    if heads < ranks:
        return f"use at most {heads} {'rank' if heads == 1 else 'ranks'}"
    found = [str(n) for n in range(2, 65) if heads % n == 0]
    return f"use a size of the axis that divides {heads} ({', '.join(found[:6]) or 'none up to 64 does'})"


def even_parts(count: int, ranks: int) -> Parts:
    """The parts of which none is longer than another by more than one; the longer ones come first."""
    least, more = divmod(count, ranks)
    return tuple((rank * least + min(rank, more), least + (rank < more)) for rank in range(ranks))


@functools.lru_cache(maxsize=256)
def head_parts(queries: int, keys: int, ranks: int) -> HeadParts | None:
    """The parts by which no rank has more queries than need be; None if there are none.

    A rank has as many queries of each of its keys, so that its own code can repeat a key for its queries. Of the parts
    with the same largest number, those are taken that have the fewest keys in all, then those that differ least.
    """
    if keys < 1 or queries % keys or queries < ranks:
        return None
    group = queries // keys
    for most in range(-(-queries // ranks), queries + 1):
        lengths = _lengths(queries, group, ranks, most)
        if lengths is not None:
            break
    else:
        return None
    starts = [sum(lengths[:rank]) for rank in range(ranks)]
    held = tuple(zip(starts, lengths, strict=True))
    return HeadParts(held, tuple((a // group, _keys(a, n, group)) for a, n in held))


def _lengths(queries: int, group: int, ranks: int, most: int) -> tuple[int, ...] | None:
    """How many queries each rank has, at most so many; None if that can't be."""
    # By the number of queries that the ranks so far have: the keys in all, the squares, and the parts.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for rank in range(ranks):
        after: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for start, (keys, squares, lengths) in best.items():
            for length in _choices(start, group, most):
                end = start + length
                if end > queries - (ranks - rank - 1) or queries - end > most * (ranks - rank - 1):
                    continue
                cost = (keys + _keys(start, length, group), squares + length * length)
                found = (*cost, (*lengths, -length))  # of equal ones the longer part comes first
                after[end] = min(after.get(end, found), found)
        best = after
    return tuple(-n for n in best[queries][2]) if queries in best else None


def _choices(start: int, group: int, most: int) -> Iterator[int]:
    """How many queries from `start` on may be one part: of one key, as many of two keys, or whole groups."""
    left = group - start % group
    yield from range(1, min(left, most) + 1)
    if left == group:
        yield from range(2 * group, most + 1, group)
    elif 2 * left <= most:
        yield 2 * left


def _keys(start: int, length: int, group: int) -> int:
    return (start + length - 1) // group - start // group + 1


__all__ = ["ROW_BYTES", "HeadParts", "Parts", "cannot_share", "even_parts", "fitting_ranks", "head_parts"]
