"""Streams: every rank sends what it holds to the ranks that write, block by block.

In a round, each writer gets one block of its files. So all writers write at the same time, and no rank has more in
memory than its shards, one block that it writes, and what it sends of others.

Torch's HuggingFaceStorageWriter writes shards and joins them in a second copy on the disk. It keeps one offset for each
tensor and file, so that a tensor of which a rank holds several boxes, as of packs, gets wrong numbers without an error.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpplan.checkpoint.blocks import BlockPiece, ByteBlock, Source, blocks, lies_in_parts, sources_of
from tpplan.checkpoint.saving_ranks import Ranks
from tpplan.checkpoint.stored_tensors import Entry, File
from tpplan.checkpoint.writer import FileWriter
from tpplan.compat.dtensors import local_of

ROUND_BYTES = 64 * 1024**2
"""What all writers together get in a round; a block is at least one element."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Turn:
    """One block for one writer.

    Attributes:
        writer: its rank.
        entry: the tensor.
        local: what this rank holds of it, as integers.
        block: the block.
        sources: the ranks that have parts of it; none if each rank has the whole, or the writer is on another mesh.
    """

    writer: int
    entry: Entry
    local: Tensor
    block: ByteBlock
    sources: tuple[Source, ...]


@dataclass(slots=True)
class Streamed:
    """What became of a stream on this rank.

    Attributes:
        nan: the names of tensors that it wrote with a NaN in them.
        error: what went wrong where the other ranks had to be served nevertheless.
    """

    nan: set[str]
    error: Exception | None = None

    @contextmanager
    def going_on(self) -> Generator[None]:
        """A block whose error waits until all ranks have been served."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error


def stream(files: Sequence[File], writers: Sequence[int], ranks: Ranks, sink: FileWriter) -> Streamed:
    """Send all files to their writers, who take turns.

    Args:
        files: the files, the same on every rank.
        writers: the ranks that write.
        ranks: all ranks, which call this together.
        sink: what this rank's blocks are written with.
    """
    outcome = Streamed(set())
    share = ROUND_BYTES // len(writers)
    queues = [_turns(files[number :: len(writers)], writer, share) for number, writer in enumerate(writers)]
    while True:
        turns = [turn for queue in queues if (turn := next(queue, None)) is not None]
        if not turns:
            return outcome
        block = _exchanged(turns, ranks, outcome)
        mine = next((turn for turn in turns if turn.writer == ranks.rank), None)
        if mine is not None and block is not None and outcome.error is None:
            with outcome.going_on():
                if mine.entry.name not in outcome.nan and _has_nan(block, mine.entry.tensor.dtype):
                    outcome.nan.add(mine.entry.name)
                sink.write(block)


def _turns(files: Sequence[File], writer: int, share: int) -> Iterator[Turn]:
    for file in files:
        for entry in file.entries:
            tensor, limit = entry.tensor.detach(), max(share // entry.tensor.dtype.itemsize, 1)
            sources: tuple[Source, ...] = ()
            if isinstance(tensor, DTensor) and not lies_in_parts(tensor):
                tensor = tensor.full_tensor()  # all ranks are at this entry
            elif isinstance(tensor, DTensor):
                sources = sources_of(tensor, writer)
            local = _as_integers(local_of(tensor))
            for block in blocks(entry.tensor.shape, limit):
                yield Turn(writer, entry, local, block, sources)


def _as_integers(tensor: Tensor) -> Tensor:
    plain: Tensor = tensor.detach().resolve_conj().resolve_neg()
    return plain.view(_INTEGERS[plain.dtype.itemsize])


def _exchanged(turns: Sequence[Turn], ranks: Ranks, outcome: Streamed) -> Tensor | None:
    """This rank's block of a round, in main memory; the other ranks get theirs."""
    posted: list[dist.P2POp] = []
    arriving: list[tuple[Tensor, list[BlockPiece]]] = []
    block: Tensor | None = None
    for turn in turns:
        mine = turn.writer == ranks.rank
        if not turn.sources:
            if mine:
                with outcome.going_on():
                    block = turn.block.of(turn.local).contiguous().cpu()
            continue
        if mine:
            block = torch.empty(turn.block.sizes, dtype=turn.local.dtype)
        for source in turn.sources:
            if not (mine or source.rank == ranks.rank):
                continue
            pieces = source.pieces(turn.block)
            if not pieces:
                continue
            if source.rank != turn.writer:
                count = sum(piece.in_block.numel for piece in pieces)
                way = _way(turn)
                if mine:
                    sent = torch.empty(count, dtype=turn.local.dtype, device=way)
                    arriving.append((sent, pieces))
                    posted.append(dist.P2POp(dist.irecv, sent.view(torch.uint8), source.rank))
                else:
                    sent = _gathered(turn.local, pieces, count, way, outcome)
                    posted.append(dist.P2POp(dist.isend, sent.view(torch.uint8), turn.writer))
            elif block is not None:
                with outcome.going_on():
                    for piece in pieces:
                        piece.in_block.of(block).copy_(piece.in_part.of(turn.local))
    _wait(posted, ranks)
    with outcome.going_on():
        for sent, pieces in arriving:
            assert block is not None
            edge = 0
            for piece in pieces:
                numbers = sent[edge : edge + piece.in_block.numel]
                piece.in_block.of(block).copy_(numbers.view(piece.in_block.sizes))
                edge += piece.in_block.numel
    return block


def _way(turn: Turn) -> torch.device:
    """Where what is sent must be: in main memory for gloo, on the mesh's device for others."""
    if dist.get_backend() == "gloo" or not isinstance(turn.entry.tensor, DTensor):
        return torch.device("cpu")
    kind = turn.entry.tensor.device_mesh.device_type
    return turn.local.device if turn.local.device.type == kind else torch.device(kind)


def _gathered(local: Tensor, pieces: list[BlockPiece], count: int, way: torch.device, outcome: Streamed) -> Tensor:
    """Pieces of this rank's part, one after the other. What can't be read is still sent, as something."""
    with outcome.going_on():
        flat = [piece.in_part.of(local).reshape(-1) for piece in pieces]
        return (flat[0] if len(flat) == 1 else torch.cat(flat)).to(way)
    return torch.empty(count, dtype=local.dtype, device=way)


def _wait(posted: list[dist.P2POp], ranks: Ranks) -> None:
    try:
        for work in dist.batch_isend_irecv(posted) if posted else ():
            work.wait()
    except Exception as error:
        raise ranks.parted(error) from None


def _has_nan(block: Tensor, dtype: torch.dtype) -> bool:
    if not (dtype.is_floating_point or dtype.is_complex) or dtype is torch.float4_e2m1fn_x2:
        return False
    values: Any = block.view(dtype)
    values = values.float() if dtype.itemsize == 1 else values
    # A sum takes a fraction of the time; infinities of both signs sum up to NaN as well.
    return bool(values.sum().isnan()) and bool(values.isnan().any())


__all__ = ["Streamed", "stream"]
