"""Numbers that steer `test_steering.py` from another file."""

from __future__ import annotations

FLAG = False
TABLE = {"flag": False}


def flag() -> bool:
    return FLAG
