"""How many bytes of a checkpoint each rank reads under a program, without a process group."""

from __future__ import annotations

from collections.abc import Mapping

from tpplan.checkpoint.header import BITS, Stored
from tpplan.checkpoint.ranges import elements
from tpplan.compiler.ir.program import ParameterPlacement, Program
from tpplan.runtime.pieces import part


def bytes_by_rank(program: Program, tensors: Mapping[str, Stored]) -> dict[str, tuple[int, ...]]:
    """For each tensor that the program's model has as a parameter, the bytes that each rank reads of it.

    A tensor whose shape is another than the parameter's is left out. Buffers are read whole by every rank.
    """
    found: dict[str, tuple[int, ...]] = {}
    for placement in program.parameters:
        name = next((name for name in placement.names if name in tensors), None)
        if name is not None and tensors[name].shape == tuple(placement.shape):
            found[name] = tuple(_bytes(placement, tensors[name], program.size, rank) for rank in range(program.size))
    return found


def _bytes(placement: ParameterPlacement, stored: Stored, size: int, rank: int) -> int:
    held = part(placement.layout, 0, (None,), tuple(placement.shape), (size,), (rank,))
    return elements(held.boxes) * BITS[stored.dtype] // 8


__all__ = ["bytes_by_rank"]
