"""Steering: numbers in a call's tensors that its Python reads, as a part of its key.

in:  the facts that proofs lean on, and the tensors of a call
out: the call's key, with the first proof whose facts hold for it, or with none: such a call is proved anew

    grid [[1, 4, 4]]   ->   kind, ("facts", sizes, 0)        proved for this grid
    grid [[1, 8, 2]]   ->   kind, ("facts", sizes, None)     another call

Facts are those of one run at certain sizes. So sizes count in kinds of calls whose numbers are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from tpplan.calls.key import CallKey, Part
from tpplan.compiler.ir.facts import NOTHING, Facts
from tpplan.parity.tree import Path

Tensors = Callable[[], Mapping[Path, Tensor]]
_Entries = dict[tuple[object, ...], list[list[Facts]]]


class Steering:
    """The facts of all proofs of one model."""

    def __init__(self) -> None:
        """Know none."""
        self._known: dict[Part, _Entries] = {}

    def is_known(self, key: CallKey) -> bool:
        """Whether numbers are read in calls of a kind."""
        return key.kind.traced in self._known

    def count(self, key: CallKey) -> int:
        """How many calls of a kind were proved, for the numbers that they read."""
        return sum(map(len, self._known.get(key.kind.traced, {}).values()))

    def forget(self) -> None:
        """Know none any more, as the model was changed."""
        self._known.clear()

    def __call__(self, key: CallKey, tensors: Tensors) -> CallKey:
        """The key of a call, from one that doesn't look at numbers."""
        known = self._known.get(key.kind.traced)
        if known is None:
            return key
        held = tensors()
        entries = known.get(key.sizes, [])
        number = next((n for n, facts in enumerate(entries) if all(each.hold(held) for each in facts)), None)
        return _with(key, number)

    def note(self, key: CallKey, facts: Facts | None) -> CallKey:
        """Take the facts of a new proof of a call; returns the call's key.

        Args:
            key: of the call, without numbers.
            facts: what the proof leans on.
        """
        if key.kind.traced not in self._known and (facts is None or not facts.reads):
            return key
        entries = self._known.setdefault(key.kind.traced, defaultdict(list))[key.sizes]
        entries.append([facts or NOTHING])
        return _with(key, len(entries) - 1)

    def join(self, key: CallKey, full: CallKey, facts: Facts | None) -> bool:
        """Let what was proved for `full` hold only where further facts do; whether these are new.

        Another side of a branch may read other numbers: then the proof of both leans on what either reads.
        """
        if facts is None or not facts.reads:
            return False
        if key.kind.traced not in self._known:
            self.note(key, facts)
            return True
        number = _number(full)
        held = self._known[key.kind.traced][key.sizes][number] if number is not None else []
        if any(each.reads == facts.reads for each in held):
            return False
        held.append(facts)
        return True


def _with(key: CallKey, number: int | None) -> CallKey:
    part: Part = ("facts", key.sizes, number)
    return key._replace(kind=key.kind._replace(traced=(*key.kind.traced, part)))


def _number(key: CallKey) -> int | None:
    last: Any = key.kind.traced[-1] if key.kind.traced else None
    return last[2] if isinstance(last, tuple) and len(last) == 3 and last[0] == "facts" else None  # pyright: ignore


__all__ = ["Steering"]
