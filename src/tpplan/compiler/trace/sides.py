"""Sides: what Python is told of a test on data, and of a comparison with a random number that it has drawn.

in:  the sides that a run is to take (`CaptureSettings.taken`)
out: the side of each test as it is met; all of them, as assumptions of the program

    if mask.any(): ...            ->   False, and Assumption("", model.py:12, taken=False)
    if ids.max() > self.limit:    ->   of numbers that are known, what they say

Some branches have an error of the model's own on one side:

    if n_tokens != n_features: raise ValueError("they do not match")   ->   the condition's other side may go on

A capture has no numbers, and takes for granted that a call's are what the model wants: it goes by the side that doesn't
raise. A call whose numbers are others raises what the unsharded model raises.
"""

from __future__ import annotations

import dis
import functools
import traceback
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from tpplan.compiler.ir.locations import PACKAGE, Location, location_now
from tpplan.compiler.ir.observations import Assumption, Branches, CaptureSettings, Sides
from tpplan.compiler.trace.chance import DrawObserver
from tpplan.compiler.trace.numbers_read import NumberObserver
from tpplan.compiler.trace.tape import Aside, RunTape
from tpplan.compiler.trace.unfollowed import DataDependentError

_FEW = 4
_DISPATCHES = frozenset(("__torch_dispatch__", "__torch_function__"))


class SideObserver:
    """Tells the sides of a run's branches on data, and notes them."""

    def __init__(self, tape: RunTape, settings: CaptureSettings, numbers: NumberObserver, draws: DrawObserver) -> None:
        """Tell those of `settings`."""
        taken = settings.taken or frozenset[Location]()
        self._taken = taken if isinstance(taken, Sides) else Sides(taken)
        self._last: Location | None = None
        self._tape, self._numbers, self._draws, self._replays = tape, numbers, draws, settings.replays
        self._assumptions: list[Assumption] = []
        self._met: Counter[object] = Counter()  # tests of branches, by line, and by call and line
        self._tests: list[tuple[Location, bool]] = []
        self._calls: list[tuple[str, int]] = []  # in which they were met

    def told(self, tensor: Tensor) -> Any:
        """What Python is told of a tensor with one entry: its number if that is known, else the side of a branch."""
        value = self._tape.value_of(tensor)
        if tensor.dtype is not torch.bool or self._numbers.is_known(value):
            try:
                return self._numbers.read(tensor).item()
            except DataDependentError as error:
                error.drawn = self._draws.is_drawn(value)
                raise
        location, taken = self.meet()
        self._assume(location, taken, self._draws.is_drawn(value))
        self._numbers.tested.setdefault(value, location)
        return taken

    def compared(self, found: bool) -> bool:
        """What Python is told of a comparison with a random number that it has drawn; `found` is what holds of that."""
        location, taken = self.meet(found if self._replays else None)
        self._assume(location, taken, True)
        return taken

    def meet(self, found: bool | None = None) -> tuple[Location | None, bool]:
        """Count a test, as a call counts all of them; its line, and its side: `found` if that is known."""
        location, call = location_now(), self._tape.frames[-1].key
        self._last = location
        if location is None:
            return None, bool(found)
        number, there = self._met[location], self._met[*call, location]
        self._met[location] = number + 1
        self._met[*call, location] = there + 1
        taken = self._taken.side(location, number, call, there) if found is None else found
        self._tests.append((location, taken))
        self._calls.append(call)
        return location, taken

    def _assume(self, location: Location | None, taken: bool, drawn: bool) -> None:
        self._assumptions.append(Assumption(self._tape.frames[-1].module, location, taken, drawn))

    def raised_for(self, error: BaseException, jumps: int = _FEW) -> Location | None:
        """The branch on data that the model raised an error of its own for; None if it met none, or torch raised.

        Args:
            error: what a body raised.
            jumps: how often Python may branch between the test and the error, the test's own jump included.
        """
        test, frames = self._last, list(traceback.walk_tb(error.__traceback__))
        if test is None or not frames:
            return None
        code, line = frames[-1][0].f_code, frames[-1][1]
        names = {frame.f_code.co_name for frame, _ in frames}
        if (
            code.co_filename.startswith(PACKAGE)
            or not names.isdisjoint(_DISPATCHES)
            or line not in _raising_lines(code)
        ):
            return None
        around = ((frame.f_code, at) for frame, at in frames if frame.f_code.co_filename == test.file)
        return test if any(_is_decided(held, test.line, at, jumps) for held, at in around) else None

    def surely_raised_for(self, error: BaseException) -> Location | None:
        """The same, where each call that takes this side raises: nothing else is decided before the error."""
        made_up = bool(self._numbers.chosen)  # how many entries were found, which the model may look at
        return None if made_up else self.raised_for(error, 1)

    @contextmanager
    def forgotten(self, aside: Aside) -> Generator[None]:
        """Assume nothing for what is met in the block, and note in `aside` whether that is anything."""
        before = len(self._assumptions)
        try:
            yield
        finally:
            aside.branches = len(self._assumptions) > before
            del self._assumptions[before:]

    def result(self) -> tuple[Branches, Sides]:
        """The branches that were met, and the sides that another run takes to go the same way."""
        tests = Sides.of(self._tests, self._calls)
        taken = tests if self._replays or self._taken.exact else self._taken
        if not taken.exact:
            taken = Sides(a.location for a in self._assumptions if a.taken and a.location is not None)
        return Branches(tuple(dict.fromkeys(self._assumptions)), tests), taken


@functools.cache
def _raising_lines(code: CodeType) -> frozenset[int | None]:
    return frozenset(_line(step) for step in dis.get_instructions(code) if step.opname == "RAISE_VARARGS")


def _is_decided(code: CodeType, test: int, line: int, jumps: int) -> bool:
    """Whether code has both lines, and so many jumps between them at most."""
    between = [step for step in dis.get_instructions(code) if test <= (_line(step) or 0) <= line]
    held = [step for step in between if "_IF_" in step.opname or step.opname == "FOR_ITER"]
    return any(_line(step) == test for step in between) and len(held) <= jumps


def _line(step: dis.Instruction) -> int | None:
    return None if step.positions is None else step.positions.lineno


__all__ = ["SideObserver"]
