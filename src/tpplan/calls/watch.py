"""Watch: hold the path that a real call takes through the model's code against the path that was proved.

in:  the steps of the proof, and a call that runs under a function mode
out: None, or the first place at which the call left the proved path

A proof runs on `meta`, in one process, at the sizes of the example. What Python may do otherwise in a real call (a
branch on a size, a device, a setting, the numbers in a tensor) shows in the calls of torch that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import TracebackType
from typing import Any

from torch.overrides import TorchFunctionMode

from tpplan.compiler.ir.steps import BRANCHES, Step, Stream, step_of
from tpplan.compiler.ir.trace import Location


@dataclass(frozen=True, slots=True)
class Departure:
    """Where a call left the proved path.

    Attributes:
        proved: the step of the proof; None if it ended before.
        real: the step of the call; None if it ended before.
    """

    proved: Step | None
    real: Step | None

    def __str__(self) -> str:
        """Both steps in words, with the line of the model's code."""
        at = self.real or self.proved
        assert at is not None
        if self.is_branch and self.real is not None:
            sides = f"{self.real.taken}, and the proof took the side for {not self.real.taken}"
            return f"at {at.location.short} the condition on a tensor's value is {sides}"
        real = f"calls `{self.real.name}`" if self.real is not None else "ends"
        proved = f"calls `{self.proved.name}`" if self.proved is not None else "ends"
        where = f" at {self.proved.location.short}" if self.proved is not None else ""
        return f"at {at.location.short} it {real} where the proof {proved}{where}"

    @property
    def is_branch(self) -> bool:
        """Whether both took the same step, a condition on a tensor's value, and found another side."""
        return self.proved is not None and self.real is not None and self.proved[:3] == self.real[:3]


def departure(proved: Stream, real: Sequence[Step], replaced: frozenset[str]) -> Departure | None:
    """The first place at which a call left the proved path.

    Args:
        proved: the steps of the proof.
        real: those of the call.
        replaced: modules whose bodies are replaced at run time, and so take no steps of their own.
    """
    varying = proved.varying_code()

    def settled(steps: Iterable[Step]) -> Iterable[Step]:
        return (step for step in steps if step.code not in varying) if varying else steps

    for mine, its in zip_longest(settled(proved.flat(replaced)), settled(real)):
        if mine != its:
            return Departure(mine, its)
    return None


def sides(steps: Iterable[Step]) -> frozenset[Location]:
    """The conditions on tensors' values that were true."""
    return frozenset(step.location for step in steps if step.taken)


class Watch(TorchFunctionMode):
    """Notes the steps of a call of the root, and has them judged when it ends."""

    def __init__(self, judge: Callable[[Sequence[Step], BaseException | None], None]) -> None:
        """Watch one call.

        Args:
            judge: gets the steps, and what the call raised; raises if they aren't proved.
        """
        super().__init__()
        self._judge = judge
        self._steps: list[Step] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, and note the step."""
        result = func(*args, **(kwargs or {}))
        if func.__name__ != "__get__":
            step = step_of(func, result if func in BRANCHES else None)
            if step is not None:
                self._steps.append(step)
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Judge the call; what was raised inside goes on if the call kept to the proof."""
        super().__exit__(kind, error, traceback)  # pyright: ignore[reportUnknownMemberType]
        if error is None or isinstance(error, Exception):
            self._judge(self._steps, error)


__all__ = ["Departure", "Watch", "departure", "sides"]
