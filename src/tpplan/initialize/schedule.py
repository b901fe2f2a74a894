"""Which operations of a record must run so that some storages get their numbers, and when each can be freed.

Walking backwards, an operation is needed if a storage that it writes is read later. One that writes all of a storage
ends the need for what was in it before: of a weight that is initialised twice, the first numbers are drawn and dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from tpplan.initialize.record import InitialOperation


class InitialStep(NamedTuple):
    """What to do at an operation.

    Attributes:
        place: of the operation in the record.
        runs: whether to run it.
        loads: storages of which this version is known already.
        frees: those that aren't needed afterwards.
    """

    place: int
    runs: bool
    loads: tuple[int, ...]
    frees: tuple[int, ...]


class Schedule(NamedTuple):
    """Steps in the order of the record.

    Attributes:
        steps: the steps.
        useful: storages that are written for their numbers, not only to draw.
    """

    steps: list[InitialStep]
    useful: set[int]


def schedule(
    operations: Sequence[InitialOperation],
    wanted: Mapping[int, Collection[int]],
    drawn: Collection[int],
    known: Mapping[int, int],
) -> Schedule:
    """Find what must run.

    Args:
        operations: the record.
        wanted: storages, by the place of the operation after which their numbers are wanted.
        drawn: the places of operations that must run for what they draw.
        known: storages of which one version is known, with the operation that has written it.
    """
    steps: list[InitialStep] = []
    useful: set[int] = set()
    live: set[int] = set()
    places = [*wanted, *drawn]
    first, last = min(places, default=0), max(places, default=-1)
    for index in range(last, -1, -1):
        if index < first and not live:
            break
        operation, ends = operations[index], wanted.get(index, ())
        touched = {held for held in ends if held not in live}
        touched |= {held for held in operation.reads | operation.writes if held not in live}
        live.update(ends)
        written = operation.writes & live
        loads = [held for held in written if known.get(held) == index]
        written = written.difference(loads)
        live.difference_update(loads)
        runs = bool(written) or index in drawn
        if runs:
            useful |= written
            live -= operation.whole
            live |= operation.reads
        if runs or loads or ends:
            frees = touched if runs else touched.intersection(ends)
            steps.append(InitialStep(index, runs, tuple(loads), tuple(sorted(frees))))
    steps.reverse()
    return Schedule(steps, useful)


__all__ = ["InitialStep", "Schedule", "schedule"]
