"""Solutions: what the placement obeys and what it hands on.

in:  constraints, grown by the passes that find a program wanting
out: the ways to run a region, each with what was chosen on it; or the place where no way goes on
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tpplan.compiler.ir.layout import Layout
from tpplan.compiler.rewrite.recognise import Norm
from tpplan.compiler.rules.propagate import Outcome, Refusal

Cost = tuple[int, int]
State = tuple[Layout, ...]
Name = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Solution:
    """One way to run a region for given input layouts.

    Attributes:
        outputs: layouts of the region's outputs.
        cost: (picoseconds, tie-breaker).
        steps: what was chosen, newest first: a linked list of (choice, earlier steps).
    """

    outputs: State
    cost: Cost
    steps: Steps | None


@dataclass(frozen=True, slots=True)
class Steps:
    """A linked list of choices, so that states can share their past."""

    choice: Choice
    before: Steps | None

    def in_order(self) -> list[Choice]:
        """The choices, oldest first."""
        found: list[Choice] = []
        step: Steps | None = self
        while step is not None:
            found.append(step.choice)
            step = step.before
        return found[::-1]


@dataclass(frozen=True, slots=True)
class Entered:
    """The layouts given to the region's entries on the inside."""

    layouts: State


@dataclass(frozen=True, slots=True)
class Ran:
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
    """The layouts given to the region's exits on the outside.

    Attributes:
        layouts: these.
        partial_parameters, replicated_parameters: parameters with such a gradient, as in `Outcome`.
        added_once: parameters that are added to a partial result, by one rank alone.
    """

    layouts: State
    partial_parameters: frozenset[int] = frozenset()
    replicated_parameters: frozenset[int] = frozenset()
    added_once: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Normed:
    """The body, a norm over features that lie so, is replaced by one that sums its statistics over the ranks."""

    norm: Norm
    layout: Layout


Choice = Entered | Ran | Called | Left | Normed


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


@dataclass(slots=True)
class Constraints:
    """What the search must obey beyond the plan; grown by the passes that find a program wanting.

    Attributes:
        unsharded: (region's example, local value): a value that must not be sharded there, as its size is read.
        forgiven: (region's example, node): operations already reported; taken as replicated to find the next mistake.
        whole_gradients: (region's example, local value): parameters whose gradient must not be partial there.
        reduced_biases: (region's example, local value): biases that must be added after the reduction.
        whole: (region's example, local value): a value that must be replicated there, and its gradient whole, as code
            in the backward is right for no part of it.
        heads: numbers of heads; a dim of such a size may be split at any boundary. Empty until that is worth a try.
        features: numbers of features; a tensor made anew with a dim of such a size may be split. Empty until then.
        slice_constants: whether values without a gradient may be sliced at boundaries too.
        sequence: whether layouts split along the sequence are tried.
    """

    unsharded: set[tuple[Name, int]] = field(default_factory=set["tuple[Name, int]"])
    forgiven: set[tuple[Name, int]] = field(default_factory=set["tuple[Name, int]"])
    whole_gradients: set[tuple[Name, int]] = field(default_factory=set["tuple[Name, int]"])
    reduced_biases: set[tuple[Name, int]] = field(default_factory=set["tuple[Name, int]"])
    whole: set[tuple[Name, int]] = field(default_factory=set["tuple[Name, int]"])
    heads: frozenset[int] = frozenset()
    features: frozenset[int] = frozenset()
    slice_constants: bool = False
    sequence: bool = False

    def snapshot(self) -> Obeyed:
        """What holds now."""
        kinds = {
            "size": self.unsharded,
            "forgiven": self.forgiven,
            "gradient": self.whole_gradients,
            "bias": self.reduced_biases,
            "whole": self.whole,
        }
        places = frozenset((name, number, kind) for kind, held in kinds.items() for name, number in held)
        return Obeyed((self.heads, self.features, self.slice_constants, self.sequence), places)


@dataclass(frozen=True, slots=True)
class Obeyed:
    """The constraints at one time: those on every region, and those on single ones by (example, number, kind)."""

    everywhere: tuple[frozenset[int], frozenset[int], bool, bool]
    places: frozenset[tuple[Name, int, str]]
