"""Facts: what a model's Python reads of the numbers in its inputs, and how to tell whether another call's are alike.

in:  the operations that lead from a call's inputs, and from constants, to the numbers that were read
out: whether the model would read the same in another call of the same sizes

    for t, h, w in grid.tolist(): ...          ->   grid is [[1, 4, 4], [1, 4, 8]]
    features.split(mask.sum(-1).tolist())      ->   the sums along the last dim of mask are [4, 8]
    x[mask]                                    ->   mask has 12 entries that are true

The proof of a call holds for those that read the same. All else in a tensor may be any number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpplan.compat.modes import Unwatched
from tpplan.compat.schemas import OpOverload

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class FactSlot:
    """Stands for a tensor in the arguments of a step."""

    number: int


@dataclass(frozen=True, slots=True)
class ComputedFact:
    """A call of an operator on tensors whose numbers are known; `results` are the slots of what it makes."""

    target: OpOverload
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    results: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """What Python was told of a tensor: its numbers, or, where `counted`, only its shape."""

    slot: int
    counted: bool
    seen: Tensor | tuple[int, ...]

    def holds(self, tensor: Tensor) -> bool:
        """Whether it would be told the same of another one."""
        if isinstance(self.seen, tuple):
            return tuple(tensor.shape) == self.seen
        return tensor.shape == self.seen.shape and bool(torch.equal(tensor.cpu(), self.seen))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Read) or self.counted != other.counted:
            return False
        if isinstance(self.seen, tuple) or isinstance(other.seen, tuple):
            return isinstance(self.seen, tuple) and isinstance(other.seen, tuple) and self.seen == other.seen
        return other.holds(self.seen)

    __hash__ = None  # pyright: ignore


@dataclass(frozen=True, slots=True)
class Facts:
    """All that was read in one run, with what it was computed from.

    Attributes:
        inputs: the slots of the call's tensors.
        constants: those of tensors that no call changes.
        written: slots of either that steps write to.
        steps: in order.
    """

    inputs: Mapping[Path, int]
    constants: Mapping[int, Tensor]
    written: frozenset[int]
    steps: tuple[ComputedFact | Read, ...]

    @property
    def reads(self) -> list[Read]:
        """What was read, in order."""
        return [step for step in self.steps if isinstance(step, Read)]

    def hold(self, tensors: Mapping[Path, Tensor]) -> bool:
        """Whether a call with these tensors, of the same sizes, reads the same."""
        if any(path not in tensors for path in self.inputs):
            return False
        held = {number: tensors[path].detach() for path, number in self.inputs.items()}
        device = next((tensor.device for tensor in held.values()), torch.device("cpu"))
        held |= {number: tensor.to(device) for number, tensor in self.constants.items()}
        held |= {number: held[number].clone() for number in self.written}
        try:
            with torch.no_grad(), Unwatched():
                return all(_holds(step, held, device) for step in self.steps)
        except Exception:  # an index beyond what this call has, for one
            return False


def _holds(step: ComputedFact | Read, held: dict[int, Tensor], device: torch.device) -> bool:
    if isinstance(step, Read):
        return step.holds(held[step.slot])
    arguments = replaced(step.arguments, lambda item: held[item.number] if isinstance(item, FactSlot) else item)
    keywords = {
        name: replaced(item, lambda i: held[i.number] if isinstance(i, FactSlot) else i)
        for name, item in step.keywords.items()
    }
    made = step.target(*arguments, **on(device, keywords))
    for number, item in zip(step.results, results_of(made), strict=True):
        if number is not None:
            held[number] = item
    return True


def on(device: torch.device, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of an operator with another device, where they have one."""
    return {name: device if name == "device" and held is not None else held for name, held in keywords.items()}


def replaced(held: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments of an operator with `change` applied to what they hold."""
    if isinstance(held, (list, tuple)):
        return type(held)([replaced(item, change) for item in held])  # pyright: ignore
    return change(held)


def results_of(made: Any) -> Sequence[Any]:
    """What an operator returned, one by one."""
    return made if isinstance(made, (tuple, list)) else (made,)  # pyright: ignore[reportUnknownVariableType]


NOTHING = Facts({}, {}, frozenset(), ())

__all__ = ["NOTHING", "ComputedFact", "FactSlot", "Facts", "Read", "on", "replaced", "results_of"]
