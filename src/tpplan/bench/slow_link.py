"""A link that is slowed on purpose: collectives end no earlier than one of so many bytes a second would let them.

Who waits for it sleeps, as a processor does nothing for what a network card sends. What others compute meanwhile is
hidden, what a rank sleeps isn't.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tpplan.compiler.ir.layout import Collective
from tpplan.cost.communication import bytes_sent
from tpplan.runtime.ranks.communicator import ProcessGroupCommunicator

Waiting = Callable[[], Tensor]


class SlowLink:
    """Within this block, the collectives of this process's ranks share one link.

    Attributes:
        sent: for how many seconds it was busy.
        waited: for how many seconds somebody waited for it.
    """

    def __init__(self, rate: float) -> None:
        """Send `rate` bytes a second."""
        self.rate, self.sent, self.waited, self._free = rate, 0.0, 0.0, 0.0
        self._before: dict[str, Any] = {}

    def __enter__(self) -> SlowLink:
        """Slow the collectives that begin from now on."""
        kind: Any = ProcessGroupCommunicator
        names = ("all_reduce", "all_gather", "reduce_scatter", "begin_collective", "pairwise")
        self._before = {name: getattr(kind, name) for name in names}
        for name, made in (
            ("all_reduce", self._at_once("all-reduce")),
            ("all_gather", self._at_once("all-gather")),
            ("reduce_scatter", self._at_once("reduce-scatter")),
            ("begin_collective", self._begun()),
            ("pairwise", self._pairwise()),
        ):
            setattr(kind, name, made)
        return self

    def __exit__(self, *error: object) -> None:
        """Leave them as they were."""
        for name, stock in self._before.items():
            setattr(ProcessGroupCommunicator, name, stock)

    def _takes(self, count: float) -> float:
        """When so many bytes have arrived that are sent from now on."""
        seconds = count / self.rate
        self.sent += seconds
        self._free = max(self._free, time.perf_counter()) + seconds
        return self._free

    def _until(self, end: float) -> None:
        left = end - time.perf_counter()
        if left > 0:
            self.waited += left
            time.sleep(left)

    def _bytes(self, axis: ProcessGroupCommunicator, collective: str, tensor: Tensor) -> float:
        whole = tensor.nbytes * (axis.size if collective == "all-gather" else 1)
        return bytes_sent(collective, whole, axis.size)

    def _at_once(self, collective: str) -> Callable[..., Tensor]:
        stock = self._before[collective.replace("-", "_")]

        def slowed(axis: ProcessGroupCommunicator, tensor: Tensor, *arguments: Any) -> Tensor:
            end = self._takes(self._bytes(axis, collective, tensor))
            made = stock(axis, tensor, *arguments)
            self._until(end)
            return made

        return slowed

    def _begun(self) -> Callable[..., Waiting]:
        stock = self._before["begin_collective"]

        def slowed(axis: ProcessGroupCommunicator, collective: Collective, tensor: Tensor, dim: int = 0) -> Waiting:
            end = self._takes(self._bytes(axis, str(collective), tensor))
            wait = stock(axis, collective, tensor, dim)
            return lambda: self._waited(wait, end)

        return slowed

    def _pairwise(self) -> Callable[..., Any]:
        stock = self._before["pairwise"]

        @contextmanager
        def slowed(axis: ProcessGroupCommunicator, collective: Collective) -> Generator[Callable[..., Waiting]]:
            with stock(axis, collective) as swap:

                def slow(sent: Tensor, distance: int) -> Waiting:
                    end = self._takes(sent.nbytes)
                    wait = swap(sent, distance)
                    return lambda: self._waited(wait, end)

                yield slow

        return slowed

    def _waited(self, wait: Waiting, end: float) -> Tensor:
        made = wait()
        self._until(end)
        return made


__all__ = ["SlowLink"]
