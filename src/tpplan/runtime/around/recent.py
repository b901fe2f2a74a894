"""Recent calls: which program each call of a model ran by, for activation checkpoints that recompute a part of one.

A checkpoint recomputes in a backward, while one node of the graph runs. Autograd numbers nodes in the order in which
they are made, so the node's number tells which call made it: the first that ended after it. What comes before a call
belongs to it as well, since a reentrant checkpoint makes its node before it calls a module.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

from tpplan.compat.autograd import next_node_number, running_node_number, runs_backward
from tpplan.plan import TpplanError

if TYPE_CHECKING:
    from tpplan.runtime.parameters.handed_out import HandedOut

_LIMIT = 4096  # changes from one kind of call to another, while graphs of earlier ones are kept


class RecomputeError(TpplanError):
    """It can't be told which program a recomputation has to run by."""


class Ran(NamedTuple):
    """How a call ran.

    Attributes:
        handed_out: of the program that it ran by.
        batch: its first size, where a reshard needs that.
        alone: whether it was a module that was called by itself.
        watched: whether it was watched, so that what was to be compiled ran as it is.
        compiler: what compiled the modules that its body called, where the body itself ran in Python.
        state: what its proof stands on of what the model's code reads.
    """

    handed_out: HandedOut
    batch: int | None
    alone: bool
    watched: bool = False
    compiler: object = None
    state: int = 0


class RecentCalls:
    """The calls of one model. Successive ones that ran alike are one entry."""

    def __init__(self) -> None:
        """Begin with none."""
        self._ends: list[int] = []
        self._ran: list[Ran] = []
        self._forgotten = -1
        self._mixed = False

    def __deepcopy__(self, memo: object) -> RecentCalls:
        return RecentCalls()  # no graph leads to a copy

    @property
    def _last(self) -> int:
        """The last node of the call that was noted last."""
        return self._ends[-1] if self._ends else self._forgotten

    def has_grown(self) -> bool:
        """Whether this thread's next node is another than after the call that was noted last."""
        return next_node_number() - 1 != self._last

    def note(self, ran: Ran) -> None:
        """A call has ended."""
        if runs_backward():  # its graph, if any, is used up while it is recomputed
            return
        end, last = next_node_number() - 1, self._last
        if end <= last:  # no gradients; or another thread, which has numbers of its own
            self._mixed |= end < last
        elif self._ran and self._ran[-1] == ran:
            self._ends[-1] = end
        else:
            self._ends.append(end)
            self._ran.append(ran)
            if len(self._ends) > _LIMIT:
                self._forgotten = self._ends.pop(0)
                self._ran.pop(0)

    def running(self) -> Ran | None:
        """How the call ran that made the node which runs in this thread; None for one that hasn't ended.

        Raises:
            RecomputeError: that isn't known any more.
        """
        number = running_node_number()
        if number is None:
            return None
        if self._mixed and len(set(self._ran)) > 1:
            raise unknown("the model was called from several threads")
        if number <= self._forgotten:
            raise unknown(f"there were over {_LIMIT} calls of alternating kinds since its forward")
        place = bisect_left(self._ends, number)
        return self._ran[place] if place < len(self._ends) else None


def unknown(
    reason: str, way_out: str = "call `backward` in the thread of the forward, before calls of other kinds"
) -> RecomputeError:
    """An error that says why a part of a call can't be recomputed, and what to do about it."""
    message = f"an activation checkpoint can't tell which program its call ran by, as {reason}"
    return RecomputeError.of("TP175", message, help=way_out)


__all__ = ["Ran", "RecentCalls", "RecomputeError", "unknown"]
