# pyright: reportPrivateUsage=false
"""Placements: torch's shards in turns."""

from __future__ import annotations

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def interleaved_shard(dim: int, factor: int) -> Placement:
    """The placement of a dim that was flattened from (factor, sharded): DTensor's strided shard. For every torch."""
    return _StridedShard(dim, split_factor=factor)


def interleaving(placement: Placement) -> tuple[int, int] | None:
    """The dim and the factor of an interleaved shard, (dim, 1) of a plain one; None for another placement.

    For every torch.
    """
    if isinstance(placement, _StridedShard):
        return int(placement.dim), int(placement.split_factor)  # pyright: ignore[reportUnknownArgumentType]
    return (int(placement.dim), 1) if isinstance(placement, Shard) else None  # pyright: ignore[reportUnknownArgumentType]
