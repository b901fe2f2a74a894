"""Digest: what the ranks of an axis must have alike before they run, whatever order their Python takes.

in:  the trace with every operation, and the program that it was compiled to
out: a `Digest`

    for kind in {"full", "sliding"}: masks[kind] = mask(kind)           # in any order: the same digest
    for kind in {"full", "sliding"}: parts[kind] = self.down[kind](x)   # partial sums would meet those of another layer
    for kind in {"full", "sliding"}: x = self.norms[kind](x)            # other numbers

Sets of strings have another order in each process. A value is known by how it is made, from what the call is passed and
what the model stores, and not by when. Order counts where ranks exchange tensors, and where they draw random numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from tpplan.compiler.ir.program import ModuleProgram, Program, Reshard
from tpplan.compiler.ir.trace import Crossing, Frame, Operation, Trace, quoted
from tpplan.compiler.trace.random_draws import is_draw


@dataclass(frozen=True, slots=True)
class Digest:
    """What ranks compare.

    Attributes:
        work: of how each value is made, and of the order of exchanges: equal on ranks that fit.
        operations: of which operations there are, each with its place in the model's source, numbers and constants.
        sequence: of these in order, and how their operands are made.
        exchanges: what the ranks exchange, and draw, in order: how it is made, and what messages say of it.
    """

    work: str = ""
    operations: str = ""
    sequence: str = ""
    exchanges: tuple[tuple[str, str], ...] = ()

    def differs_in_order(self, other: Digest) -> bool:
        """Whether another rank runs the same operations, but in another order."""
        return self.operations == other.operations and self.sequence != other.sequence


def digest_of(trace: Trace, program: Program) -> Digest:
    """The digest of a run; that of the program isn't part of it."""
    reader = _DigestReader(trace, program)
    reader.read(trace.recorded)
    exits = [(crossing.path, reader.made(crossing.target)) for crossing in trace.recorded.exits]
    left = [(path, reader.made(value)) for path, value in trace.effects.left.items()]
    order = [made for made, _ in reader.exchanges]
    return Digest(
        work=_hash(sorted(reader.steps), sorted(map(repr, (*exits, *left))), order),
        operations=_hash(sorted(reader.operations)),
        sequence=_hash(reader.steps),
        exchanges=tuple(reader.exchanges),
    )


class _DigestReader:
    """Reads a run in order of execution."""

    def __init__(self, trace: Trace, program: Program) -> None:
        self.steps: list[str] = []
        self.operations: list[str] = []
        self.exchanges: list[tuple[str, str]] = []
        self._values, self._of_buffers = trace.values, trace.numbers.of_buffers
        self._exchanging = {module.name: _exchanging(module) for module in program.modules}
        self._made = {value: _hash("argument", path) for path, value in trace.arguments.items()}
        self._made |= {value: _hash("stored", names) for value, names in trace.stored.items()}
        self._constants: dict[int, str] = {}
        self._draws = 0

    def made(self, value: int) -> str:
        """How a value is made; a constant is known by its numbers, and what else was there before by its geometry."""
        return self._made.get(value) or self._constant(value)

    def _constant(self, value: int) -> str:
        if value not in self._constants:
            numbers = None if value in self._of_buffers else self._values[value].numbers
            entries = b"" if numbers is None else numbers.reshape(-1).view(torch.uint8).numpy().tobytes()
            self._constants[value] = _hash(self._geometry(value), hashlib.blake2b(entries).digest())
        return self._constants[value]

    def read(self, frame: Frame) -> None:
        """Note each step of a call, and of those inside."""
        before, inside, after = self._exchanging.get(frame.module, (False, False, False))
        self._cross(frame, "the arguments", frame.entries, before)
        for node in frame.body:
            if isinstance(node, Frame):
                self.read(node)
            else:
                self._compute(frame, node, inside)
        self._cross(frame, "the results", frame.exits, after)

    def _cross(self, frame: Frame, what: str, crossings: tuple[Crossing, ...], exchanges: bool) -> None:
        for crossing in crossings:
            self._made[crossing.target] = _hash(frame.module, what, crossing.path, self.made(crossing.source))
        step = _hash(frame.module, what, sorted(self._made[crossing.target] for crossing in crossings))
        self.steps.append(step)
        if exchanges:
            self.exchanges.append((step, f"{what} of {quoted(frame.module)}"))

    def _compute(self, frame: Frame, node: Operation, exchanges: bool) -> None:
        draws = is_draw(node.target, node.arguments, node.keywords)
        self._draws += draws
        named = sorted(node.keywords.items())
        numbers = [_told(argument) for argument in (*node.arguments, *named)]
        numbers += [self._constant(value) for value in node.inputs if value not in self._made]
        where = f" at {node.location.short}" if node.location is not None else ""
        place = f"`{node.name}` of {quoted(frame.module)}{where}"
        results = [None if value is None else self._geometry(value) for value in node.outputs]
        self.operations.append(_hash(place, numbers, results))
        step = _hash(self.operations[-1], [self.made(value) for value in node.inputs], self._draws if draws else None)
        self._made |= {value: _hash(step, self.made(value)) for value in node.overwritten}
        self._made |= {value: _hash(step, output) for output, value in enumerate(node.outputs) if value is not None}
        self.steps.append(step)
        if draws or exchanges:
            self.exchanges.append((step, place))

    def _geometry(self, value: int) -> str:
        held = self._values[value]
        return f"{held.shape} {held.dtype} {held.differentiable}"


def _exchanging(module: ModuleProgram) -> tuple[bool, bool, bool]:
    """Whether ranks exchange tensors before the body of a module, in it, and after it; or in the backward of these."""

    def any_of(reshards: tuple[Reshard, ...]) -> bool:
        return any(reshard.forward.communicates or reshard.backward.communicates for reshard in reshards)

    return any_of(module.entries), bool(module.inner or module.class_calls), any_of(module.exits)


def _told(argument: Any) -> Any:
    """An argument, if it is a number and the like; of a tensor, and of anything else, its kind."""
    if isinstance(argument, (list, tuple)):
        return [_told(item) for item in cast("Sequence[Any]", argument)]
    if argument is None or isinstance(argument, (bool, int, float, complex, str, torch.dtype)):
        return argument
    return type(argument).__name__


def _hash(*told: object) -> str:
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


__all__ = ["Digest", "digest_of"]
