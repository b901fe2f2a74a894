"""What a program costs each rank: collectives, bytes sent, and parameter memory.

in:  a program, or some of its modules and parameters
out: `Traffic` of the forward and of the backward, of the sum of parameter gradients, and `Memory`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tpplan.cost.communication import NVLINK, Topology, bytes_sent, ring_steps

if TYPE_CHECKING:
    from tpplan.compiler.ir.program import ModuleProgram, ParameterPlacement, Program, Reshard


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind of pass.

    Attributes:
        counts: how often each collective runs, by its name.
        sent: bytes that each rank sends in them, by the collective's name.
    """

    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    sent: Mapping[str, int] = field(default_factory=dict[str, int])

    def __add__(self, other: Traffic) -> Traffic:
        """Both, one after the other."""
        return Traffic(_sum(self.counts, other.counts), _sum(self.sent, other.sent))

    def times(self, count: int) -> Traffic:
        """This, `count` times over."""
        return Traffic(
            {name: held * count for name, held in self.counts.items() if count},
            {name: held * count for name, held in self.sent.items() if count},
        )

    @property
    def total(self) -> int:
        """Bytes that each rank sends."""
        return sum(self.sent.values())

    @property
    def number(self) -> int:
        """How many collectives run."""
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """The traffic of the reshards in one forward and one backward."""

    forward: Traffic = field(default_factory=Traffic)
    backward: Traffic = field(default_factory=Traffic)

    def __add__(self, other: StepTraffic) -> StepTraffic:
        """Both."""
        return StepTraffic(self.forward + other.forward, self.backward + other.backward)

    def times(self, count: int) -> StepTraffic:
        """This, `count` times over."""
        return StepTraffic(self.forward.times(count), self.backward.times(count))


@dataclass(frozen=True, slots=True)
class Memory:
    """Parameter bytes: of the whole model and of one rank, and how much of the latter every rank holds alike."""

    whole: int
    local: int
    replicated: int

    @property
    def share(self) -> float:
        """One rank's part of the whole, from 0 to 1."""
        return self.local / self.whole if self.whole else 1.0


def reshard_traffic(reshard: Reshard, size: int, calls: int = 1) -> StepTraffic:
    """The traffic of a reshard of a module that a step calls `calls` times, on `size` ranks."""
    whole, total = reshard.padded_bytes(size), StepTraffic()
    for backward, way, times in reshard.collectives(calls):
        traffic = _collective(str(way), whole, size).times(times)
        total += StepTraffic(backward=traffic) if backward else StepTraffic(forward=traffic)
    return total


def module_traffic(modules: Iterable[ModuleProgram], size: int) -> StepTraffic:
    """The traffic of all reshards of `modules` in one step."""
    total = StepTraffic()
    for module in modules:
        for reshard in module.reshards:
            total += reshard_traffic(reshard, size, module.calls)
    return total


def placement_time(program: Program, topology: Topology = NVLINK) -> int:
    """Picoseconds of a step's collectives by the model that placement minimises; on one topology, for all programs."""
    total = 0
    for module, reshard in program.reshards():
        whole = reshard.padded_bytes(program.size)
        for _, way, times in reshard.collectives(module.calls):
            if way.communicates:
                name = str(way)
                steps = 0 if reshard.source.tail or reshard.target.tail else ring_steps(name, program.size)
                total += times * topology.time(steps, bytes_sent(name, whole, program.size))
    return total + sum(topology.time(0, sent) for sent in gradient_sum_traffic(program).sent.values())


def gradient_sum_traffic(program: Program) -> Traffic:
    """The coalesced sums of partial parameter gradients: one all-reduce for each dtype, once a backward."""
    total = Traffic()
    for name, held in program.gradient_sums:
        total += _collective(name, held, program.size)
    return total


def memory(parameters: Iterable[ParameterPlacement]) -> Memory:
    """The memory that `parameters` take, those that are tied counted once."""
    held = list(parameters)
    return Memory(
        whole=sum(p.bytes for p in held),
        local=sum(p.local_bytes for p in held),
        replicated=sum(p.local_bytes for p in held if not p.layout.is_sharded),
    )


def _collective(name: str, whole: int, size: int) -> Traffic:
    if name in ("none", "slice", "pad", "first"):
        return Traffic()
    return Traffic({name: 1}, {name: bytes_sent(name, whole, size)})


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in (*one, *(n for n in other if n not in one))}
