"""Locations: the lines of a model's own source, to which messages and branches belong.

in:  Python's stack while a model runs
out: the innermost line that is neither torch's nor the compiler's

    x = self.norm(x).view(b, -1)   ->   Location("…/model.py", 12), for each operation of that line
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from pathlib import Path as FilePath

import torch

TORCH, PACKAGE = str(FilePath(torch.__file__).parent), str(FilePath(__file__).parents[2])
INTERNAL = (TORCH, PACKAGE)
"""The folders of torch and of this package."""


@dataclass(frozen=True, slots=True)
class Location:
    """The line of the model's own source that an operation came from."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def short(self) -> str:
        """File and line without the folders that differ from machine to machine."""
        _, installed, inside = self.file.rpartition("site-packages/")
        name = inside if installed else "/".join(self.file.split("/")[-2:])
        return f"{name}:{self.line}"


def location_now() -> Location | None:
    """The line of the model's source that is running."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        internal = _internal.get(name)
        if internal is None:
            internal = _internal[name] = name.startswith((*INTERNAL, "<"))
        if not internal:
            return _location_at(name, frame.f_lineno)
        frame = frame.f_back
    return None


_internal: dict[str, bool] = {}


@functools.cache
def _location_at(file: str, line: int) -> Location:
    return Location(file, line)


__all__ = ["INTERNAL", "PACKAGE", "TORCH", "Location", "location_now"]
