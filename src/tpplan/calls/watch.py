"""Watch: hold the path that a real call takes through the model's code against the path that was proved.

in:  the steps of the proof, and a call that runs under a function mode
out: None, or the first place at which the call left the proved path

A proof runs on `meta`, in one process, at the sizes of the example. What Python may do otherwise in a real call (a
branch on a size, a device, a setting, the numbers in a tensor) shows in the calls of torch that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest
from types import CodeType
from typing import Any

from torch.overrides import TorchFunctionMode

from tpplan.compat.flex_attention import FLEX_ATTENTION, run_flex_attention
from tpplan.compat.subclasses import class_to_ask
from tpplan.compiler.ir.locations import Location
from tpplan.compiler.ir.observations import Sides
from tpplan.compiler.ir.steps import Step, Stream, side_of, step_of


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
    def location(self) -> Location | None:
        """Where the call departed."""
        return None if self.real is None else self.real.location

    @property
    def by_numbers(self) -> bool:
        """Whether either step is a condition on a tensor's value."""
        return any(step is not None and step.taken is not None for step in (self.proved, self.real))

    @property
    def is_branch(self) -> bool:
        """Whether both took the same step, a condition on a tensor's value, and found another side."""
        if self.proved is None or self.real is None or self.real.taken is None:
            return False
        return self.proved[:3] == self.real[:3]


@dataclass(frozen=True, slots=True)
class Proved:
    """The steps of proofs, without those that may differ between two runs that are alike.

    Attributes:
        steps: of each proof.
        varying: code whose steps aren't compared, but for the sides of branches.
        sides: of each proof, those of branches in such code.
        leaving: code in which parts without rows are left out.
        pairs: the steps in such code, each with the one before it.
    """

    steps: list[list[Step]]
    varying: frozenset[CodeType]
    sides: list[frozenset[tuple[Location, bool | None]]]
    leaving: frozenset[CodeType]
    pairs: frozenset[tuple[Step | None, Step | None]]

    @classmethod
    def of(cls, streams: Sequence[Stream], replaced: frozenset[str], names: Mapping[str, str] | None) -> Proved:
        """The steps of these proofs; see `Stream.flat`."""
        varying = frozenset[CodeType]().union(*(stream.varying_code() for stream in streams))
        runs = [[*stream.flat(replaced, names)] for stream in streams]
        sides = [frozenset((step.location, step.taken) for step in _branches(run, varying)) for run in runs]
        leaving = frozenset[CodeType]().union(*(stream.leaving_code() for stream in streams))
        pairs = frozenset(pair for run in runs for pair in _pairs(run, leaving))
        compared = [[step for step in run if step.code not in varying] for run in runs]
        return cls(compared, varying, sides, leaving, pairs)

    def without_varying(self, steps: Sequence[Step]) -> list[Step]:
        """Those steps of a call that are compared."""
        return [step for step in steps if step.code not in self.varying] if self.varying else [*steps]

    def other_side(self, steps: Sequence[Step], free: Set[Location]) -> Departure | None:
        """Where a branch in varying code takes a side that no proof takes together with those of others.

        Each of those that are `free` may take any proved side.
        """
        taken, other = _branches(steps, self.varying), None
        proved = frozenset[tuple[Location, bool | None]]().union(*self.sides)
        for held in self.sides:
            among = (proved if step.location in free else held for step in taken)
            other = next((s for s, of in zip(taken, among, strict=True) if (s.location, s.taken) not in of), None)
            if other is None:
                break
        return other and Departure(other._replace(taken=not other.taken), other)

    def other_order(self, steps: Sequence[Step]) -> Departure | None:
        """Where code that leaves parts out takes a step that follows the one before it in no proof."""
        before, real = next((pair for pair in _pairs(steps, self.leaving) if pair not in self.pairs), (None, None))
        proved = next((after for first, after in self.pairs if first == before), None)
        return None if before is real is None else Departure(proved, real)


def _pairs(steps: Sequence[Step], code: frozenset[CodeType]) -> Iterator[tuple[Step | None, Step | None]]:
    """The steps in some code, each with the one before it, and the end; without their modules, which are all alike."""
    held = [step._replace(module="") for step in steps if step.code in code]
    return zip([None, *held], [*held, None], strict=True)


def _branches(steps: Sequence[Step], code: frozenset[CodeType]) -> list[Step]:
    """The branches on data in some code."""
    return [step for step in steps if step.taken is not None and step.code in code] if code else []


def departure(proved: Sequence[Step], real: Sequence[Step]) -> Departure | None:
    """The first step at which a call left a proved path; None if there is none."""
    if proved == real:
        return None
    for mine, its in zip_longest(proved, real):
        if mine != its:
            return Departure(mine, its)
    return None


def sides(steps: Iterable[Step]) -> Sides:
    """The sides that conditions on tensors' values took."""
    return Sides.of((step.location, step.taken) for step in steps if step.taken is not None)


class Watch(TorchFunctionMode):
    """Notes the steps of what runs under it."""

    def __init__(self, names: Mapping[int, str]) -> None:
        """Start without steps. `names` are those of modules, by id, where steps are to tell theirs."""
        super().__init__()
        self.steps: list[Step] = []
        self._names = names

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, and note the step."""
        if func is FLEX_ATTENTION:
            return run_flex_attention(args, kwargs or {})
        kind = class_to_ask(types)
        if kind is not None:
            with self:
                return kind.__torch_function__(func, types, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if func.__name__ != "__get__":
            step = step_of(func, side_of(func, result, args), names=self._names)
            if step is not None:
                self.steps.append(step)
        return result


__all__ = ["Departure", "Proved", "Watch", "departure", "sides"]
