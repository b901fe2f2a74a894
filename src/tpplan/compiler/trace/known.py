"""Known: the numbers of tensors on `meta` that follow from the example's inputs and from constants.

in:  the example's tensors, and operations as they are recorded
out: the numbers of their results, beside these; what of them the model's Python reads

    grid, an input                       ->   [[1, 4, 4], [1, 4, 8]]
    (grid[:, 1] * grid[:, 2]).tolist()   ->   [16, 32], and the fact that this was read
    grid * self.scale                    ->   nothing, as parameters and buffers have no numbers here

They are computed by the operations themselves, on tensors that share memory where those on `meta` are views of each
other, so that writes in place are seen by all of them. What would take much memory isn't computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpplan.compat.modes import Unwatched
from tpplan.compat.schemas import OpOverload, is_random, schema_mutates, schema_returns_view
from tpplan.compat.tensors import storage_key
from tpplan.compiler.ir.facts import ComputedFact, Facts, FactSlot, Read, on, replaced, results_of
from tpplan.compiler.ir.trace import Geometry, Path
from tpplan.ops.registry import UNSET

_LARGEST = 1 << 25  # bytes of one result
_MOST = 1 << 28  # bytes of all


class Known:
    """Numbers by the values that have them; see the module's docstring."""

    def __init__(self) -> None:
        """Know nothing."""
        self.device = torch.device("cpu")
        self.absent: dict[int, str] = {}  # values that would be known if the example's input of this name had numbers
        self.inputs: dict[Path, int] = {}
        self._numbers: dict[int, Tensor] = {}
        self._measured: set[int] = set()  # values that follow from an input of floating-point numbers
        self._room = _MOST
        self._slots: dict[int, int] = {}
        self._alive: list[Tensor] = []  # by slot; ids are only unique while their objects live
        self._made: set[int] = set()  # slots of what operations have made
        self._borrowed: set[int] = set()  # memory of the example's own
        self._steps: list[ComputedFact | Read] = []

    def __contains__(self, value: int) -> bool:
        return value in self._numbers

    def of(self, value: int) -> Tensor | None:
        """The numbers of a value."""
        return self._numbers.get(value)

    def is_readable(self, value: int) -> bool:
        """Whether a body may read a value: not what is measured of an activation, which is another in each call."""
        return value in self and not (value in self._measured and self._numbers[value].is_floating_point())

    @property
    def values(self) -> frozenset[int]:
        """The values whose numbers are known."""
        return frozenset(self._numbers)

    # -- where numbers come from ----------------------------------------------------------------------------------
    def take_input(self, path: Path, value: int, tensor: Tensor) -> None:
        """Know an input of the example; whole numbers and flags are copied, as the model may write to them."""
        if type(tensor) is not Tensor or tensor.is_meta:
            if not tensor.is_floating_point():
                self.absent[value] = str(path[0])
            return
        if not self.inputs:
            self.device = tensor.device
        numbers, bytes_ = tensor.detach(), tensor.numel() * tensor.itemsize
        if not numbers.is_floating_point() and bytes_ <= _LARGEST:
            numbers = _copied(numbers)
        else:
            self._borrowed.add(storage_key(numbers))
        if numbers.is_floating_point():
            self._measured.add(value)
        self.inputs[path] = self._slot(numbers)
        self._numbers[value] = numbers

    def take(self, value: int, numbers: Tensor) -> None:
        """Know a constant."""
        self._numbers[value] = numbers

    def alias(self, value: int, of: int) -> None:
        """Know of a value what is known of another one, of which it is an alias."""
        if of in self._numbers:
            self._numbers[value] = self._numbers[of]
        if of in self._measured:
            self._measured.add(value)
        if of in self.absent:
            self.absent[value] = self.absent[of]

    def forget(self, values: Sequence[int]) -> None:
        """Know nothing more of these, as something unknown was written to them."""
        for value in values:
            self._numbers.pop(value, None)

    # -- operations -----------------------------------------------------------------------------------------------
    def computed(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        operands: dict[int, int],
        made: Sequence[Geometry | None] | None,
        writes: bool,
    ) -> Sequence[Any] | None:
        """The results of an operation, with numbers; None if it isn't known what they are.

        Args:
            func, args, keywords: the operation.
            operands: the values of its tensors, by their ids.
            made: the geometry of its results; None if that depends on the numbers.
            writes: whether it writes to an operand.
        """
        if not all(value in self._numbers for value in operands.values()) or _is_unset(func) or is_random(func):
            return None
        if writes and any(storage_key(self._numbers[value]) in self._borrowed for value in operands.values()):
            return None
        if made is not None and not writes and not schema_returns_view(func) and not self.has_room(_bytes(made)):
            return None

        def real(item: Any) -> Any:
            return self._numbers[operands[id(item)]] if isinstance(item, Tensor) else item

        real_args = replaced(args, real)
        real_keywords = on(self.device, {name: replaced(item, real) for name, item in keywords.items()})
        try:
            with torch.no_grad(), Unwatched():
                result = func(*real_args, **real_keywords)
        except Exception:  # the example's numbers aren't what it wants, or it isn't there for this device
            return None
        results = results_of(result)
        if not schema_returns_view(func) and not writes:
            self._room -= sum(item.numel() * item.itemsize for item in results if isinstance(item, Tensor))
        inner = replaced(real_args, self._referred)
        named = {name: replaced(item, self._referred) for name, item in real_keywords.items()}
        slots = tuple(self._slot(item, True) if isinstance(item, Tensor) else None for item in results)
        self._steps.append(ComputedFact(func, inner, named, slots))
        return results

    def note(self, inputs: Sequence[int], values: Sequence[int | None], results: Sequence[Any]) -> None:
        """Know these values by the results of `computed` on `inputs`."""
        if not self._measured.isdisjoint(inputs):
            self._measured.update(value for value in values if value is not None)
        for value, result in zip(values, results, strict=True):
            if value is not None and isinstance(result, Tensor):
                self._numbers[value] = result

    def follow_absent(self, inputs: Sequence[int], outputs: Sequence[int | None]) -> None:
        """Say of results that they would be known if an input had numbers."""
        names = [self.absent.get(value) for value in inputs]
        name = next(filter(None, names), None)
        if name is not None and all(n or v in self._numbers for n, v in zip(names, inputs, strict=True)):
            self.absent.update((value, name) for value in outputs if value is not None)

    # -- what is read ---------------------------------------------------------------------------------------------
    def read(self, value: int) -> Tensor:
        """The numbers of a value that Python reads."""
        return self.seen(self._numbers[value])

    def seen(self, numbers: Tensor) -> Tensor:
        """Note that Python reads these numbers."""
        self._steps.append(Read(self._slot(numbers), False, numbers.detach().to("cpu", copy=True)))
        return numbers

    def has_room(self, bytes_: int) -> bool:
        """Whether a result of so many bytes is computed."""
        return bytes_ <= min(_LARGEST, self._room)

    def count(self, result: Tensor) -> None:
        """Note that the shape of a result depends on numbers."""
        self._steps.append(Read(self._slot(result), True, tuple(result.shape)))

    def facts(self) -> Facts:
        """All that was read, with the operations that lead to it, and no others."""
        memory = [storage_key(tensor) for tensor in self._alive]
        needed: set[int] = set()
        kept: list[ComputedFact | Read] = []
        for step in reversed(self._steps):
            if isinstance(step, Read):
                needed.add(memory[step.slot])
            elif any(number is not None and memory[number] in needed for number in step.results):
                needed.update(memory[number] for number in _used_by(step))
            else:
                continue
            kept.append(step)
        steps = tuple(reversed(kept))
        used = {number for step in steps for number in _used_by(step)}
        inputs = {path: number for path, number in self.inputs.items() if number in used}
        constants = {n: self._alive[n] for n in sorted(used - self._made - set(inputs.values()))}
        written = {
            memory[n]
            for step in steps
            if isinstance(step, ComputedFact) and schema_mutates(step.target)
            for n in step.results
            if n is not None
        }
        changed = {n for n in (*inputs.values(), *constants) if memory[n] in written}
        return Facts(inputs, constants, frozenset(changed), steps)

    def _slot(self, tensor: Tensor, made: bool = False) -> int:
        number = self._slots.get(id(tensor))
        if number is None:
            number = self._slots[id(tensor)] = len(self._alive)
            self._alive.append(tensor)
            if made:
                self._made.add(number)
        return number

    def _referred(self, item: Any) -> Any:
        return FactSlot(self._slot(item)) if isinstance(item, Tensor) else item


def _used_by(step: ComputedFact | Read) -> list[int]:
    return [step.slot] if isinstance(step, Read) else _slots_in((step.arguments, *step.keywords.values()))


def _slots_in(items: Any) -> list[int]:
    if isinstance(items, FactSlot):
        return [items.number]
    return [number for item in items for number in _slots_in(item)] if isinstance(items, (list, tuple)) else []  # pyright: ignore


def _copied(tensor: Tensor) -> Tensor:
    """A tensor with the same strides and memory of its own; one that repeats entries repeats them, too."""
    repeated = [count > 1 and step == 0 for count, step in zip(tensor.shape, tensor.stride(), strict=True)]
    single = tensor[tuple(slice(0, 1) if again else slice(None) for again in repeated)] if any(repeated) else tensor
    return single.clone(memory_format=torch.preserve_format).expand(tensor.shape)


def _bytes(made: Sequence[Geometry | None]) -> int:
    return sum(math.prod(geometry[0]) * geometry[2].itemsize for geometry in made if geometry is not None)


def _is_unset(func: OpOverload) -> bool:
    return func.name().startswith(UNSET)


__all__ = ["Known"]
