"""Terms: what the values of a body of stacked experts say of one pair of a token and an expert; see `routed`.

in:  the operations of a record, one by one
out: a kind for each value, and terms by number, of which equal ones have the same
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Shape = tuple[int, ...]
Space = str  # "tokens", "choices", "pairs", "sorted 1" for the first sort, "of 0" for the pairs of the first expert


@dataclass(frozen=True, slots=True)
class TermRows:
    """A row for each token, choice or pair; `term` says what of that is in it."""

    space: Space
    term: int


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of the chosen experts."""

    space: Space


@dataclass(frozen=True, slots=True)
class Order:
    """Places of pairs.

    `sorted`: the pair at each place of a sort. `tokens`: its token. `inverse`: the place of each pair in the sort.
    `all`: each pair's own.
    """

    kind: Literal["sorted", "tokens", "inverse", "all"]
    sort: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """How many pairs each expert has; or, in a sort, where they end."""

    ends: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """Matrices, one for each expert."""

    term: int


@dataclass(frozen=True, slots=True)
class Blank:
    """A tensor made anew: zeros, or of any numbers."""

    zeros: bool


@dataclass(frozen=True, slots=True)
class Total:
    """The sum over a token's choices of `term`."""

    term: int


@dataclass(frozen=True, slots=True)
class Found:
    """Where one expert was chosen: as true and false by choice, as places, or as these places' tokens or choices."""

    expert: int
    what: Literal["mask", "places", "tokens", "choices"]
    dims: tuple[str, ...] = ("tokens", "choices")


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from 0 on."""

    count: int


@dataclass(frozen=True, slots=True)
class OneHot:
    """For each choice and each number whether it is the expert's; its dims in order."""

    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hits:
    """How often each number was chosen; or whether; or which were."""

    what: Literal["counts", "whether", "which"]


@dataclass(frozen=True, slots=True)
class Own:
    """The matrices of one expert."""

    expert: int
    term: int


@dataclass(frozen=True, slots=True)
class TermPart:
    """As `Total`, of the choices of these experts alone."""

    term: int
    experts: frozenset[int]


Kind = TermRows | Numbers | Order | Counts | Stack | Blank | Total | Found | Own | TermPart | Range | OneHot | Hits


@dataclass(slots=True)
class Terms:
    """Terms by number; equal terms have the same one, in all records that are read with it."""

    keys: list[tuple[Any, ...]] = field(default_factory=list["tuple[Any, ...]"])
    shapes: list[Shape] = field(default_factory=list["Shape"])
    _known: dict[object, int] = field(default_factory=dict[object, int])

    def of(self, *key: Any, shape: Shape) -> int:
        """The term's number; `shape` is that of what it says of one pair."""
        found = self._known.get((key, shape))
        if found is None:
            found = self._known[key, shape] = len(self.keys)
            self.keys.append(key)
            self.shapes.append(shape)
        return found

    def reshaped(self, term: int, shape: Shape) -> int:
        """The same entries in another shape."""
        base = self.keys[term][1] if self.keys[term][0] == "reshaped" else term
        return base if self.shapes[base] == shape else self.of("reshaped", base, shape=shape)


__all__ = [
    "Blank",
    "Counts",
    "Found",
    "Hits",
    "Kind",
    "Numbers",
    "OneHot",
    "Order",
    "Own",
    "Range",
    "Shape",
    "Space",
    "Stack",
    "TermPart",
    "TermRows",
    "Terms",
    "Total",
]  # fmt: skip
