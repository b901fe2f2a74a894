"""Reads: by what names a model's Python asks its modules for something.

in:  a block in which modules run
out: the names; `ANYTHING` if a body looks at all that its module has

    self.scale * self.up(x)      ->   "scale", "up"

What is never read is no premise: `generate` may note what it likes on a model.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tpplan.state.parts import is_library

ANYTHING = "__dict__"
_lock = threading.Lock()
_blocks = 0


class _Noting(threading.local):
    """The names that are being collected in this thread."""

    names: set[str] | None = None


_noting = _Noting()


@contextmanager
def reads() -> Generator[set[str]]:
    """A block; the names that are read in it are in the set."""
    before, _noting.names = _noting.names, set[str]()
    _count(1)
    try:
        yield _noting.names
    finally:
        _count(-1)
        if before is not None:
            before |= _noting.names
        _noting.names = before


def _count(more: int) -> None:
    """Let modules tell while there is a block in any thread."""
    global _blocks
    with _lock:
        _blocks += more
        if _blocks:
            nn.Module.__getattribute__ = _noted  # pyright: ignore[reportAttributeAccessIssue]
        else:
            del nn.Module.__getattribute__


def _noted(module: nn.Module, name: str) -> Any:
    names = _noting.names
    if names is not None and (name != ANYTHING or not is_library(_caller())):
        names.add(name)
    return object.__getattribute__(module, name)


def _caller() -> str | None:
    """The module of Python whose code asks for an attribute."""
    return sys._getframe(2).f_globals.get("__name__")  # pyright: ignore[reportPrivateUsage]


__all__ = ["ANYTHING", "reads"]
