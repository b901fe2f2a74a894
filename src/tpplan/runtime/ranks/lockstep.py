"""Lockstep: under TPPLAN_DEBUG=1 the ranks of an axis meet before they exchange anything, and compare what they do.

    rank 0: an all-reduce of float32 (2, 8, 16) at the result of `layers.0.mlp.down`, in call 3
    rank 1: call 4 of the model                                          ->   TP177 on both, instead of a hang

They meet in a group of their own, so that nothing else can be taken for a meeting.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpplan.compat.autograd import next_node_number, running_backward, running_node_number, runs_backward
from tpplan.compat.modes import without_dispatch_modes, without_function_modes
from tpplan.compat.process_groups import group_timeout
from tpplan.compiler.ir.layout import all_reduce_of
from tpplan.compiler.ir.program import Program
from tpplan.plan import TpplanError
from tpplan.runtime.ranks.communicator import ProcessGroupCommunicator, described
from tpplan.runtime.ranks.faults import naming_ranks

Facts = Sequence[tuple[str, str]]
_KEPT = 4096


class WatchError(TpplanError):
    """Under TPPLAN_DEBUG=1: the ranks aren't at the same place, or have other values than the program says."""


class _Calls:
    """The calls of a model, shared by all communicators of one axis."""

    def __init__(self) -> None:
        self.number = 0
        self.last = "`parallelize`"
        self.comparable = False
        self.counts: Counter[str] = Counter()
        self.ends: list[int] = []
        self.expected: list[tuple[int, Counter[str]]] = []
        self.task = -1
        self.backward: dict[int, Counter[str]] = {}


class LockstepCommunicator(ProcessGroupCommunicator):
    """The ranks of a process group, which compare each collective before it runs."""

    begins = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Take the ranks of `group`; every rank of it must."""
        super().__init__(group)
        self._meetings = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=group_timeout(group),
            backend="gloo",
            use_local_synchronization=True,
        )
        self._calls = _Calls()

    @property
    def call(self) -> int:
        """The number of the latest call of the model."""
        return self._calls.number

    def meet(self, what: str, facts: Facts = ()) -> list[Facts]:
        """Wait for the other ranks, which must be at `what` as well.

        Returns:
            Each rank's facts, if they differ; else nothing.

        Raises:
            WatchError: another rank is elsewhere.
            LostRankError: another rank doesn't come.
        """
        said = hashlib.blake2b(repr((what, tuple(facts))).encode(), digest_size=8).digest()
        mine = torch.tensor([int.from_bytes(said, "little", signed=True)])
        calls = self._calls
        with (
            naming_ranks(f"the meeting before {what} (the ranks last met before {calls.last})", self.group),
            without_dispatch_modes(),
            without_function_modes(),
            torch.no_grad(),
        ):
            every = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(every, mine, group=self._meetings)
            if all(int(held) == int(mine) for held in every):
                calls.last = what
                return []
            told: list[Any] = [None] * self.size
            dist.all_gather_object(told, (what, tuple(facts)), group=self._meetings)
        other = next((rank for rank, (place, _) in enumerate(told) if place != told[0][0]), None)
        if other is not None:
            raise WatchError.of(
                "TP177",
                f"the ranks of the axis do different things: rank 0 is at {told[0][0]}, and rank {other} at "
                f"{told[other][0]}",
                help="let all ranks of the axis make the same calls in the same order, with nothing of them under "
                "`if rank == 0`",
                notes=[f"they last met before {calls.last}"],
            )
        calls.last = what
        return [held for _, held in told]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Each rank's tensor, all of one shape."""
        mine = tensor.detach().cpu().contiguous()
        every = [torch.empty_like(mine) for _ in range(self.size)]
        with without_dispatch_modes(), without_function_modes(), torch.no_grad():
            dist.all_gather(every, mine, group=self._meetings)
        return every

    # -- calls ----------------------------------------------------------------------------------------------------
    def begin(self, facts: Facts, comparable: bool) -> list[Facts]:
        """A call of the model begins.

        Args:
            facts: what must be the same on all ranks.
            comparable: whether it has the example's sizes, so that its collectives are those of the program.

        Returns:
            Each rank's facts, if they differ; else nothing.

        Raises:
            WatchError: another rank is elsewhere.
        """
        calls = self._calls
        calls.number += 1
        calls.counts, calls.comparable = Counter(), comparable
        return self.meet(f"call {calls.number} of the model", facts)

    def end(self, program: Program) -> None:
        """A forward of a call has ended, which ran by `program`; where somebody looks, the call may run once more.

        Raises:
            WatchError: others ran.
        """
        calls = self._calls
        comparable = calls.comparable and not program.takes_gradients
        calls.ends.append(next_node_number() - 1)
        forward = program.count_collectives(backward=False)
        backward = program.count_collectives(sums=False) - forward
        calls.expected.append((calls.number, backward if comparable else Counter()))
        del calls.ends[:-_KEPT], calls.expected[:-_KEPT]
        least = program.count_collectives(backward=False, picked=False)
        counts, calls.counts = calls.counts, Counter()
        if comparable and not all(least[k] <= counts[k] <= forward[k] for k in {*forward, *counts}):
            raise _other_counts(f"call {calls.number}", counts, forward)

    # -- collectives ----------------------------------------------------------------------------------------------
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Communicator`."""
        self._compare(all_reduce_of(tensor.nbytes, tensor.dtype, self.one_shot), tensor)
        return super().all_reduce(tensor)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """See `Communicator`."""
        self._compare("all-gather", tensor)
        return super().all_gather(tensor, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """See `Communicator`."""
        self._compare("reduce-scatter", tensor)
        return super().reduce_scatter(tensor, dim)

    def all_to_all(self, tensor: Tensor, split_dim: int, concatenate_dim: int) -> Tensor:
        """See `Communicator`."""
        self._compare("all-to-all", tensor)
        return super().all_to_all(tensor, split_dim, concatenate_dim)

    def all_to_all_sizes(self, sizes: Tensor, most: int) -> tuple[Tensor, list[int], list[int]]:
        """See `Communicator`."""
        self._compare("all-to-all", sizes)
        return super().all_to_all_sizes(sizes, most)

    def all_to_all_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """See `Communicator`."""
        self._compare("all-to-all", rows, any_rows=True)
        return super().all_to_all_rows(rows, sent, received)

    def _compare(self, name: str, tensor: Tensor, any_rows: bool = False) -> None:
        """Meet before a collective, and count it."""
        calls, what = self._calls, described(name, tensor, self.place, any_rows)
        if not runs_backward():
            self.meet(f"{what}, in call {calls.number}")
            calls.counts[name] += 1
            return
        number = running_node_number()
        place = len(calls.ends) if number is None else bisect_left(calls.ends, number)
        which, expected = calls.expected[place] if place < len(calls.ends) else (calls.number, Counter[str]())
        self.meet(f"{what}, in {'the backward' if self.adjoint else 'what is recomputed'} of call {which}")
        if not self.adjoint or not self.counted or not expected:
            return
        task = running_backward()
        if calls.task != task:
            calls.task, calls.backward = task, {}
        counted = calls.backward.setdefault(place, Counter())
        counted[name] += 1
        if counted[name] > expected[name]:
            raise _other_counts(f"the backward of call {which}", counted, expected)


def ranks_of(group: dist.ProcessGroup) -> ProcessGroupCommunicator:
    """The ranks of a group; such as compare what they do under `TPPLAN_DEBUG=1`."""
    watched = os.environ.get("TPPLAN_DEBUG") not in (None, "", "0")
    alone = group.size() == 1 or dist.get_backend(group) == "fake"
    return LockstepCommunicator(group) if watched and not alone else ProcessGroupCommunicator(group)


def _other_counts(what: str, counted: Counter[str], expected: Counter[str]) -> WatchError:
    shown = [", ".join(f"{n} {k}" for k, n in sorted(held.items()) if n) or "none" for held in (counted, expected)]
    return WatchError.of(
        "TP179",
        f"{what} ran other collectives than its program: {shown[0]}, and not {shown[1]}",
        help="see `tpplan explain` for those of the program; hooks and code of your own that call modules once more or "
        "leave some out, change them",
    )


__all__ = ["Facts", "LockstepCommunicator", "WatchError", "ranks_of"]
