"""Coverage: the sizes of calls of one kind for which a proof holds.

in:  what was checked for a call of certain sizes
out: whether a call of other sizes is covered by that, and if not, which condition it doesn't satisfy

What is proved of one size holds for all that satisfy the same conditions (`compiler/cover`). These are found when a
call of another size first comes. Where they can't be, the sizes that were proved are covered, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


class Coverage:
    """What is known of the sizes of calls that run by one program."""

    def __init__(self, sizes: Sizes, subject: Subject | None) -> None:
        """Be proved at these sizes; `subject` is what was checked, None if it holds for no others."""
        self._exact = {sizes}
        self._waiting = [subject]  # for their conditions to be found
        self._covers: list[Cover | None] = []

    def holds(self, sizes: Sizes, find: FindCover) -> bool:
        """Whether calls of these sizes are covered; `find` finds the conditions where these aren't known yet."""
        if sizes in self._exact:
            return True
        self._covers += [None if subject is None else find(subject) for subject in self._waiting]
        self._waiting.clear()
        return self.covers(flat(sizes))

    def covers(self, numbers: Sequence[int]) -> bool:
        """Whether calls of these sizes satisfy the conditions, as far as these are known."""
        return not self._waiting and all([cover is not None and cover.holds(numbers) for cover in self._covers])

    @property
    def is_exact(self) -> bool:
        """Whether no more than the sizes that were proved are covered."""
        return None in (self._covers if not self._waiting else self._waiting)

    def add(self, sizes: Sizes) -> None:
        """Be proved at these sizes by themselves as well."""
        self._exact.add(sizes)

    def joined(self, sizes: Sizes, subject: Subject | None) -> Coverage:
        """That of calls which lean on what was checked besides, at these sizes, as well."""
        made = Coverage(sizes, subject)
        made._waiting = [*self._waiting, subject]
        made._covers = [*self._covers]
        return made

    def without(self, sizes: Sizes) -> bool:
        """Leave these sizes to another; whether any are left."""
        self._exact.discard(sizes)
        return bool(self._exact) and self.is_exact

    def broken(self, sizes: Sizes) -> Iterator[str]:
        """The conditions that these sizes don't satisfy, in words."""
        numbers = flat(sizes)
        for cover in self._covers:
            yield from () if cover is None else cover.broken(numbers)


__all__ = ["Coverage", "FindCover", "Sizes", "flat"]
