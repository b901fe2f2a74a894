"""How a value lies on the axis, forward and backward, and the reshards between layouts.

in:  a value's placement in the forward, and the placement of the gradient that arrives for it
out: `Layout`, and `reshard_between(source, target)`: the collectives that the change costs, each way

    REPLICATED -> REPLICATED_PARTIAL   forward: nothing      backward: all-reduce       (Megatron's f)
    PARTIAL    -> REPLICATED           forward: all-reduce   backward: nothing          (f*)
    S(1)       -> REPLICATED_PARTIAL   forward: all-gather   backward: reduce-scatter   (g)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tpplan.compat import interleaved_shard, interleaving


class Collective(StrEnum):
    """A communication over one axis, or one of the two local operations that a reshard may need instead."""

    NONE = "none"
    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    SLICE = "slice"
    PAD = "pad"

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange anything."""
        return self not in (Collective.NONE, Collective.SLICE, Collective.PAD)


@dataclass(frozen=True, slots=True)
class Layout:
    """The placement of a value on the axis, with the placement of its gradient.

    Attributes:
        forward: "R" (replicated), "S" (sharded) or "P" (partial: the ranks' sum is the value).
        gradient: "R", "S" or "P" for the gradient that arrives at the value. A replicated value whose consumers also
            read sharded operands receives a partial gradient; everywhere else it is determined by `forward`.
        dim: the sharded tensor dim, counted from the front; None unless sharded.
        interleave: for a sequence flattened together with its batch, (batch · sequence, hidden), the batch size of the
            example call; otherwise 1. The ranks' shards are then interleaved along the dim (DTensor's strided shard).
    """

    forward: str
    gradient: str
    dim: int | None = None
    interleave: int = 1

    def __str__(self) -> str:
        if self.forward == "S":
            return f"S({self.dim})" if self.interleave == 1 else f"S({self.dim}, interleave={self.interleave})"
        return "R·∂P" if self == REPLICATED_PARTIAL else self.forward

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the value."""
        return self.forward == "S"

    @property
    def is_replicated(self) -> bool:
        """Whether each rank holds the whole value."""
        return self.forward == "R"

    @property
    def placement(self) -> Placement:
        """The DTensor placement of the forward value."""
        if self.forward == "R":
            return Replicate()
        if self.forward == "P":
            return Partial()
        assert self.dim is not None
        if self.interleave != 1:
            return interleaved_shard(self.dim, self.interleave)
        return Shard(self.dim)

    def local_shape(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """The shape of one rank's part of a value of global `shape` on an axis of `size` ranks."""
        if self.dim is None:
            return shape
        return (*shape[: self.dim], shape[self.dim] // size, *shape[self.dim + 1 :])


REPLICATED = Layout("R", "R")
REPLICATED_PARTIAL = Layout("R", "P")
PARTIAL = Layout("P", "R")


def sharded(dim: int, interleave: int = 1) -> Layout:
    """The layout split along tensor dim `dim` (not negative)."""
    return Layout("S", "S", dim, interleave)


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
    ("S/S", "S/S"): Collectives(Collective.ALL_TO_ALL, Collective.ALL_TO_ALL),
}


def reshard_between(source: Layout, target: Layout) -> Collectives | None:
    """The collectives of a change from `source` to `target`; None where tpplan has no such reshard."""
    if source == target:
        return Collectives(Collective.NONE, Collective.NONE)
    found = _TABLE.get((f"{source.forward}/{source.gradient}", f"{target.forward}/{target.gradient}"))
    if (
        found is not None
        and source.is_sharded
        and target.is_sharded
        and (source.interleave, target.interleave) != (1, 1)
    ):
        return None
    return found
