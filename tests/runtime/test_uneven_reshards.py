"""Reshards of dims that the ranks can't share evenly, on simulated ranks: every pair, forward and backward."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor

from tpplan.compiler.ir.layout import (
    PARTIAL,
    REPLICATED,
    REPLICATED_PARTIAL,
    Collective,
    Layout,
    Pack,
    packed,
    reshard_between,
    sharded,
)
from tpplan.parity.parity_errors import VerifyError
from tpplan.parity.threads import ThreadCommunicator, run_ranks
from tpplan.runtime.ranks.reshard import CallContext, Move, make_reshard
from tpplan.runtime.ranks.segments import taken

SHAPE = (6, 5, 13)
PACKS = packed(2, [Pack(5), Pack(8)])  # on four ranks 4, 4, 3 and 2: one that is short comes before another
LAYOUTS = [REPLICATED, REPLICATED_PARTIAL, PARTIAL, sharded(0), sharded(1), sharded(2), PACKS]
PAIRS = [(a, b) for a, b in itertools.permutations(LAYOUTS, 2) if reshard_between(a, b) is not None]


def part(whole: Tensor, layout: Layout, kind: str, axis: ThreadCommunicator) -> Tensor:
    """What a rank holds: of a partial value a share that depends on the rank, the shares adding up to the whole."""
    if kind == "P":
        return whole * (axis.rank + 1) / sum(range(axis.size + 1))
    if kind == "R":
        return whole
    assert layout.dim is not None
    return taken(whole, layout.dim, layout.intervals(whole.shape[layout.dim], axis.size, axis.rank))


def step_of(source: Layout, target: Layout, axis: ThreadCommunicator) -> Move:
    ways = reshard_between(source, target)
    assert ways is not None
    return make_reshard(source, target, ways.forward, ways.backward, axis, False, CallContext(), SHAPE)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda held: str(held))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_reshard_moves_values_and_gradients(source: Layout, target: Layout, size: int) -> None:
    value, gradient = torch.randn(SHAPE, dtype=torch.float64), torch.randn(SHAPE, dtype=torch.float64)
    ways = reshard_between(source, target)
    assert ways is not None

    def work(axis: ThreadCommunicator) -> Counter[str]:
        given = part(value, source, source.forward, axis).clone().requires_grad_()
        moved = step_of(source, target, axis)(given)
        if target.forward != "P":
            torch.testing.assert_close(moved, part(value, target, target.forward, axis), atol=1e-13, rtol=0)
        moved.backward(part(gradient, target, target.gradient, axis))
        assert given.grad is not None
        if source.gradient != "P":
            torch.testing.assert_close(given.grad, part(gradient, source, source.gradient, axis), atol=1e-13, rtol=0)
        assert given.grad.shape == given.shape
        return axis.counts

    expected = Counter(str(way) for way in (ways.forward, ways.backward) if way.communicates)
    assert run_ranks(size, work) == [expected] * size


def test_another_size_than_the_examples_is_refused() -> None:
    """What is fixed by the example's size would be cut in the wrong places."""
    for source, target in ((sharded(2), REPLICATED), (REPLICATED, sharded(2))):

        def work(axis: ThreadCommunicator) -> None:
            step_of(source, target, axis)(torch.zeros(6, 5, 16))  # noqa: B023

        with pytest.raises(VerifyError, match=r"TP118.*must have the example.s size"):
            run_ranks(2, work)


def test_every_kind_of_collective_is_tried() -> None:
    kinds = {
        way for pair in PAIRS for ways in [reshard_between(*pair)] if ways for way in (ways.forward, ways.backward)
    }
    assert kinds | {Collective.ONE_SHOT} == set(Collective)  # that is an all-reduce, by the size of a call
