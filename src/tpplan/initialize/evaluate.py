"""Numbers that a constructor reads: what they depend on is run for real, up to this moment, and dropped again.

`torch.nn.init.trunc_normal_` draws again until all of its numbers are in range, so it asks for the numbers that it has
just drawn. What is drawn to answer is drawn once more when the record is replayed; generators are left as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpplan.initialize.executor import Executor, Tape
from tpplan.initialize.record import InitialOperation, Storage, View
from tpplan.initialize.schedule import Schedule, schedule
from tpplan.initialize.streams import Clock


class Evaluator:
    """Evaluates tensors of a record that is being made.

    It keeps the memory of what the last question was answered from, since the next one is often about the same, and
    the states of generators after each answer.
    """

    def __init__(
        self, operations: Sequence[InitialOperation], storages: Sequence[Storage], clocks: Sequence[Clock]
    ) -> None:
        """Look at a record that grows."""
        self._operations = operations
        self._storages = storages
        self._clocks = clocks
        self._seen = 0
        self._last: dict[int, int] = {}  # by storage, the operation that has written to it last
        self._draws: dict[int, list[int]] = {}  # by stream, the operations that draw
        self._returns: set[int] = set()  # positions that Python has gone back to
        self._marks: dict[int, dict[int, Tensor]] = {}
        self._held: dict[int, torch.UntypedStorage] = {}
        self._versions: dict[int, int] = {}

    def value(self, view: View) -> Tensor:
        """The numbers of a tensor; not to be written to."""
        self._look()
        last = self._last.get(view.storage)
        wanted = {} if last is None else {last: {view.storage}}
        starts, plan = self._planned(wanted)
        states = [clock.generator.get_state() for clock in self._clocks]
        tapes: dict[int, Tape] = {}
        try:
            for stream, start in starts.items():
                generator = self._clocks[stream].generator
                tapes[stream] = Tape(generator, self._marks.get(stream, {}), start, self._returns)
            return self._run(view, plan, tapes)
        finally:
            for clock, state in zip(self._clocks, states, strict=False):
                clock.generator.set_state(state)

    def _look(self) -> None:
        """Take in what was recorded since the last question."""
        for index in range(self._seen, len(self._operations)):
            operation = self._operations[index]
            self._last.update(dict.fromkeys(operation.writes, index))
            if operation.draw is not None:
                self._draws.setdefault(operation.draw.stream, []).append(index)
                if isinstance(operation.draw.jump, int):
                    self._returns.add(operation.draw.jump)
        self._seen = len(self._operations)
        self._held = {s: held for s, held in self._held.items() if self._versions.get(s) == self._last.get(s)}
        for clock in self._clocks:
            if not clock.fresh:
                self._marks.setdefault(clock.number, {0: clock.start})

    def _planned(self, wanted: dict[int, set[int]]) -> tuple[dict[int, int], Schedule]:
        """What to run, and from where each generator has to draw so that those draws are right."""
        known = {storage: self._last[storage] for storage in self._held}
        starts: dict[int, int] = {}
        while True:
            drawn = {index for stream, start in starts.items() for index in self._draws[stream][start:]}
            plan = schedule(self._operations, wanted, drawn, known)
            found: dict[int, int] = dict(starts)
            for step in plan.steps:
                draw = self._operations[step.place].draw
                if step.runs and draw is not None:
                    first = 0 if isinstance(draw.jump, int) else self._mark_before(draw.stream, draw.position)
                    found[draw.stream] = min(found.get(draw.stream, first), first)
            if found == starts:
                return starts, plan
            starts = found

    def _mark_before(self, stream: int, position: int) -> int:
        return max((mark for mark in self._marks.get(stream, {}) if mark <= position), default=0)

    def _run(self, view: View, plan: Schedule, tapes: dict[int, Tape]) -> Tensor:
        executor = Executor(self._storages, tapes)
        done: set[int] = set()
        before, self._held = self._held, {}
        for step in plan.steps:
            if step.runs:
                executor.run(self._operations[step.place])
            for storage in step.loads:
                executor.held[storage] = before[storage]
            plan.useful.update(step.loads)
            done.add(step.place)
            for storage in step.frees:
                if storage not in plan.useful or self._last[storage] not in done:
                    executor.free(storage)
        for stream, tape in tapes.items():
            tape.mark()
            self._marks[stream] = tape.marks
        value = executor.tensor(view)
        useful = {storage for storage in executor.held if self._last.get(storage) in done}
        self._held = {storage: executor.held[storage] for storage in useful}
        self._versions = {storage: self._last[storage] for storage in useful}
        return value


__all__ = ["Evaluator"]
