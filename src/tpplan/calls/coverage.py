"""Coverage: the sizes of calls of one kind for which a proof holds.

in:  what was checked for a call of certain sizes
out: whether a call of other sizes is covered by that, and if not, which condition it doesn't satisfy

What is proved of one size holds for all that satisfy the same conditions (`compiler/cover`). These are found when a
call of another size first comes. Where they can't be, the sizes that were proved are covered, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tpplan.compiler.cover import Cover, Subject
from tpplan.compiler.trace.slots import LENGTH
from tpplan.state.reads import ANYTHING

Sizes = tuple[object, ...]
FindCover = Callable[[Subject], Cover | None]


def flat(sizes: Sizes) -> list[int]:
    """All sizes of a key, dim by dim."""
    found: list[int] = []
    grouped: Any = sizes
    for held, count in grouped:
        found += count * ([*held] if isinstance(held, tuple) else [held])
    return found


class Written(NamedTuple):
    """What a forward has written.

    Attributes:
        name: of the attribute of a module that it is, or is in; None for what no module has.
        place: where that is, in full.
        is_sure: whether no function's globals lead there, to what has a place of its own as well.
        contents: what stood there before, and after.
    """

    name: str | None
    place: str
    is_sure: bool
    contents: tuple[object, object]


class Leans(NamedTuple):
    """What of the model's state a call that was compiled leans on.

    Attributes:
        reads: the names by which its bodies ask modules for something.
        idle: the places that each such call changes, and by which it steers nothing; see `Sequel`.
    """

    reads: frozenset[str]
    idle: frozenset[str]

    def on(self, written: Sequence[Written]) -> bool:
        """Whether it may go another way after another call has written there."""
        idle = [held for held in written if self._is_idle(held)]
        others = [held for held in written if held not in idle]
        return any(held.is_sure or not any(_is_one(held, other) for other in idle) for held in others)

    def _is_idle(self, written: Written) -> bool:
        name, place = written.name, written.place
        if name is not None and name not in self.reads and ANYTHING not in self.reads:
            return True
        grown = [held.removesuffix(LENGTH) for held in self.idle if held.endswith(LENGTH)]
        return place in self.idle or any(place == held or place.startswith(f"{held}[") for held in grown)


def _is_one(written: Written, other: Written) -> bool:
    """Whether a function that leads to what was written leads to the other place."""
    last = max(map(other.place.rfind, ".[{"))
    return other.is_sure and written.place.endswith(other.place[last:]) and written.contents == other.contents


class Coverage:
    """What is known of calls that run by one program: their sizes, and what of the model's state they lean on."""

    def __init__(self, sizes: Sizes, subject: Subject | None, leans: Leans) -> None:
        """Be proved at these sizes.

        Args:
            sizes: of the call that was compiled.
            subject: what was checked, None if it holds for no other sizes.
            leans: what of the state it leans on.
        """
        self._exact = {sizes: leans}
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

    def add(self, sizes: Sizes, leans: Leans) -> None:
        """Be proved at these sizes by themselves as well."""
        self._exact[sizes] = leans

    def joined(self, sizes: Sizes, subject: Subject | None, leans: Leans) -> Coverage:
        """That of calls which lean on what was checked besides, at these sizes, as well."""
        made = Coverage(sizes, subject, leans)
        made._waiting = [*self._waiting, subject]
        made._covers = [*self._covers]
        return made

    def after(self, written: Sequence[Written], own: Sizes | None) -> Coverage | None:
        """What still holds once a call has written there; None if nothing does.

        Args:
            written: where that was.
            own: the sizes of that call if it runs by this, as its proof shows that those after it do the same.
        """
        kept = {s: leans for s, leans in self._exact.items() if not leans.on(written)}
        if len(kept) == len(self._exact):
            return self
        if own is not None:
            kept[own] = self._exact.get(own) or next(iter(self._exact.values()))
        made: Coverage | None = None
        for sizes, leans in kept.items():
            if made is None:
                made = Coverage(sizes, None, leans)
            made.add(sizes, leans)
        return made

    def without(self, sizes: Sizes) -> bool:
        """Leave these sizes to another; whether any are left."""
        self._exact.pop(sizes, None)
        return bool(self._exact) and self.is_exact

    def broken(self, sizes: Sizes) -> Iterator[str]:
        """The conditions that these sizes don't satisfy, in words."""
        numbers = flat(sizes)
        for cover in self._covers:
            yield from () if cover is None else cover.broken(numbers)


__all__ = ["Coverage", "FindCover", "Leans", "Sizes", "Written", "flat"]
