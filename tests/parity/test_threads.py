"""Simulated ranks: collectives as they are defined, and an error instead of a hang."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tpplan.parity.parity_errors import RankError, RanksDisagreeError, RankTimeoutError
from tpplan.parity.threads import run_ranks


def held(rank: int) -> torch.Tensor:
    return torch.arange(24.0).view(2, 12).add(100 * rank)


def test_collectives_do_what_they_say():
    def work(axis):
        return (
            axis.all_reduce(held(axis.rank)),
            axis.all_gather(held(axis.rank), 1),
            axis.reduce_scatter(held(axis.rank), 1),
            axis.all_to_all(held(axis.rank), 1, 0),
            axis.counts,
        )

    everything = [held(rank) for rank in range(3)]
    total = torch.stack(everything).sum(0)
    for rank, (reduced, gathered, scattered, exchanged, counts) in enumerate(run_ranks(3, work)):
        assert torch.equal(reduced, total)
        assert torch.equal(gathered, torch.cat(everything, 1))
        assert torch.equal(scattered, total[:, 4 * rank : 4 * rank + 4])
        assert torch.equal(exchanged, torch.cat([whole[:, 4 * rank : 4 * rank + 4] for whole in everything]))
        assert counts == {"all-reduce": 1, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}


def test_sums_are_taken_in_rank_order():
    parts = [torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([1.0])]
    for _ in range(5):
        assert [result.item() for result in run_ranks(3, lambda axis: axis.all_reduce(parts[axis.rank]))] == [1.0] * 3


def test_a_tensor_may_be_written_to_once_it_was_sent():
    def work(axis):
        own = held(axis.rank)
        gathered = axis.all_gather(own, 0)
        own.zero_()
        return gathered

    for gathered in run_ranks(4, work):
        assert torch.equal(gathered, torch.cat([held(rank) for rank in range(4)]))


def test_a_rank_that_raises_releases_the_others_and_is_named():
    def work(axis):
        axis.all_reduce(torch.ones(1))
        if axis.rank == 1:
            raise ValueError("no such luck\nsecond line")
        axis.all_reduce(torch.ones(1))

    with pytest.raises(RankError, match=r"rank 1 raised ValueError: no such luck$") as caught:
        run_ranks(3, work)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)


def test_different_collectives_at_the_same_time_are_refused():
    def work(axis):
        return axis.all_reduce(torch.ones(2)) if axis.rank else axis.all_gather(torch.ones(2), 0)

    with pytest.raises(RanksDisagreeError, match=r"rank 0: all-gather .*; rank 1: all-reduce"):
        run_ranks(2, work)


def test_different_shapes_are_refused():
    with pytest.raises(RanksDisagreeError, match=r"\(1,\).*\(2,\)"):
        run_ranks(2, lambda axis: axis.all_reduce(torch.ones(axis.rank + 1)))


def test_a_rank_that_leaves_early_releases_the_others():
    with pytest.raises(RanksDisagreeError, match=r"rank 1 waits in all-reduce .* rank 0 has finished"):
        run_ranks(2, lambda axis: axis.all_reduce(torch.ones(1)) if axis.rank else None)


def test_a_rank_that_is_stuck_is_given_up_on():
    stuck = threading.Event()
    started = time.monotonic()
    with pytest.raises(RankTimeoutError, match="for rank 1"):
        run_ranks(2, lambda axis: stuck.wait(20) if axis.rank else axis.all_reduce(torch.ones(1)), timeout=0.2)
    stuck.set()
    assert time.monotonic() - started < 10


def test_the_number_of_threads_is_put_back():
    before = torch.get_num_threads()
    run_ranks(2, lambda axis: torch.get_num_threads())
    assert torch.get_num_threads() == before
