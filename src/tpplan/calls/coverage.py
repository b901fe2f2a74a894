"""Coverage: the sizes of calls of one kind for which a proof holds.

in:  what was checked for a call of certain sizes
out: whether a call of other sizes is covered by that, and if not, which condition it doesn't satisfy

What is proved of one size holds for all that satisfy the same conditions (`compiler/cover`). These are found when a
call of another size first comes. Where they can't be, the sizes that were proved are covered, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpplan.compiler.cover import Cover, Subject

Sizes = tuple[object, ...]
FindCover = Callable[[Subject], Cover | None]


def flat(sizes: Sizes) -> list[int]:
    """All sizes of a key, dim by dim."""
    found: list[int] = []
    grouped: Any = sizes
    for held, count in grouped:
        found += count * ([*held] if isinstance(held, tuple) else [held])
    return found


@dataclass(slots=True, eq=False)
class Coverage:
    """What is known of the sizes of calls that run by one program.

    Attributes:
        exact: sizes that were proved by themselves.
        subjects: what was checked: for each combination of sides of branches on data, which must all hold.
    """

    exact: set[Sizes]
    subjects: list[Subject | None]
    _covers: list[Cover | None] = field(default_factory=list[Cover | None])

    def holds(self, sizes: Sizes, find: FindCover) -> bool:
        """Whether calls of these sizes are covered; `find` finds the conditions where these aren't known yet."""
        if sizes in self.exact:
            return True
        self._find(find)
        return self.covers(flat(sizes))

    def covers(self, numbers: Sequence[int]) -> bool:
        """Whether calls of these sizes satisfy the conditions, as far as these are known."""
        return len(self._covers) == len(self.subjects) and all(
            [cover is not None and cover.holds(numbers) for cover in self._covers]
        )

    def join(self, sizes: Sizes, subject: Subject | None) -> None:
        """Let what was checked besides, at these sizes, be a condition as well."""
        self.exact = {sizes}
        self.subjects.append(subject)

    def broken(self, sizes: Sizes) -> Iterator[str]:
        """The conditions that these sizes don't satisfy, in words."""
        numbers = flat(sizes)
        for cover in self._covers:
            yield from () if cover is None else cover.broken(numbers)

    def _find(self, find: FindCover) -> None:
        for subject in self.subjects[len(self._covers) :]:
            self._covers.append(None if subject is None else find(subject))


__all__ = ["Coverage", "FindCover", "Sizes", "flat"]
