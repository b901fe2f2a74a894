"""Solutions: what the placement obeys and what it passes on.

in:  constraints, of which the passes that reject a program make stricter ones
out: the ways to run a region, each with what was chosen on it; or the place where no way goes on
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tpplan.compiler.ir.freedoms import Freedoms, Name
from tpplan.compiler.ir.layout import Layout
from tpplan.compiler.rewrite.recognise import Norm
from tpplan.compiler.rules.propagate import Outcome, Refusal

Cost = tuple[int, int]
State = tuple[Layout, ...]
# A value or an operation of a region: the region's example, and the number there.
Place = tuple[Name, int]


@dataclass(frozen=True, slots=True)
class Solution:
    """One way to run a region for given input layouts.

    Attributes:
        outputs: layouts of the region's outputs; None for one that the caller chooses where it reads it.
        cost: (picoseconds, tie-breaker).
        steps: what was chosen, newest first: a linked list of (choice, earlier steps).
    """

    outputs: tuple[Layout | None, ...]
    cost: Cost
    steps: Steps | None


@dataclass(frozen=True, slots=True)
class Steps:
    """A linked list of choices, so that states can share their past; what many go through alike is a list in it."""

    choice: Choice | Steps
    before: Steps | None

    def in_order(self) -> list[Choice]:
        """The choices, oldest first."""
        choices: list[Choice] = []
        step: Steps | None = self
        while step is not None:
            held = step.choice
            choices += reversed(held.in_order()) if isinstance(held, Steps) else (held,)
            step = step.before
        return choices[::-1]


@dataclass(frozen=True, slots=True)
class Entered:
    """The layouts of the region's entries on the inside."""

    layouts: State


@dataclass(frozen=True, slots=True)
class PlacedRun:
    """An operation ran with this outcome."""

    node: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Called:
    """A call was solved this way for these input layouts."""

    node: int
    inputs: State
    solution: Solution


@dataclass(frozen=True, slots=True)
class Left:
    """The layouts of the region's exits on the outside.

    Attributes:
        layouts: these; None where the caller chooses.
        partial_parameters, replicated_parameters: parameters with such a gradient, as in `Outcome`.
        added_once: parameters that are added to a partial result, by one rank alone.
        ways: for each exit, what is chosen inside for a layout that the caller chooses; the cheapest is any.
    """

    layouts: tuple[Layout | None, ...]
    partial_parameters: frozenset[int] = frozenset()
    replicated_parameters: frozenset[int] = frozenset()
    added_once: frozenset[int] = frozenset()
    ways: tuple[Mapping[Layout, Steps | None], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SeparatePart:
    """What was chosen on the way to a state of which each part goes its own way from there on.

    Attributes:
        states: all states there, with what was chosen.
        place: which of the state's values this tells of; None for those that stay together.
        codes: of that value; of the state, where it doesn't go its own way.
    """

    states: Mapping[tuple[int, ...], tuple[Cost, Steps | None]]
    place: int | None
    codes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decided:
    """A result of a call, which its callee left open, has this layout outside."""

    value: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Normed:
    """The body, a norm over features of this layout, is replaced by one that sums its statistics over the ranks."""

    norm: Norm
    layout: Layout


@dataclass(frozen=True, slots=True)
class Recurred:
    """The body, a recurrent layer, is replaced by one that splits the hidden state: the results are made so."""

    layouts: State


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Tokens of this layout go to the ranks that hold their experts; the result lies like them."""

    layout: Layout


Choice = Entered | PlacedRun | Called | Left | SeparatePart | Decided | Normed | Recurred | Dispatched


def settled(choices: Sequence[Choice]) -> list[Choice]:
    """These choices, with what was chosen on the way to states whose parts went their own ways."""
    parts: dict[int, list[SeparatePart]] = defaultdict(list)
    for choice in choices:
        if isinstance(choice, SeparatePart):
            parts[id(choice.states)].append(choice)
    if not parts:
        return [*choices]
    known = [choice for choice in choices if not isinstance(choice, SeparatePart)]
    for held in parts.values():
        together = next((part for part in held if part.place is None), None)
        if together is None:  # it stands in the way to a later state
            known += held
            continue
        state = [*together.codes]
        for part in held:
            if part.place is not None:
                (state[part.place],) = part.codes
        _, steps = together.states[tuple(state)]
        known += () if steps is None else steps.in_order()
    return settled(known)


@dataclass(frozen=True, slots=True)
class Failure:
    """Where no way goes on: the operation (or boundary) in the region, with the reason.

    Attributes:
        path: positions of the calls that lead to the region, from the root.
        node: position in the region's body; None for a boundary.
        refusal: why.
        progress: how far the placement got, to choose among failures.
    """

    path: tuple[int, ...]
    node: int | None
    refusal: Refusal
    progress: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Constraints:
    """What a placement must obey beyond the plan, and what it may try.

    Attributes:
        unsharded: values that must not be sharded, as their size is read.
        forgiven: operations already reported; taken as replicated to find the next mistake.
        whole_gradients: parameters whose gradient must not be partial there.
        reduced_biases: biases that must be added after the reduction.
        whole: values that must be replicated there, and their gradient whole, as code in the backward is right for no
            part of it.
        freedoms: what it may do.
        unsliced: regions whose bodies can't slice or move anything: their own code has to run.
        sequence: whether layouts split along the sequence are tried.
        tails: results of which so many entries from the end of the sequence are read, and no others.
    """

    unsharded: frozenset[Place] = frozenset()
    forgiven: frozenset[Place] = frozenset()
    whole_gradients: frozenset[Place] = frozenset()
    reduced_biases: frozenset[Place] = frozenset()
    whole: frozenset[Place] = frozenset()
    freedoms: Freedoms = field(default_factory=Freedoms)
    unsliced: frozenset[Name] = frozenset()
    sequence: bool = False
    tails: Mapping[Place, int] = field(default_factory=dict[Place, int])

    @property
    def everywhere(self) -> tuple[object, ...]:
        """Those that hold in every region."""
        return (*self.freedoms.everywhere(), self.sequence)

    def differing(self, other: Constraints) -> frozenset[Name]:
        """The examples of the regions on which the two differ."""
        pairs = ((getattr(self, kind), getattr(other, kind)) for kind in _PLACES)
        inside = (self.unsliced ^ other.unsliced) | (self.freedoms.moving ^ other.freedoms.moving)
        return frozenset(name for ours, theirs in pairs for name, _ in ours ^ theirs) | inside


_PLACES = ("unsharded", "forgiven", "whole_gradients", "reduced_biases", "whole")
