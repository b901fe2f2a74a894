"""Numbers that Python reads: what a body is told of the entries of tensors that have none here.

in:  a question for a tensor's entries, or an operation whose results' sizes depend on them
out: the numbers, where they follow from the example's (`Known`); else an error, which a body may swallow

    grid.tolist()   ->   [[1, 4, 4]], with `values`; without: DataDependentError

What was told is part of a call's key (`ReadNumbers.facts`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tpplan.compat.schemas import OpOverload
from tpplan.compiler.ir.locations import Location, location_now
from tpplan.compiler.ir.observations import CaptureSettings, ReadNumbers
from tpplan.compiler.ir.trace import Operation
from tpplan.compiler.trace.counts import CountedRows, RowCount, is_counts
from tpplan.compiler.trace.effects import EffectObserver
from tpplan.compiler.trace.known import Known
from tpplan.compiler.trace.meta_results import META
from tpplan.compiler.trace.tape import Observer, OpenFrame, RunTape
from tpplan.compiler.trace.unfollowed import DataDependentError
from tpplan.ops.issued import COUNT_NONZERO, EQUAL, INDEX, MASKED_SELECT, NONZERO


class NumberObserver(Observer):
    """What the bodies of a run are told of numbers.

    Attributes:
        known: those that follow from the example's inputs and from constants; None if bodies may read none.
        refused: values that bodies wanted to read, with the calls in which they did.
        chosen: calls, as (module, call), that depend on what is found in a tensor.
        tested: values that the model reads or branches on, with the lines where it does.
    """

    def __init__(self, tape: RunTape, effects: EffectObserver, settings: CaptureSettings) -> None:
        """Let bodies read what is known, or nothing, as `settings` say."""
        self.known = Known() if settings.values else None
        self._emptied, self._counts = settings.emptied, list[tuple[tuple[str, int], CountedRows]]()
        self.refused: list[tuple[DataDependentError, OpenFrame]] = []
        self.chosen: set[tuple[str, int]] = set()
        self.tested: dict[int, Location | None] = {}
        self._told: dict[tuple[str, int], list[object]] = {}
        self._tape, self._effects = tape, effects

    def shown(self, value: int, numbers: Tensor) -> None:
        """Know a constant."""
        if self.known is not None:
            self.known.take(value, numbers)

    def crossed(self, outside: int, inside: int) -> None:
        """What is known of a value is known beyond a boundary."""
        if self.known is not None:
            self.known.alias(inside, outside)

    # -- what a body asks -----------------------------------------------------------------------------------------
    def read(self, tensor: Tensor) -> Tensor:
        """The numbers of a tensor that a body reads, if they are known; an error to raise if they aren't."""
        value = self._tape.value_of(tensor)
        if self.known is None or not self.known.is_readable(value):
            raise self.refuse(value)
        numbers = self.known.read(value)
        self._tell([value], numbers.tolist())  # pyright: ignore
        return numbers

    def is_known(self, value: int) -> bool:
        """Whether a value's numbers are known."""
        return self.known is not None and value in self.known

    def of(self, tensor: Tensor) -> Tensor | None:
        """The numbers of a tensor that the run has met; None if they aren't known."""
        value = self._tape.held_value(tensor)
        return None if self.known is None or value is None else self.known.of(value)

    def counts_of(self, tensor: Tensor) -> list[RowCount] | None:
        """What a body is told of numbers that aren't known and may count rows; None if they are known, or may not."""
        value = self._tape.value_of(tensor)
        if self.known is None or value in self.known or self.known.absent.get(value) or not is_counts(tensor):
            return None
        self.choose()
        self._tell([value], "counts")
        counts = CountedRows(len(tensor), self._emptied, self._refuse_count)
        self._counts.append((self._tape.frames[-1].key, counts))
        return counts.each()

    def refuse(self, value: int | None = None) -> DataDependentError:
        """Note that a body reads a value, as it may swallow the error; returns the error to raise."""
        tape = self._tape
        error = DataDependentError(f"reads the value of a tensor at {location_now()}")
        if value is not None:
            error.absent = self.known.absent.get(value, "") if self.known is not None else ""
            error.among = self._found_among(value)
        self.refused.append((error, tape.frames[-1]))
        return error

    def _found_among(self, value: int) -> int:
        """Of how many numbers a value is a place where these aren't zero, or a view of such places; 0 if it is none."""
        body = self._tape.frames[-1].body
        made = {o: node for node in body if isinstance(node, Operation) for o in node.outputs if o is not None}
        while (node := made.get(value)) is not None and len(node.inputs) == 1:
            value = node.inputs[0]
            if node.is_a("places"):
                shape = self._tape.values[value].shape
                return shape[0] if len(shape) == 1 else 0
        return 0

    def _refuse_count(self) -> DataDependentError:
        error = self.refuse()
        error.counts = True
        return error

    def choose(self) -> None:
        """Note that the body that runs depends on what is found in a tensor, in its sizes alone."""
        self.chosen.add(self._tape.frames[-1].key)

    def _tell(self, values: Sequence[int], told: object) -> None:
        self._told.setdefault(self._tape.frames[-1].key, []).append(told)
        for value in values:
            self.tested.setdefault(value, location_now())

    # -- operations -----------------------------------------------------------------------------------------------
    def sized(self, func: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any], operands: list[Tensor]) -> Any:
        """The result of an operation that shows numbers, or whose sizes do, where they are known; None otherwise."""
        known, tape = self.known, self._tape
        if known is None:
            return None
        values = [tape.value_of(operand) for operand in operands]
        if func is MASKED_SELECT and values[1] in known:
            shape = cast("Any", torch).broadcast_shapes(*(operand.shape for operand in operands))
            with tape:
                return INDEX(operands[0].expand(shape), [operands[1].expand(shape)])
        if func is EQUAL and all(value in known for value in values):
            one, other = map(self.read, operands)
            return bool(torch.equal(one, other))
        if torch.Tag.dynamic_output_shape not in func.tags:
            return None
        if func is NONZERO and not known.has_room(operands[0].numel() * operands[0].dim() * 8):
            return self._count(operands[0], values[0])
        held = dict(zip(map(id, operands), values, strict=True))
        numbers = known.computed(func, args, keywords, held, None, False)
        if numbers is None:
            return None
        found = [torch.empty_strided(n.shape, n.stride(), dtype=n.dtype, device=META) for n in numbers]
        made = self.record(func, args, keywords, values, found)
        known.note(values, made, numbers)
        for number in numbers:
            known.count(number)
        self._tell(values, [tuple(number.shape) for number in numbers])
        return found[0] if len(found) == 1 else tuple(found)

    def _count(self, tensor: Tensor, value: int) -> Tensor | None:
        """The entries of a large tensor that aren't zero, of which only the number is known."""
        known = self.known
        assert known is not None
        numbers = known.computed(COUNT_NONZERO, (tensor,), {}, {id(tensor): value}, [((), (), torch.int64)], False)
        if numbers is None:
            return None
        count = known.seen(numbers[0]).item()
        self._tell([value], count)
        found = torch.empty(int(count), tensor.dim(), dtype=torch.int64, device=META)
        self.record(NONZERO, (tensor,), {}, (value,), [found])
        return found

    def record(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        inputs: Sequence[int],
        found: Sequence[Tensor],
    ) -> tuple[int, ...]:
        """Record an operation whose results show numbers: what is made of these doesn't show that they are read."""
        tape = self._tape
        made = tuple(tape.new_value(item, False) for item in found)
        self._effects.made.update(made)
        named = {name: tape.refer(argument) for name, argument in keywords.items() if name != "device"}
        tape.add(Operation(func, tuple(map(tape.refer, args)), named, tuple(inputs), made, (), location_now()))
        return made

    def result(self, buffers: Collection[int]) -> ReadNumbers:
        """What they were told; `buffers` are the values of the model's buffers."""
        tape, known = self._tape, self.known
        storages = set(map(tape.storage_of, buffers))
        constants = (value.identifier for value in tape.values if value.numbers is not None)
        return ReadNumbers(
            facts=None if known is None else known.facts(),
            reads={call: tuple(told) for call, told in self._told.items()},
            known=frozenset() if known is None else known.values,
            chosen=frozenset(self.chosen),
            leaving_out=frozenset(call for call, counts in self._counts if counts.asked),
            tested=dict(self.tested),
            of_buffers=frozenset(value for value in constants if tape.storage_of(value) in storages),
        )


__all__ = ["NumberObserver"]
