"""Progress: what is being done, said by whoever does it, and shown on a terminal where somebody asked for that.

    @doing("placing collectives")      with shown():                    ⠹ finding a plan: placing collectives   0:00:07
    def place(…): …                        suggest(…)

Without `shown` around them, or where standard error is no terminal, steps cost next to nothing and import nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

_steps: list[str] = []
_display: Callable[[int, int], None] | None = None


@contextmanager
def doing(what: str) -> Generator[None]:
    """A block, or a function, in which this is being done; steps may stand inside of each other."""
    _steps.append(what)
    advance()
    try:
        yield
    finally:
        _steps.pop()
        advance()


def tell(what: str) -> None:
    """Say what the innermost step does now."""
    if _steps:
        _steps[-1] = what
        advance()


def advance(done: int = 0, total: int = 0) -> None:
    """Say how far the innermost step is; without numbers that nobody knows."""
    if _display is not None:
        _display(done, total)


def wants_progress(stream: TextIO) -> bool:
    """Whether somebody looks at what is written here: a terminal, and no log of a job that runs by itself."""
    quiet = any(os.environ.get(name) for name in ("NO_COLOR", "CI")) or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not quiet


@contextmanager
def shown() -> Generator[None]:
    """A block whose steps are shown on standard error, in a line that goes away before anything else is written."""
    global _display
    if _display is not None or not wants_progress(sys.stderr):
        yield
        return
    line = _Line(sys.stderr)
    _display = line.show
    try:
        with redirect_stdout(line.before(sys.stdout)), redirect_stderr(line.before(sys.stderr)):
            yield
    finally:
        _display = None
        line.stop()


class _Line:
    """A line of rich, made when there is a first thing to show."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Any = None

    def show(self, done: int, total: int) -> None:
        if not _steps:
            return self.stop()
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            text = TextColumn("{task.description}", markup=False)
            columns = SpinnerColumn(), text, BarColumn(20), TimeElapsedColumn()
            console = Console(file=self._stream, force_terminal=True)
            self._bar = Progress(
                *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._bar.add_task("")
            self._bar.start()
        self._bar.update(0, description=": ".join(_steps[-2:]), completed=done, total=total or None)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def before(self, stream: TextIO) -> TextIO:
        """The stream, before whose next words the line goes away."""
        return cast("TextIO", _After(stream, self.stop))


class _After:
    def __init__(self, stream: TextIO, stop: Callable[[], None]) -> None:
        self._stream = stream
        self._stop = stop

    def write(self, text: str) -> int:
        self._stop()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


__all__ = ["advance", "doing", "shown", "tell", "wants_progress"]
