"""Progress of a load or a save: told to a function, or shown on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext

from tpplan.progress import advance, doing
from tpplan.progress import shown as on_terminal

Progress = Callable[[int, int], None]
"""Called with the bytes that were read or written, and all that will be."""


@contextmanager
def shown(what: str, progress: bool | Progress | None, speaks: bool) -> Generator[Progress]:
    """A block in which a checkpoint is read or written, with what to call meanwhile.

    Args:
        what: what is done there.
        progress: the user's wish: a function, True for a bar, or nothing.
        speaks: whether it is for this rank to show a bar.
    """
    if callable(progress):
        yield progress
        return
    with on_terminal() if progress and speaks else nullcontext(), doing(what):
        yield advance


__all__ = ["Progress", "shown"]
