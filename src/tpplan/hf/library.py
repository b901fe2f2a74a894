"""The library itself, which is optional, and what is raised where it can't be of use."""

from __future__ import annotations

import importlib
from typing import Any


class UnusableError(Exception):
    """A folder, a config or a class of transformers can't be used; whoever asked makes a diagnostic of it."""

    def __init__(self, message: str, way_out: str) -> None:
        """Say what is wrong, and what to do."""
        super().__init__(message)
        self.message = message
        self.way_out = way_out


def transformers_for(what: str) -> Any:
    """The library, which `what` needs.

    Raises:
        UnusableError: it isn't installed.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise UnusableError(f"`{what}` needs transformers, which isn't installed", "pip install 'tpplan[hf]'") from None


def first_line(error: BaseException) -> str:
    """What an exception says, in a line: its first, and what follows where that ends in a colon."""
    told: list[str] = []
    for line in str(error).strip().splitlines():
        told.append(line.strip())
        if not line.rstrip().endswith(":"):
            break
    if isinstance(error, KeyError):
        return f"there is no {' '.join(told)}"  # it says the key alone
    return " ".join(told) or type(error).__name__


__all__ = ["UnusableError", "first_line", "transformers_for"]
