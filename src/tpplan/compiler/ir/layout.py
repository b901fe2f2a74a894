"""How a value lies on the axis, forward and backward, and the reshards between layouts.

in:  a value's placement in the forward, and the placement of the gradient that arrives for it
out: `Layout`, and `reshard_between(source, target)`: the collectives that the change costs, each way

    REPLICATED -> REPLICATED_PARTIAL   forward: nothing      backward: all-reduce       (Megatron's f)
    PARTIAL    -> REPLICATED           forward: all-reduce   backward: nothing          (f*)
    LARGEST    -> REPLICATED           forward: all-gather   backward: nothing          of the ranks' largest entries
    S(1)       -> ending(1)            forward: all-reduce   backward: slice            of the last entry alone
    S(1)       -> REPLICATED_PARTIAL   forward: all-gather   backward: reduce-scatter   (g)
    REPLICATED_PARTIAL -> REPLICATED   forward: nothing      backward: first            counted on the first rank alone
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tpplan.compat.placements import interleaved_shard, interleaving


class Collective(StrEnum):
    """A communication over one axis, or one of the three local operations that a reshard may need instead."""

    NONE = "none"
    ALL_REDUCE = "all-reduce"
    ONE_SHOT = "one-shot all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    SLICE = "slice"
    PAD = "pad"
    FIRST = "first"

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange anything."""
        return self not in (Collective.NONE, Collective.SLICE, Collective.PAD, Collective.FIRST)


def all_reduce_of(count: int, dtype: torch.dtype, one_shot: int) -> Collective:
    """How ranks sum a tensor: in one step, each reading what all others have, or as the process group does it.

    All ranks must decide alike, so it depends on nothing else.

    Args:
        count: bytes of the tensor.
        dtype: of the tensor: torch's kernel knows float32 and bfloat16, in whole words of 4 bytes.
        one_shot: the largest that are summed in one step, in bytes.
    """
    fits = 0 < count <= one_shot and not count % 4 and dtype in (torch.float32, torch.bfloat16)
    return Collective.ONE_SHOT if fits else Collective.ALL_REDUCE


class Pack(NamedTuple):
    """A stretch of a sharded dim that is shared out over the ranks by itself, such as q of q|k|v.

    The parts are those of `torch.chunk` and of DTensor's `Shard`: as long as an even part rounded up, then one that is
    shorter, then none. So the first rank's part is never the shorter one.

    Attributes:
        size: of the whole stretch.
        replicas: how many consecutive ranks hold the same part of it: the key and value heads of grouped-query
            attention where they are fewer than the ranks. Of the ranks that share it, the r-th holds part
            r // replicas.
        first, among: the ranks that share it, if not all do: so many from this one on. A group of queries that is
            packed with its key and value is shared by some of the ranks where there are fewer groups than ranks.
        parts: what each rank holds, as start and length, where that doesn't follow from the size: whole heads that
            the axis doesn't divide (`ir/heads.py`). Parts of neighbours may overlap.
    """

    size: int
    replicas: int = 1
    first: int = 0
    among: int = 0
    parts: tuple[tuple[int, int], ...] = ()

    def part(self, size: int, rank: int) -> tuple[int, int]:
        """What `rank` holds on an axis of `size` ranks: (start, length)."""
        if self.parts:
            return self.parts[rank]
        ranks, place = self.among or size, rank - self.first
        if not 0 <= place < ranks:
            return 0, 0
        longest = -(-self.size * self.replicas // ranks)
        start = min(place // self.replicas * longest, self.size)
        return start, min(longest, self.size - start)

    def local(self, size: int, rank: int) -> int:
        """How much of it `rank` holds on an axis of `size` ranks."""
        return self.part(size, rank)[1]

    def owned(self, size: int, rank: int) -> tuple[int, int]:
        """Of what `rank` holds, that of which it is the first holder: (start, length)."""
        start, length = self.part(size, rank)
        if self.parts:
            first = max((sum(held) for held in self.parts[:rank]), default=0)
            return max(start, first), start + length - max(start, first)
        return start, length if (rank - self.first) % self.replicas == 0 else 0

    @property
    def is_shared(self) -> bool:
        """Whether several ranks hold the same entries of it, so that their gradients of these are partial."""
        return self.replicas > 1 or sum(length for _, length in self.parts) > self.size

    def scaled(self, unit: int, other: int) -> Pack | None:
        """The same stretch of entries of size `unit`, in entries of size `other`; None if it isn't whole in these."""
        numbers = (self.size, *(n for part in self.parts for n in part))
        if any(n * unit % other for n in numbers):
            return None
        parts = tuple((start * unit // other, length * unit // other) for start, length in self.parts)
        return self._replace(size=self.size * unit // other, parts=parts)

    def is_even(self, size: int) -> bool:
        """Whether all ranks that share it hold as much of it."""
        if self.parts:
            return False
        ranks = self.among or size
        return ranks % self.replicas == 0 and self.size % (ranks // self.replicas) == 0

    def fits(self, size: int) -> bool:
        """Whether it can be shared out; a part that several ranks hold must be as long as all others."""
        return len(self.parts) == size if self.parts else self.replicas == 1 or self.is_even(size)


Features = frozenset[tuple[Pack, ...]]
"""Ways to split features: the stretches of a dim that counts them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The placement of a value on the axis, with the placement of its gradient.

    Attributes:
        forward: "R" (replicated), "S" (sharded), "P" (partial: the ranks' sum is the value), "T" (the tail: of the size
            of the whole on each rank, and equal to it in the last entries of the sequence, dim 1), "MAX" or "MIN" (the
            largest or the smallest of the ranks' is the value), or "?" (each rank has something else).
        gradient: "R", "S" or "P" for the gradient that arrives at the value. A replicated value whose consumers also
            read sharded operands receives a partial gradient; everywhere else it is determined by `forward`.
        dim: the sharded tensor dim, counted from the front; None unless sharded.
        interleave: for a sequence flattened together with its batch, (batch · sequence, hidden), the batch size of the
            example call; otherwise 1. The ranks' shards are then interleaved along the dim (DTensor's strided shard).
        packs: for a dim that packs several stretches, these; a rank holds its part of each, one after the other. Empty
            for a dim that is one stretch with one holder for each part.
        within: the packs of the dim after `dim`, which the holders of one part share out among themselves: repeated key
            and value heads, (…, heads, repeats, …), of which each holder of a head keeps its own repeats, or groups of
            queries with their key and value, (…, groups, queries + 2, …). Empty if they all hold the whole of it. A
            pack with `parts` is that of both dims in one: a rank's part of it is its part of `dim` times the rest.
        tail: of "T", how many entries; otherwise 0.
        inner_dim: of a parameter of stacked experts, of which several ranks share each: the dim that `within` is of, in
            place of the next. No two ranks hold the same entries, unless `within` says so.
    """

    forward: str
    gradient: str
    dim: int | None = None
    interleave: int = 1
    packs: tuple[Pack, ...] = ()
    within: tuple[Pack, ...] = ()
    tail: int = 0
    inner_dim: int | None = None

    def __str__(self) -> str:
        if self.tail:
            return f"T({self.tail})"
        if self.forward == "S":
            return f"S({', '.join([str(self.dim), *self._details()])})"
        return "R·∂P" if self == REPLICATED_PARTIAL else self.forward

    def _details(self) -> list[str]:
        found = [f"interleave={self.interleave}"] if self.interleave != 1 else []
        if self.inner_dim is not None:
            found.append(f"{'on the first of' if self.is_on_first else 'each on'} {self.packs[0].replicas} ranks")
            return found if self.is_on_first else [*found, f"by dim {self.inner_dim}: {_shown(self.within)}"]
        if len(self.packs) == 1:
            (pack,) = self.packs
            if pack.among:
                last = pack.first + pack.among - 1
                found.append(f"rank {pack.first}" if pack.among == 1 else f"ranks {pack.first} to {last}")
            if pack.parts or pack.replicas > 1:
                found.append(f"parts={_parts(pack)}" if pack.parts else f"replicas={pack.replicas}")
        elif self.packs:
            found.append(f"packs={_shown(self.packs)}")
        return found + ([f"within={_shown(self.within)}"] if self.within else [])

    @property
    def is_plain(self) -> bool:
        """Whether it is no more than a DTensor placement on the axis, one part to a rank."""
        return not self.packs

    @property
    def is_everywhere(self) -> bool:
        """Whether no pack is known to lie on some of the ranks alone."""
        return not any(pack.among for pack in self.packs)

    @property
    def has_replicas(self) -> bool:
        """Whether several ranks hold the same part, so that their gradients of it are partial."""
        return any(pack.is_shared for pack in self.packs) and self.inner_dim is None

    @property
    def is_on_first(self) -> bool:
        """Whether of the ranks that share a stacked expert the first holds its part alone; the others read zeros."""
        return self.inner_dim is not None and len(self.within) == 1 and self.within[0].among == 1

    @property
    def next_dim(self) -> int:
        """The dim that the holders of one part share out, where `within` says how."""
        return self.inner_dim if self.inner_dim is not None else (self.dim or 0) + 1

    @property
    def joint(self) -> tuple[Pack, ...]:
        """The packs of the sharded dim and the next in one, where the ranks share out both together."""
        return self.within if self.inner_dim is None and any(pack.parts for pack in self.within) else ()

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the value."""
        return self.forward == "S"

    @property
    def is_extreme(self) -> bool:
        """Whether each rank has the largest, or the smallest, of its own entries."""
        return self.forward in (LARGEST.forward, SMALLEST.forward)

    @property
    def is_replicated(self) -> bool:
        """Whether each rank holds the whole value."""
        return self.forward == "R"

    @property
    def placement(self) -> Placement:
        """The DTensor placement of the forward value, as if its packs were one stretch."""
        if self.forward == "R":
            return Replicate()
        if self.forward == "P":
            return Partial()
        assert self.dim is not None
        return Shard(self.dim) if self.interleave == 1 else interleaved_shard(self.dim, self.interleave)

    @property
    def stored_placement(self) -> Placement:
        """The DTensor placement of a parameter without packs."""
        return self.placement if self.is_sharded else Replicate()  # what is added on a single rank is whole on each

    @property
    def bare(self) -> Layout:
        """The same dim, as if it were one stretch."""
        return self if self.is_plain else Layout(self.forward, self.gradient, self.dim)

    def stretches(self, count: int) -> tuple[Pack, ...]:
        """The packs of a sharded dim of `count` entries; one of a dim that is a single stretch."""
        return self.packs or (Pack(count),)

    def is_even(self, count: int, size: int) -> bool:
        """Whether all of `size` ranks hold as many of the `count` entries of the sharded dim."""
        return all(pack.is_even(size) for pack in self.stretches(count))

    def local_shape(self, shape: tuple[int, ...], size: int, rank: int) -> tuple[int, ...]:
        """The shape of what `rank` holds of a value of global `shape` on an axis of `size` ranks."""
        if self.dim is None:
            return shape
        local = [*shape]
        local[self.dim] = self.local_size(shape[self.dim], size, rank)
        if self.joint:
            local[self.dim + 1] = sum(pack.local(size, rank) for pack in self.joint) // local[self.dim]
        elif self.within:
            packs, holders, place = self.shares(self.next_dim, size, rank)
            local[self.next_dim] = sum(pack.local(holders, place) for pack in packs)
        return tuple(local)

    def shares(self, dim: int, size: int, rank: int) -> tuple[tuple[Pack, ...], int, int]:
        """The packs of `dim`, how many ranks share them out, and which of these `rank` is; no packs if it has none."""
        if self.within and dim == self.next_dim:
            return self.within, self.packs[0].replicas, rank % self.packs[0].replicas
        return (self.packs if dim == self.dim else ()), size, rank

    def local_size(self, count: int, size: int, rank: int) -> int:
        """How many of the `count` entries of the sharded dim `rank` holds."""
        return sum(pack.local(size, rank) for pack in self.stretches(count))

    def longest(self, count: int, size: int) -> int:
        """How many of the `count` entries of the sharded dim a rank holds at most."""
        return self.local_size(count, size, self.fullest(count, size))

    def fullest(self, count: int, size: int) -> int:
        """The first rank that holds as many of the `count` entries of the sharded dim as any."""
        if not any(pack.parts for pack in self.packs):
            return 0
        return max(range(size), key=lambda rank: (self.local_size(count, size, rank), -rank))

    def local_start(self, dim: int, start: int, count: int, size: int, rank: int) -> int:
        """Where a stretch of a packed dim, of `count` entries, that begins at `start` begins on `rank`.

        It is counted from the same end of the dim: an index from the back stays one.
        """
        packs, ranks, place = self.shares(dim, size, rank)
        first = start + (count if start < 0 else 0)
        edge = local = whole = 0
        for pack in packs:
            held = pack.local(ranks, place)
            if edge < first:
                edge, local = edge + pack.size, local + held
            whole += held
        return local - whole if start < 0 else local

    def intervals(self, count: int, size: int, rank: int) -> list[tuple[int, int]]:
        """What `rank` holds of the `count` entries of the sharded dim: (start, length), in local order."""
        found: list[tuple[int, int]] = []
        edge = 0
        for pack in self.stretches(count):
            start, length = pack.part(size, rank)
            found.append((edge + start, length))
            edge += pack.size
        return found


REPLICATED = Layout("R", "R")
REPLICATED_PARTIAL = Layout("R", "P")
PARTIAL = Layout("P", "R")
LARGEST = Layout("MAX", "R")  # of values to which no gradient comes back: it would go to the ranks that have them
SMALLEST = Layout("MIN", "R")
UNKNOWN = Layout("?", "R")


def ending(count: int) -> Layout:
    """The layout of which the last `count` entries of the sequence are there on each rank."""
    return Layout("T", "R", tail=count)


def sharded(dim: int, interleave: int = 1) -> Layout:
    """The layout split along tensor dim `dim` (not negative)."""
    return Layout("S", "S", dim, interleave)


def in_packs(held: Layout, shape: tuple[int, ...]) -> Layout:
    """A strided shard as packs."""
    if held.dim is None or held.interleave == 1:
        return held
    return packed(held.dim, [Pack(shape[held.dim] // held.interleave)] * held.interleave)


def packed(dim: int, packs: Iterable[Pack], within: Iterable[Pack] = ()) -> Layout:
    """The layout split along tensor dim `dim`, each of `packs` by itself.

    The dim after it is shared out `within` the holders of a part, unless each of them has the whole of it.
    """
    held = tuple(packs)
    if len(held) == 1 and held[0].replicas == 1 and not (held[0].among or held[0].parts):
        held = ()
    holders = max((pack.replicas for pack in held), default=1)
    inner = tuple(within)
    shared = any(p.parts or p.replicas != holders for p in inner)
    return Layout("S", "S", dim, packs=held, within=inner if shared else ())


def _shown(packs: Iterable[Pack]) -> str:
    """Packs in a line: `32|16/2 replicas`, `32@2` for one that the ranks from 2 on share, `14 (6|4|4)` with parts."""

    def shown(pack: Pack) -> str:
        replicas = f"/{pack.replicas} replicas" if pack.replicas > 1 else ""
        parts = f" ({_parts(pack)})" if pack.parts else ""
        return f"{pack.size}{replicas}" + (f"@{pack.first}" if pack.among else "") + parts

    return "|".join(map(shown, packs))


def _parts(pack: Pack) -> str:
    """What the ranks hold, `6|4|4`; by the first and the last entry, `0-4|2-7`, where they share some."""
    if not pack.is_shared:
        return "|".join(str(length) for _, length in pack.parts)
    return "|".join(f"{start}-{start + length - 1}" for start, length in pack.parts)


def layout_of(placement: Placement) -> Layout | None:
    """The layout of a forward placement that DTensor's propagator returned; None for one that tpplan can't carry.

    A replicated result is given a replicated gradient; the propagation pass decides whether it is partial.
    """
    if isinstance(placement, Replicate):
        return REPLICATED
    split = interleaving(placement)
    if split is not None:
        return sharded(*split)
    if type(placement) is Partial and placement.reduce_op == "sum":
        return PARTIAL
    return None


@dataclass(frozen=True, slots=True)
class Collectives:
    """What a reshard does in the forward and in the backward."""

    forward: Collective
    backward: Collective


_TABLE: dict[tuple[str, str], Collectives] = {
    ("R/R", "R/P"): Collectives(Collective.NONE, Collective.ALL_REDUCE),
    ("P/R", "R/R"): Collectives(Collective.ALL_REDUCE, Collective.NONE),
    ("P/R", "R/P"): Collectives(Collective.ALL_REDUCE, Collective.ALL_REDUCE),
    ("P/R", "S/S"): Collectives(Collective.REDUCE_SCATTER, Collective.ALL_GATHER),
    ("S/S", "R/P"): Collectives(Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
    ("S/S", "R/R"): Collectives(Collective.ALL_GATHER, Collective.SLICE),
    ("R/R", "S/S"): Collectives(Collective.SLICE, Collective.ALL_GATHER),
    ("R/P", "S/S"): Collectives(Collective.SLICE, Collective.PAD),
    ("R/P", "R/R"): Collectives(Collective.NONE, Collective.FIRST),
    ("S/S", "S/S"): Collectives(Collective.ALL_TO_ALL, Collective.ALL_TO_ALL),
    ("MAX/R", "R/R"): Collectives(Collective.ALL_GATHER, Collective.NONE),
    ("MAX/R", "R/P"): Collectives(Collective.ALL_GATHER, Collective.NONE),
    ("MIN/R", "R/R"): Collectives(Collective.ALL_GATHER, Collective.NONE),
    ("MIN/R", "R/P"): Collectives(Collective.ALL_GATHER, Collective.NONE),
    # Of what is left once the rest was cut off.
    ("T/R", "R/R"): Collectives(Collective.NONE, Collective.NONE),
    ("T/R", "R/P"): Collectives(Collective.NONE, Collective.ALL_REDUCE),
}


def reshard_between(source: Layout, target: Layout) -> Collectives | None:
    """The collectives of a change from `source` to `target`; None where tpplan has no such reshard."""
    if source == target:
        return Collectives(Collective.NONE, Collective.NONE)
    if target.tail:
        return Collectives(Collective.ALL_REDUCE, Collective.SLICE) if source == sharded(1) else None
    found = _TABLE.get((f"{source.forward}/{source.gradient}", f"{target.forward}/{target.gradient}"))
    special = [held for held in (source, target) if held.interleave != 1 or not held.is_plain]
    if any(held.has_replicas or any(pack.among for pack in held.packs) for held in special):
        return None  # the gradients of replicas would have to be summed on the way
    if special and source.is_sharded and target.is_sharded:
        return None
    if any(held.packs for held in special) and source == PARTIAL:
        return None
    return found
