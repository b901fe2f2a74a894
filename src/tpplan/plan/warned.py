"""Warnings at the line of the user's that called tpplan, however many functions lie between."""

from __future__ import annotations

import sys
import warnings
from typing import Final

_PASSING_ON: Final = ("tpplan", "contextlib", "functools")


def warn_user(text: str) -> None:
    """Warn at the innermost call that isn't tpplan's own, nor that of a decorator."""
    frame, level = sys._getframe(1), 2  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSING_ON:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


__all__ = ["warn_user"]
