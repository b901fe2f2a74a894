"""How many bytes of a checkpoint each rank reads under a program, without a process group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tpplan.checkpoint.assembled import Source, reads
from tpplan.checkpoint.dequantised import raw
from tpplan.checkpoint.header import Stored
from tpplan.checkpoint.ranges import elements
from tpplan.compiler.ir.program import ParameterPlacement, Program
from tpplan.runtime.parameters.pieces import Box, part


def bytes_by_rank(program: Program, tensors: Mapping[str, Source], buffers: Iterable[str]) -> dict[str, list[int]]:
    """The bytes that each rank reads of a checkpoint's tensors, by their names there; without those that none reads.

    Args:
        program: places the parameters. One whose shape isn't the checkpoint's is left out.
        tensors: by the model's names.
        buffers: the names of the model's buffers, which every rank reads whole, unless it stores a part.
    """
    found: dict[str, list[int]] = {}

    def add(source: Source, boxes: tuple[Box, ...], rank: int) -> None:
        for stored, inside in raw(reads(source, boxes)):
            found.setdefault(stored.name, [0] * program.size)[rank] += _bytes(stored, inside)

    for placement in program.parameters:
        source = next((tensors[name] for name in placement.names if name in tensors), None)
        if source is not None and source.shape == tuple(placement.shape):
            for rank in range(program.size):
                add(source, _boxes(placement, program.size, rank), rank)
    cut = {name for placement in program.parameters for name in placement.names}
    for name in buffers:
        if name in tensors and name not in cut:
            shape = tensors[name].shape
            whole = Box((0,) * len(shape), (0,) * len(shape), shape, True)
            for rank in range(program.size):
                add(tensors[name], (whole,), rank)
    return found


def _boxes(placement: ParameterPlacement, size: int, rank: int) -> tuple[Box, ...]:
    return part(placement.layout, 0, (None,), tuple(placement.shape), (size,), (rank,)).boxes


def _bytes(stored: Stored, boxes: Sequence[Box]) -> int:
    return stored.bytes if stored.pickled else stored.bytes_of(elements(boxes))


__all__ = ["bytes_by_rank"]
