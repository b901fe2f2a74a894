"""Blocks: a tensor in stretches of limited size, as a file has them, and which ranks hold what of each.

in:  a tensor of the model, the rank that writes it
out: its blocks; for each, what comes from which rank
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from tpplan.compat.dtensors import local_of
from tpplan.compat.placements import interleaving
from tpplan.runtime.parameters.packed_tensors import PackedTensor
from tpplan.runtime.parameters.pieces import Part, narrowed
from tpplan.runtime.parameters.whole_states import part_of


class ByteBlock(NamedTuple):
    """A box of a tensor; as a stretch of one, or as a rank's share of such a stretch.

    Attributes:
        start: its offsets.
        sizes: its sizes.
    """

    start: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.sizes)

    def of(self, tensor: Tensor) -> Tensor:
        """Of a tensor; a view."""
        return narrowed(tensor, self.start, self.sizes)


class BlockPiece(NamedTuple):
    """What a rank holds of a block: where it lies in the block, and in the rank's part."""

    in_block: ByteBlock
    in_part: ByteBlock


class Source(NamedTuple):
    """A rank from which a tensor is taken, and what it holds."""

    rank: int
    part: Part

    def pieces(self, block: ByteBlock) -> list[BlockPiece]:
        """What it is the first to hold of a block."""
        found: list[BlockPiece] = []
        for box in self.part.owned:
            met = box.met(block.start, block.sizes)
            if met is not None:
                within = tuple(first - edge for first, edge in zip(met.start, block.start, strict=True))
                found.append(BlockPiece(ByteBlock(within, met.sizes), ByteBlock(met.place, met.sizes)))
        return found


def blocks(shape: Sequence[int], limit: int) -> Iterator[ByteBlock]:
    """Boxes of up to `limit` elements that follow each other in memory, over the whole tensor."""
    shape = tuple(shape)
    count = math.prod(shape)
    if not count:
        return
    if count <= limit or not shape:
        yield ByteBlock((0,) * len(shape), shape)
        return
    row = count // shape[0]
    if row <= limit:
        rows, rest = limit // row, shape[1:]
        for first in range(0, shape[0], rows):
            yield ByteBlock((first, *(0 for _ in rest)), (min(rows, shape[0] - first), *rest))
        return
    for first in range(shape[0]):
        for start, sizes in blocks(shape[1:], limit):
            yield ByteBlock((first, *start), (1, *sizes))


def lies_in_parts(tensor: DTensor) -> bool:
    """Whether `part_of` tells what a rank holds; else the tensor is one that tpplan didn't make."""
    if isinstance(tensor, PackedTensor):
        return True
    *others, own = (interleaving(placement) for placement in tensor.placements)
    whole = [p for p, split in zip(tensor.placements, (*others, own), strict=True) if split is None]
    if not all(p.is_replicate() for p in whole) or (own is not None and own[1] != 1):
        return False
    cuts = Counter(split[0] for split in others if split is not None)
    for split in others:
        # FSDP says by the factor that it cuts what tensor parallelism gives to a rank.
        within = tensor.device_mesh.size(-1) if own is not None and split is not None and split[0] == own[0] else 1
        if split is not None and (split[1] != within or cuts[split[0]] > 1):
            return False
    return part_of(tensor).shape == tuple(local_of(tensor).shape)


def sources_of(tensor: DTensor, writer: int) -> tuple[Source, ...]:
    """The ranks from which `writer` takes a tensor; none if this rank's mesh isn't that of `writer`."""
    mesh = tensor.device_mesh
    ranks = mesh.mesh
    where = (ranks == writer).nonzero()
    if not len(where):
        return ()
    here = [int(place) for place in where[0]]
    if isinstance(tensor, PackedTensor):
        packing = tensor.packing
        cut = [cut is not None or axis == packing.axis for axis, cut in enumerate(packing.chunks)]
    else:
        cut = [interleaving(placement) is not None for placement in tensor.placements]
    choices = [range(mesh.size(axis)) if cut[axis] else (here[axis],) for axis in range(mesh.ndim)]
    return tuple(Source(int(ranks[place]), part_of(tensor, place)) for place in itertools.product(*choices))


__all__ = ["BlockPiece", "ByteBlock", "Source", "blocks", "lies_in_parts", "sources_of"]
