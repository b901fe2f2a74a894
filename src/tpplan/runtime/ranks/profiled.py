"""Names of collectives in a profiler's trace: which collective, whether of a backward, and whose boundary it serves.

    tpplan all-reduce: the result of `layers.0.mlp.down`
    tpplan all-reduce, backward: the argument `input` of `layers.0.mlp.up`
    tpplan wait for all-reduce, backward: …    where one was begun beside other work

Reshards are shared by all modules that do the same, so that their places are told anew in each call; only while a
profiler runs, as that takes longer than a small collective does. Graphs of torch.compile have the names of their own
operators.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from tpplan.compat.modes import is_profiled


class _Told(threading.local):
    """The place that a thread is at."""

    place = ""


_told = _Told()


def at_place(place: str) -> AbstractContextManager[object]:
    """A block that serves a place; "" for none that is known."""
    return _NOTHING if place == _told.place else _at_place(place)


@contextmanager
def _at_place(place: str) -> Generator[None]:
    before, _told.place = _told.place, place
    try:
        yield
    finally:
        _told.place = before


def told_place() -> str:
    """The place of the block around, while a profiler runs."""
    return _told.place


def telling(move: Callable[[Tensor], Tensor], place: str) -> Callable[[Tensor], Tensor]:
    """`move`, which tells its place."""

    def told(tensor: Tensor) -> Tensor:
        with at_place(place):
            return move(tensor)

    return told


def named_range(collective: str, adjoint: bool, place: str) -> AbstractContextManager[object]:
    """A range of that name in a trace, if a profiler runs.

    Args:
        collective: its name, such as `all-reduce`.
        adjoint: whether it serves a backward.
        place: what it serves, where no block around tells.
    """
    if not is_profiled():
        return _NOTHING
    where = _told.place or place
    name = f"tpplan {collective}{', backward' if adjoint else ''}"
    return torch.profiler.record_function(f"{name}: {where}" if where else name)


_NOTHING = nullcontext()

__all__ = ["at_place", "named_range", "telling", "told_place"]
