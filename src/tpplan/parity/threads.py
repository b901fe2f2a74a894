"""Simulated ranks: the threads of one process, which meet at every collective.

Sums are taken in rank order, so that a run is reproducible to the bit. A rank that fails, or that leaves while others
wait for it, releases all of them; the first real error is the one that is reported.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor

from tpplan.compiler.ir.layout import Collective
from tpplan.parity.parity_errors import RankError, RanksDisagreeError, RankTimeoutError, VerifyError, describe

T = TypeVar("T")
TIMEOUT = 300.0


class _ReleasedError(Exception):
    """Raised in a rank because another one failed."""


class Rendezvous:
    """Where the ranks of one axis hand in a tensor and see everybody's."""

    def __init__(self, size: int, timeout: float = TIMEOUT) -> None:
        """Expect `size` ranks; one that keeps the others waiting for `timeout` seconds is given up on."""
        self.size = size
        self.timeout = timeout
        self.failure: VerifyError | None = None
        self._changed = threading.Condition()
        self._held: dict[int, tuple[str, Tensor]] = {}
        self._complete: tuple[Tensor, ...] = ()
        self._round = 0
        self._left: set[int] = set()

    def exchange(self, rank: int, what: str, tensor: Tensor) -> tuple[Tensor, ...]:
        """Everybody's tensors in rank order, once all have called this with the same `what`."""
        with self._changed:
            # A rank may go on and write to its tensor while slower ones still read it.
            self._held[rank] = (what, tensor.detach().clone())
            if len(self._held) == self.size:
                self._close_round()
            else:
                self._wait_for_others(rank, what)
            if self.failure is not None:
                raise _ReleasedError
            return self._complete

    def leave(self, rank: int) -> None:
        """Tell that `rank` is done and comes to no further exchange."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def fail(self, failure: VerifyError) -> None:
        """Release everybody; the first failure counts."""
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()

    def _close_round(self) -> None:
        ordered = [self._held[rank] for rank in range(self.size)]
        if len({what for what, _ in ordered}) > 1:
            shown = "; ".join(f"rank {rank}: {what}" for rank, (what, _) in enumerate(ordered))
            self.fail(RanksDisagreeError.of("TP194", f"the ranks call different collectives at the same time: {shown}"))
        self._complete = tuple(tensor for _, tensor in ordered)
        self._held = {}
        self._round += 1
        self._changed.notify_all()

    def _wait_for_others(self, rank: int, what: str) -> None:
        this_round = self._round

        def settled() -> bool:
            return self._round != this_round or self.failure is not None or bool(self._left)

        in_time = self._changed.wait_for(settled, self.timeout)
        if self._round != this_round or self.failure is not None:
            return
        missing = ", ".join(str(other) for other in range(self.size) if other not in self._held)
        if in_time:
            gone = ", ".join(map(str, sorted(self._left)))
            message = f"rank {rank} waits in {what}, but rank {gone} has finished without it"
            self.fail(RanksDisagreeError.of("TP194", message))
        else:
            message = f"rank {rank} waited {self.timeout:g} s in {what} for rank {missing}"
            self.fail(RankTimeoutError.of("TP194", message, help="give more by `timeout=`"))


class ThreadCommunicator:
    """One thread's view of the axis; see `tpplan.runtime.ranks.communicator.Communicator`.

    Attributes:
        counts: how often each collective ran.
    """

    one_shot = 0

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        """Be `rank` of those that meet at `rendezvous`."""
        self.size = rendezvous.size
        self.rank = rank
        self.counts: Counter[str] = Counter()
        self._rendezvous = rendezvous

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Communicator`."""
        return _sum(self._exchange(Collective.ALL_REDUCE, tensor))

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """See `Communicator`."""
        return torch.cat(self._exchange(Collective.ALL_GATHER, tensor, f" along dim {dim}"), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """See `Communicator`."""
        total = _sum(self._exchange(Collective.REDUCE_SCATTER, tensor, f" along dim {dim}"))
        return total.chunk(self.size, dim)[self.rank].contiguous()

    def all_to_all(self, tensor: Tensor, split_dim: int, concatenate_dim: int) -> Tensor:
        """See `Communicator`."""
        parts = self._exchange(Collective.ALL_TO_ALL, tensor, f" from dim {concatenate_dim} to dim {split_dim}")
        return torch.cat([part.chunk(self.size, split_dim)[self.rank] for part in parts], concatenate_dim)

    def all_to_all_sizes(self, sizes: Tensor, most: int) -> tuple[Tensor, list[int], list[int]]:
        """See `Communicator`."""
        received = torch.stack([held[self.rank] for held in self._exchange(Collective.ALL_TO_ALL, sizes)])
        sent, arriving = cast("list[list[int]]", torch.stack([sizes.sum(1), received.sum(1)]).tolist())
        return received, sent, arriving

    def all_to_all_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """See `Communicator`."""
        self.counts[str(Collective.ALL_TO_ALL)] += 1
        what = f"{Collective.ALL_TO_ALL} of rows of {str(rows.dtype).removeprefix('torch.')} {tuple(rows.shape[1:])}"
        sizes = self._rendezvous.exchange(self.rank, f"the sizes of {what}", torch.tensor(sent))
        every = self._rendezvous.exchange(self.rank, what, rows)
        return torch.cat([held.split(n.tolist())[self.rank] for held, n in zip(every, sizes, strict=True)])

    def _exchange(self, collective: Collective, tensor: Tensor, how: str = "") -> tuple[Tensor, ...]:
        self.counts[str(collective)] += 1
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        return self._rendezvous.exchange(self.rank, f"{collective} of {dtype} {shape}{how}", tensor)


def _sum(parts: tuple[Tensor, ...]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class _Rank(threading.Thread, Generic[T]):
    def __init__(self, rendezvous: Rendezvous, rank: int, work: Callable[[ThreadCommunicator], T]) -> None:
        super().__init__(name=f"tpplan rank {rank}", daemon=True)
        self.result: T | None = None
        self._rendezvous = rendezvous
        self._number = rank
        self._work = work

    def run(self) -> None:
        try:
            self.result = self._work(ThreadCommunicator(self._rendezvous, self._number))
            self._rendezvous.leave(self._number)
        except _ReleasedError:
            pass
        except BaseException as error:  # whatever it is, the others must not wait for this rank
            failure = RankError(self._number, describe(error))
            failure.__cause__ = error
            self._rendezvous.fail(failure)


def run_ranks(size: int, work: Callable[[ThreadCommunicator], T], timeout: float = TIMEOUT) -> list[T]:
    """Run `work` as every rank at once, a thread each, and return the results in rank order.

    Raises:
        RankError: a rank raised.
        RanksDisagreeError: the ranks don't call the same collectives.
        RankTimeoutError: a rank kept the others waiting for `timeout` seconds.
    """
    rendezvous = Rendezvous(size, timeout)
    ranks = [_Rank(rendezvous, rank, work) for rank in range(size)]
    with shared_cores(size):
        for rank in ranks:
            rank.start()
        _join(ranks, rendezvous)
    if rendezvous.failure is not None:
        raise rendezvous.failure
    return [rank.result for rank in ranks]  # pyright: ignore[reportReturnType]


def _join(ranks: list[_Rank[T]], rendezvous: Rendezvous) -> None:
    """Wait for all ranks; once one has ended, the others get `timeout` more seconds."""
    deadline: float | None = None
    while alive := [rank for rank in ranks if rank.is_alive()]:
        alive[0].join(0.05)
        if deadline is None and (len(alive) < len(ranks) or rendezvous.failure is not None):
            deadline = time.monotonic() + rendezvous.timeout
        if deadline is not None and time.monotonic() > deadline:
            never = f"{alive[0].name.removeprefix('tpplan ')} never ended"
            rendezvous.fail(RankTimeoutError.of("TP194", never, help="give more by `timeout=`"))
            return


@contextmanager
def shared_cores(size: int) -> Generator[None]:
    """Give each thread that is started in this block a `size`-th of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // size))
    try:
        yield
    finally:
        torch.set_num_threads(before)
