"""Observations: what is seen of one run of a model beside its operations, each by one observer of the recorder.

in:  how a run is recorded (`CaptureSettings`)
out: branches, numbers that Python reads, random numbers, gradients, and what the run leaves behind: parts of a `Trace`

    if mask.all(): mask = None   ->   Branches(assumptions=(Assumption("", model.py:12, taken=False),), …)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, MappingProxyType
from typing import NamedTuple

import torch

from tpplan.compiler.ir.facts import Facts, Path
from tpplan.compiler.ir.locations import Location


class FoundCount(NamedTuple):
    """How many entries `nonzero` finds.

    Attributes:
        most: so many at the most; None for all that are looked through.
        none_at: where every second call finds none, whether the first does (1) or not (0); then all but one (1) of what
            may be picked is found, or one (0).
    """

    most: int | None
    none_at: int | None = None


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """How to record a call.

    Attributes:
        training: the mode to run in.
        taken: the branches that take their true side; None to choose them as `record_model` says, or none.
        device: where bodies are told that their tensors lie.
        reducing: modules whose bodies' reductions are recorded as functions over classes.
        values: whether bodies may read the numbers in the call; else only if they can't be captured without.
        looking: modules whose bodies' look-ups are recorded as functions over the rows of their tables.
        replays: whether the generators of Python and of numpy are where a call found them, of which `taken` are sides.
        records: whether autograd records, as without `torch.no_grad()` around the call.
        picking: of how many numbers bodies pick something by those that aren't zero, with how many are found.
        emptied: which of the numbers by which rows are split are zero: every second run of so many, from the
            first (0) or the second (1); None if none is.
        found: how many entries `nonzero` finds; None for a part of them.
    """

    training: bool
    taken: frozenset[Location] | None = None
    device: torch.device = field(default=torch.device("cpu"))
    reducing: frozenset[str] = frozenset()
    values: bool = False
    looking: frozenset[str] = frozenset()
    replays: bool = False
    records: bool = True
    picking: frozenset[tuple[int, int]] = frozenset()
    emptied: tuple[int, int] | None = None
    found: FoundCount | None = None


@dataclass(frozen=True, slots=True)
class Assumption:
    """A branch of the model that depends on data: the trace holds the side on which `location`'s test was `taken`.

    `drawn` is whether it depends on random numbers alone, as where a model skips layers by chance.
    """

    module: str
    location: Location | None
    taken: bool = False
    drawn: bool = False


class Sides(frozenset[Location]):
    """The branches on data that take their true side, by line; of some, the side that each test takes, in order.

    Attributes:
        exact: these, by line.
        inside: the same by call of a module and line, which a run knows as well that leaves equal calls out.
    """

    exact: Mapping[Location, tuple[bool, ...]] = MappingProxyType({})
    inside: Mapping[tuple[str, int, Location], tuple[bool, ...]] = MappingProxyType({})

    @classmethod
    def of(cls, tests: Iterable[tuple[Location, bool]], calls: Iterable[tuple[str, int]] = ()) -> Sides:
        """The sides of a run, test by test; and the calls of modules that they were met in, if these are known."""
        tests = [*tests]
        exact: dict[Location, tuple[bool, ...]] = {}
        for location, side in tests:
            exact[location] = (*exact.get(location, ()), side)
        inside: dict[tuple[str, int, Location], tuple[bool, ...]] = {}
        for (location, side), call in zip(tests, calls, strict=False):
            inside[*call, location] = (*inside.get((*call, location), ()), side)
        made = cls(location for location, sides in exact.items() if any(sides))
        made.exact, made.inside = MappingProxyType(exact), MappingProxyType(inside)
        return made

    def also(self, locations: Iterable[Location]) -> Sides:
        """These, and the true sides of further branches."""
        made = Sides((*self, *locations))
        made.exact, made.inside = self.exact, self.inside
        return made

    def side(self, location: Location, number: int, call: tuple[str, int], there: int) -> bool:
        """Which side a test takes that is the `number`th at its line, and the one numbered `there` in its call."""
        own = self.inside.get((*call, location), ())
        if there < len(own):
            return own[there]
        sides = self.exact.get(location, ())
        return sides[number] if number < len(sides) else location in self


@dataclass(frozen=True, slots=True)
class Branches:
    """The branches on data that a run met.

    Attributes:
        assumptions: the branches, each with its side.
        tests: the sides of all branches on data, test by test.
    """

    assumptions: tuple[Assumption, ...]
    tests: Sides


@dataclass(frozen=True, slots=True)
class ReadNumbers:
    """What the bodies were told of numbers.

    Attributes:
        facts: what they read of the example's numbers; None if these were kept from them.
        reads: the same by call, as (module, call).
        known: values whose numbers follow from the example's.
        chosen: frames, as (module, call), whose bodies look for the entries of a tensor that aren't zero.
        leaving_out: frames, as (module, call), whose bodies ask which of the numbers by which they split rows are zero.
        tested: values that the model reads or branches on, with the lines where it does.
        of_buffers: constants that are buffers, whose numbers all ranks take from the first.
    """

    facts: Facts | None
    reads: Mapping[tuple[str, int], Sequence[object]]
    known: frozenset[int]
    chosen: frozenset[tuple[str, int]]
    leaving_out: frozenset[tuple[str, int]]
    tested: Mapping[int, Location | None]
    of_buffers: frozenset[int]


@dataclass(frozen=True, slots=True)
class RandomNumbers:
    """The random numbers that a run draws.

    Attributes:
        told: generators, by name, that Python is told numbers of.
        unseen: whether any such number was drawn otherwise than to compare it.
        seeded: values that were drawn after the forward had set the generator.
    """

    told: frozenset[str]
    unseen: bool
    seeded: frozenset[int]


@dataclass(frozen=True, slots=True)
class Gradients:
    """What is special about the gradients of a run.

    Attributes:
        taken_inside: whether the forward takes gradients itself.
        gradless: values made with gradients off, in calls that began with gradients on: under `no_grad`, or inside of a
            function with a backward of its own.
        unanswered: values that cross a boundary, may have a gradient, and get none: passed to a module under `no_grad`,
            or of which nobody reads what is made.
    """

    taken_inside: bool
    gradless: frozenset[int]
    unanswered: frozenset[int]


@dataclass(frozen=True, slots=True)
class Effects:
    """What a run leaves behind besides its results.

    Attributes:
        kept: values that modules hold in attributes after the run, with the attributes' names.
        left: values that the run leaves in lists and dicts among the call's arguments, by their place there.
        hidden: values in objects among the results that nobody can look into, with the objects' classes.
        in_objects: the places of what is `left` that are in objects, such as caches, which only models read.
        outside: of what is `kept` that which no attribute of a module holds, but a hook or a global.
        made: all values that the run makes for more than its results, such as what it writes and leaves.
        written: the places that the run changes: attributes, globals and what these hold.
        state: what all such places hold after the run, in numbers or text; None for what can't be told so.
        reread: the places around the modules, of those that the run fills, of which this run or the next reads what
            stood there before.
        cached: the code of functions that keep their results, such as those under `functools.lru_cache`.
        wraps: whether the run is passed, or leaves, tensors of classes of their own.
    """

    kept: Mapping[int, str]
    left: Mapping[Path, int]
    hidden: Mapping[int, str]
    in_objects: frozenset[Path]
    outside: frozenset[int]
    made: frozenset[int]
    written: frozenset[str]
    state: Mapping[str, object]
    reread: frozenset[str]
    cached: frozenset[CodeType]
    wraps: bool

    @property
    def leaving(self) -> frozenset[int]:
        """The values that are there after the run, in attributes, arguments or objects."""
        return frozenset((*self.kept, *self.left.values(), *self.hidden))


@dataclass(frozen=True, slots=True)
class Asked:
    """What the bodies ask for that isn't otherwise part of a call's kind.

    Attributes:
        memory: the methods by which they ask how tensors lie in memory.
        flags: the parameters of which they ask whether these require grad.
        settings: of torch, that they ask for; see `state/ambient`.
    """

    memory: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    settings: frozenset[str] = frozenset()

    def __or__(self, other: Asked) -> Asked:
        return Asked(self.memory | other.memory, self.flags | other.flags, self.settings | other.settings)
