"""Real tensors among those on `meta`: constants, whose numbers a model may read, up to where the run writes to them.

in:  tensors that the model makes out of Python's numbers on its own device
out: what stands for each of them in the record, with its numbers

    torch.tensor([1, 2]) + x   ->   a constant (1, 2), and add(constant, x)

Some may only be followed: those that each call changes, and those that may pick modules and steer nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tpplan.compat.schemas import OpOverload, schema_mutates
from tpplan.compat.tensors import storage_key
from tpplan.compiler.ir.locations import Location, location_now
from tpplan.compiler.trace.meta_results import results_in
from tpplan.compiler.trace.numbers_read import NumberObserver
from tpplan.compiler.trace.tape import RunTape
from tpplan.compiler.trace.unfollowed import UnfollowedError
from tpplan.ops.issued import NUMBER


class RealTensors:
    """What is known of the real tensors of a run.

    Attributes:
        changing: ids of those that each call changes, and of what is made of them.
        picked: ids of those that may only pick, and of what is made of them.
        blurred: values whose numbers each call changes.
        steering: where their values are read.
        large: those around the model that can't be put back after a run, by their memory.
    """

    def __init__(self, tape: RunTape, numbers: NumberObserver) -> None:
        """Know of none yet."""
        self.changing: set[int] = set()
        self.picked: set[int] = set()
        self.blurred: set[int] = set()
        self.steering: list[Location | None] = []
        self.large: Mapping[int, Tensor] = {}
        self._tape, self._numbers = tape, numbers
        self._copies: dict[int, Tensor] = {}
        self._redrawn: dict[int, Tensor] = {}  # memory that the run has written to, with a tensor of each

    def follow(self, func: OpOverload, operands: Iterable[Tensor], result: Any, indexing: bool) -> None:
        """Follow those that each call changes, or that may only pick, up to where their values are read."""
        for held in (self.changing, self.picked):
            if held.isdisjoint(map(id, operands)):
                continue
            if func is NUMBER and held is self.changing:
                self.steering.append(location_now())
            elif func is NUMBER and not indexing:
                raise self._numbers.refuse()
            for made in tensors_among(results_in(result)):
                held.add(id(made))
                self._tape.alive.append(made)

    def refuse_writing(self, written: Iterable[Tensor]) -> None:
        """Refuse to write to what can't be put back."""
        for tensor in written:
            if not tensor.is_meta and (held := self.large.get(storage_key(tensor))) is not None:
                raise UnfollowedError(
                    f"it writes to a tensor of {held.numel():,} numbers that is in a global, of which no copy is kept",
                    "keep it in a buffer of a module (`register_buffer`), which is a part of the model's state",
                )

    def on_meta(
        self, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Arguments of a call with what stands for the real tensors among them, and all their tensors."""
        args, keywords = tuple(map(self._convert, args)), {name: self._convert(a) for name, a in keywords.items()}
        return args, keywords, tensors_among((*args, *keywords.values()))

    def _convert(self, argument: Any) -> Any:
        if isinstance(argument, Tensor) and not argument.is_meta:
            return self.copy(argument)
        if isinstance(argument, (list, tuple)):
            return type(argument)(map(self._convert, argument))  # pyright: ignore
        return argument

    def copy(self, constant: Tensor) -> Tensor:
        """What stands for a real tensor in the record, with a gradient where that has one, as by what was written."""
        copy = self._copies.get(id(constant))
        if copy is None:
            copy = self._made_copy(constant)
        if constant.requires_grad:
            self._tape.meet_again(constant, self._tape.value_of(copy))
        return copy

    def _made_copy(self, constant: Tensor) -> Tensor:
        tape = self._tape
        tape.alive.append(constant)
        whole = self._redrawn.get(storage_key(constant), constant) if self._redrawn else constant
        if whole is not constant:
            copy = self._copies[id(constant)] = self._part_of(whole, constant)
            return copy
        copy = self._copies[id(constant)] = torch.empty_strided(
            constant.shape, constant.stride(), dtype=constant.dtype, device="meta"
        )
        numbers = None if id(constant) in self.picked else constant
        made = tape.new_value(copy, False, storage_of=tape.value_of(constant), numbers=numbers)
        if id(constant) in self.changing:
            self.blurred.add(made)
        return copy

    def stand_for(self, places: Tensor, found: Tensor, only_picks: bool) -> None:
        """Let `found` stand for a real tensor that may pick modules, or that may do nothing else."""
        self._copies[id(places)] = found
        if only_picks:
            self.picked.add(id(places))
        self._tape.alive.append(places)

    def _part_of(self, whole: Tensor, part: Tensor) -> Tensor:
        """A view of what stands for a real tensor, where another one lies in its memory."""
        offset = part.storage_offset() - whole.storage_offset()
        fits = part.dtype is whole.dtype and whole.is_contiguous() and offset >= 0
        last = offset + sum((n - 1) * step for n, step in zip(part.shape, part.stride(), strict=True))
        if not fits or last >= whole.numel():
            raise UnfollowedError(
                "it writes to a tensor of which it holds other parts, and which it has made without a `device`",
                "make it on the device of what is written to it, as by `device=x.device`",
            )
        base = self.copy(whole)
        with self._tape:
            return torch.as_strided(base, part.shape, part.stride(), offset)

    def is_redrawn(self, tensor: Tensor) -> bool:
        """Whether a real tensor's numbers aren't what they would be in a call, as the run has written to it."""
        return bool(self._redrawn) and not tensor.is_meta and storage_key(tensor) in self._redrawn

    def redraw(self, tensor: Tensor) -> None:
        """Take a real tensor, and all others in its memory, for no constants from here on."""
        if tensor.is_meta or self.is_redrawn(tensor):
            return
        whole = tensor if tensor._base is None else tensor._base
        self.copy(whole)
        self._redrawn[storage_key(whole)] = whole
        for other in self._tape.alive:  # what stands for a part has to be one of what stands for the whole
            if other is not whole and self.is_redrawn(other):
                self._copies.pop(id(other), None)

    def drawing(
        self, func: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any], operands: Sequence[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """As `on_meta`, of an operation that draws by constants; what it writes to is no constant then."""
        writes = bool(schema_mutates(func))
        if writes:
            self.redraw(operands[0])
        args, keywords, operands = self.on_meta(args, keywords)
        if writes:
            written, values = self._tape.value_of(args[0]), self._tape.values
            values[written] = replace(values[written], numbers=None)  # it reads none of them
        return args, keywords, operands


def tensors_among(arguments: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments of an operator, also in its lists of them."""
    found: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found.extend(item for item in argument if isinstance(item, Tensor))  # pyright: ignore
    return found


__all__ = ["RealTensors", "tensors_among"]
