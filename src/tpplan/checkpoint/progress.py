"""Progress of a load: told to a function, or shown on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

Progress = Callable[[int, int], None]
"""Called with the bytes that were read, and all that will be."""


@contextmanager
def shown(progress: bool | Progress | None, speaks: bool) -> Generator[Progress]:
    """A block in which a checkpoint is read, with what to call meanwhile.

    Args:
        progress: the user's wish: a function, True for a bar, or nothing.
        speaks: whether it is for this rank to show a bar.
    """
    if callable(progress):
        yield progress
    elif progress and speaks:
        from rich.console import Console
        from rich.progress import DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        columns = DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
        with Bar(TextColumn("loading weights"), *columns, console=Console(file=sys.stderr)) as bar:
            task = bar.add_task("")
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield lambda done, total: None


__all__ = ["Progress", "shown"]
