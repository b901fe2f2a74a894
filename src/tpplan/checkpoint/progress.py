"""Progress of a load: told to a function, or shown on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with the bytes that were read, and all that will be."""


def shown(progress: bool | Progress | None, speaks: bool) -> Progress:
    """What to call while a checkpoint is read.

    Args:
        progress: the user's wish: a function, True for a bar, or nothing.
        speaks: whether it is for this rank to show a bar.
    """
    if callable(progress):
        return progress
    return _bar() if progress and speaks else _nothing


def _nothing(done: int, total: int) -> None:
    """Tell nobody."""


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
    bar = Bar(TextColumn("loading"), *columns, console=Console(file=sys.stderr), transient=True)
    task = bar.add_task("loading")

    def tell(done: int, total: int) -> None:
        if not bar.live.is_started:
            bar.start()
        bar.update(task, completed=done, total=total)
        if done >= total:
            bar.stop()

    return tell


__all__ = ["Progress", "shown"]
