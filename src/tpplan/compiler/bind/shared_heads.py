"""Shared heads: which of a body's heads each rank has.

in:  what the trace does with the features that a plan splits
out: packs of heads; by body, the parts of its queries and keys where the axis can't share them out evenly
     (`ir/heads.py`), and a note on ranks that have more than others (TP132)

    q viewed as 28 heads, k and v as 4 of them in one body, on 8 ranks  ->  {28: 4|3|4|3|4|3|4|3, 4: one for two ranks}
    a gate of the features that 28 heads are joined to                  ->  the same
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tpplan.compiler.bind.bind import Bound
from tpplan.compiler.bind.readers import Taken
from tpplan.compiler.ir.heads import Parts, head_parts
from tpplan.compiler.ir.layout import Pack
from tpplan.compiler.ir.trace import Frame, quoted
from tpplan.plan import Diagnostic

Body = tuple[str, int]
"""A call of a module."""

_SIZES = 6  # as many numbers of ranks are named


@dataclass(frozen=True, slots=True)
class Use:
    """How features are split, and what the trace does with them.

    Attributes:
        features: how many there are.
        taken: how they are taken apart further on, of those that are made.
        joined: what they were concatenated from, of those that are contracted; the parts in which a parameter is used.
        beside: of those that aren't taken apart, the heads that they are made of or combined with, and the body that
            joins these; None of a vector.
        named: whether the plan names their packs.
        reader: of a parameter that has a rule itself, the call whose body reads it.
        unit: of what so many features a rank has to have a multiple; see `Product`.
    """

    features: int
    taken: Taken | None = None
    joined: tuple[int, ...] = ()
    beside: tuple[Frame | None, int] | None = None
    named: bool = False
    reader: Body | None = None
    unit: int = 1

    @property
    def body(self) -> Body | None:
        """The call in which they are heads."""
        frame = self.taken.frame if self.taken is not None else None if self.beside is None else self.beside[0]
        return None if frame is None else (frame.module, frame.call)

    @property
    def outer(self) -> int:
        """In how many alike stretches a view takes them apart, as (…, heads, 3, size); 0 if the plan names others."""
        taken = self.taken
        viewed = taken is not None and taken.operation.is_a("reshape") and not self.named
        return len(taken.stretches) if taken is not None and viewed and len(taken.stretches) > 1 else 0


@dataclass(frozen=True, slots=True)
class InBody:
    """The heads of one body that the axis can't share out evenly.

    Attributes:
        queries: how many queries it has; 0 if its numbers of heads aren't those of queries and their keys.
        parts: which heads each rank has, by their number; empty if there are no such parts.
    """

    queries: int = 0
    parts: Mapping[int, Parts] = field(default_factory=dict[int, Parts])


@dataclass(frozen=True, slots=True)
class Axis:
    """The number of ranks, the numbers of heads that they share out evenly, and those of one body that they can't."""

    size: int
    heads: frozenset[int]
    uneven: InBody = InBody()

    def shared(self, count: int, heads: int | None) -> Pack:
        """A stretch of so many heads: key and value heads fewer than the ranks are held by several ranks each."""
        parts = self.uneven.parts
        if heads is not None and heads in parts:
            return Pack(heads, parts=parts[heads]).scaled(count // heads, 1) or Pack(count)
        if heads == 1 and parts:
            return Pack(count, self.size)
        if heads is None or heads >= self.size or self.size % heads:
            return Pack(count)
        queries = any(number % heads == 0 for number in self.heads)
        return Pack(count, self.size // heads) if queries else Pack(count)

    def grouped(self, groups: int, group: Taken) -> list[Pack]:
        """The packs of groups that are fewer than the ranks: each is shared out among some; none if it can't be."""
        ranks, counts = self.size // groups, heads_of(group)
        if self.size % groups or not any(n and n % ranks == 0 for n in counts):
            return []
        inner = Axis(ranks, frozenset(n for n in counts if n))
        held = [inner.shared(n, heads) for n, heads in zip(group.stretches, counts, strict=True)]
        if not all(n and p.is_even(ranks) for n, p in zip(counts, held, strict=True)):
            return []
        return [p._replace(first=first, among=ranks) for first in range(0, self.size, ranks) for p in held]


def heads_of(taken: Taken) -> list[int | None]:
    """The heads of each stretch; beside one that is viewed as heads, a smaller one that isn't is a single head."""
    each = list(zip(taken.stretches, taken.heads, strict=True))
    viewed = max((n for n, heads in each if heads), default=0)
    return [heads or (1 if n < viewed else None) for n, heads in each]


def uneven_heads(uses: Sequence[Use], axis: Axis) -> dict[Body, InBody]:
    """By body, the heads that the axis can't share out evenly."""
    joined: dict[Body, set[int]] = {}
    for use in uses:
        if use.taken is None and use.beside is not None and use.body is not None:
            joined.setdefault(use.body, set()).add(use.beside[1])
    counts: dict[Body, set[int]] = {}
    for use in uses:
        if use.taken is not None and use.body is not None:
            found = {use.outer} if use.outer in joined.get(use.body, ()) else _numbers(use.taken)
            counts.setdefault(use.body, set()).update(found)
    few = {use.body for use in uses if use.taken is not None and use.taken.group and _few(use.taken, axis.size)}
    uneven: dict[Body, InBody] = {}
    for body, held in counts.items():
        if body not in few and not all(axis.shared(n, n).is_even(axis.size) for n in held):
            uneven[body] = _in_body(held | joined.get(body, set()), axis.size)
    return uneven


def _numbers(taken: Taken) -> set[int]:
    """The numbers of heads, and of groups of these, but for single ones."""
    each = heads_of(taken)
    groups = () if taken.group is None else [n * (each[0] or 1) for n in heads_of(taken.group) if n]
    return {n for n in (*each, *groups) if n and n > 1}


def _few(taken: Taken, size: int) -> bool:
    """Whether there are fewer groups than ranks, each of which has to be taken apart again (`Axis.grouped`)."""
    return (taken.heads[0] or size) < size


def _in_body(counts: set[int], ranks: int) -> InBody:
    keys, queries = min(counts), max(counts)
    if len(counts) > 2 or queries % keys:
        return InBody()
    parts = head_parts(queries, keys, ranks)
    return InBody(queries, {} if parts is None else {keys: parts.keys, queries: parts.queries})


def of_body(use: Use, uneven: Mapping[Body, InBody]) -> InBody:
    """The uneven heads of the body of a use; of a parameter beside heads, those of the body that reads it.

    Where another body joins them, those of as many, if all have the same.
    """
    held = InBody() if use.body is None else uneven.get(use.body, InBody())
    if use.taken is not None or use.beside is None or held.parts:
        return held
    count = use.beside[1]
    own = InBody() if use.reader is None else uneven.get(use.reader, InBody())
    if count in own.parts:
        return InBody(0, {count: own.parts[count]})
    known = {found.parts[count] for found in uneven.values() if count in found.parts}
    return InBody(0, {count: min(known)}) if len(known) == 1 else held


def imbalance(bound: Bound, body: Body, held: InBody, ranks: int) -> Diagnostic | None:
    """TP132 for ranks that have more queries than others; None if all have as many."""
    counts = [count for _, count in held.parts[held.queries]]
    more = round(100 * (max(counts) * ranks / held.queries - 1))
    keys = min(held.parts)
    even = [n for n in range(2, held.queries + 1) if held.queries % n == 0 and (keys % n == 0 or n % keys == 0)]
    shown = ", ".join(map(str, even[:_SIZES]))
    way_out = f"{shown} ranks share them out evenly" if even else "no number of ranks shares them out evenly"
    if len(set(counts)) == 1:
        return None
    return Diagnostic(
        code="TP132",
        message=f"{quoted(body[0])} has {held.queries} heads on {ranks} ranks, which hold "
        f"{', '.join(map(str, counts))}: the fullest has {more}% more than the mean, and the others wait for it",
        span=bound.rule.style_span,
        label=f"{held.queries} heads / {ranks} ranks",
        help=f"nothing is wrong; {way_out}",
        subject=bound.name,
    )


__all__ = ["Axis", "Body", "InBody", "Use", "heads_of", "imbalance", "of_body", "uneven_heads"]
