"""What the root of a sharded model knows of a watch over its calls; see `calls/watch.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol


class WatchedCall(Protocol):
    """A call of the root whose path through the code is held against the proved one."""

    def run(self, forward: Callable[[], Any]) -> Any:
        """What `forward` returns; `AGAIN` if the call has to be run again, by another program.

        Raises:
            UnprovedCallError: the call left the proved path.
        """
        ...

    def repeat(self) -> bool:
        """Whether the call can be run once more, as if it hadn't been: what was to be compiled ran as it is.

        Random numbers are put back for that.
        """
        ...


class _Again:
    """The type of `AGAIN`."""


AGAIN: Final = _Again()

__all__ = ["AGAIN", "WatchedCall"]
