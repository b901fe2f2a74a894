"""A recorded construction as plain data: what was done to which memory, in order, and what was drawn.

    weight = torch.empty(4, 8)     ->  Operation(aten.empty, …, outputs=(View(storage 0, (4, 8)),))
    weight.normal_()               ->  Operation(aten.normal_, (View(storage 0, …),), draw=Draw(stream 0, position 0))

Tensors are views of numbered storages. So views need no operation of their own, and two names of one memory are one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpplan.compat.schemas import OpOverload


class View(NamedTuple):
    """A tensor: where it lies in a storage.

    Attributes:
        storage: the storage's number.
        dtype, shape, stride, offset: as torch has them.
        conjugate: whether it reads as the conjugate of what is stored.
    """

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool


class RandomStream(NamedTuple):
    """Stands for a generator in an operation's arguments."""

    number: int


@dataclass(frozen=True, slots=True)
class Draw:
    """That an operation draws random numbers.

    Attributes:
        stream: of which generator.
        position: how many draws that generator has made before.
        jump: where Python has put the generator since its last draw: a state, or the state after so many draws.
    """

    stream: int
    position: int
    jump: Tensor | int | None


@dataclass(frozen=True, slots=True, eq=False)
class InitialOperation:
    """One call of an operator.

    Attributes:
        function: the operator.
        args, kwargs: its arguments, with `View` for tensors and `RandomStream` for generators.
        outputs: its results; None for those that are no tensors or share memory with what was there before.
        reads: the storages whose numbers it depends on.
        writes: those that it writes to, its new results among them.
        whole: those that it writes all of.
        draw: whether it draws.
    """

    function: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[View | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    whole: frozenset[int]
    draw: Draw | None


@dataclass(frozen=True, slots=True)
class Storage:
    """A piece of memory.

    Attributes:
        stand_in: a tensor over the memory on `meta` that stood for it.
        device: where it lies in the stock model.
        constant: its bytes, if it came from Python's numbers.
    """

    stand_in: Tensor
    device: torch.device
    constant: Tensor | None

    @property
    def size(self) -> int:
        """In bytes."""
        return self.stand_in.untyped_storage().nbytes()


__all__ = ["Draw", "InitialOperation", "RandomStream", "Storage", "View"]
