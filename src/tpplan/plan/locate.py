"""Finding plans: the user's files, and those that ship with tpplan."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_SUFFIXES = (".yaml", ".yml")


@cache
def shipped_plan_directory() -> Path | None:
    """The folder of the plans that ship with tpplan: inside a wheel's package, else at a checkout's top."""
    package = Path(__file__).resolve().parent.parent
    wheel = package / "_plans"
    if wheel.is_dir():
        return wheel
    checkout = package.parent.parent
    if package.parent.name == "src" and (checkout / "plans").is_dir():
        return checkout / "plans"
    return None


def shipped_plan_paths() -> list[Path]:
    """The files of the shipped plans, sorted by name."""
    directory = shipped_plan_directory()
    found = [] if directory is None else [path for path in directory.iterdir() if path.suffix in _SUFFIXES]
    return sorted(found, key=lambda path: path.stem)


def shipped_plan_names() -> tuple[str, ...]:
    """The names of the shipped plans, sorted, such as `llama`."""
    return tuple(path.stem for path in shipped_plan_paths())


def find_plan(name_or_path: str | os.PathLike[str], relative_to: Path | None = None) -> Path | None:
    """The file meant by a path, or by a shipped plan's name; None if there is none.

    A path is taken from `relative_to`, or else from the working directory. A file wins over a shipped name.
    """
    text = os.fspath(name_or_path)
    if not text or "\0" in text:
        return None
    path = Path(text) if relative_to is None else relative_to / text
    if _is_file(path):
        return path
    directory = shipped_plan_directory()
    if directory is None or Path(text).name != text:
        return None
    candidates = [directory / text, *(directory / f"{text}{suffix}" for suffix in _SUFFIXES)]
    return next((candidate for candidate in candidates if candidate.suffix and _is_file(candidate)), None)


def shown_path(path: Path) -> str:
    """The path as a message shows it: relative where it lies below the working directory."""
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix() if path.is_absolute() else path.as_posix()
    except (OSError, ValueError):
        return path.as_posix()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
