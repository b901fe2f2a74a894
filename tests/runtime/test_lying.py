"""What a reshard makes lies in memory as what it was made of, so that bodies can view it as they view the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.runtime.simulated import plan_of
from tpplan.calls.rehearse import ShapeCommunicator
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, Layout, reshard_between, sharded
from tpplan.runtime.lying import lying_as
from tpplan.runtime.reshard import CallContext, make_reshard

HIDDEN, HEADS, LENGTH = 32, 4, 6


class Scores(nn.Module):
    """Adds a bias to the scores of each head, in one row of all heads of the batch."""

    def forward(self, q: Tensor, bias: Tensor) -> Tensor:
        scores = q @ q.transpose(-1, -2)
        flat = scores.view(-1, LENGTH, LENGTH) + bias.view(-1, LENGTH, LENGTH)
        return (flat.view(scores.shape).softmax(-1) @ q).transpose(1, 2).flatten(2)


class Biased(nn.Module):
    """Attention whose bias is an argument: each rank takes its heads' part, which has gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.scores = Scores()

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q = self.q(x).view(*x.shape[:2], -1, HIDDEN // HEADS).transpose(1, 2)
        return self.out(self.scores(q, bias))


class Ranks(ShapeCommunicator):
    """What is gathered is contiguous, as it is over a process group."""

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return super().all_gather(tensor, dim).contiguous()


def test_a_body_can_view_a_slice_of_what_its_caller_has_whole() -> None:
    torch.manual_seed(0)
    plan = plan_of({"q": "colwise", "out": "rowwise"})
    call = (torch.randn(3, LENGTH, HIDDEN), torch.randn(3, HEADS, LENGTH, LENGTH))
    assert not tpplan.verify(Biased(), plan, tp=2, inputs=call).problems


@pytest.mark.parametrize("source", [sharded(1), PARTIAL])
def test_what_is_sent_lies_as_it_did(source: Layout) -> None:
    ways = reshard_between(source, REPLICATED)
    assert ways is not None
    shape = (3, HEADS, LENGTH, 8)
    axis = Ranks(2, 0)
    step = make_reshard(source, REPLICATED, ways.forward, ways.backward, axis, False, CallContext(), shape)
    local = torch.randn(3, LENGTH, source.local_shape(shape, 2, 0)[1], 8).transpose(1, 2)
    assert step(local).transpose(1, 2).view(3, LENGTH, -1).shape == (3, LENGTH, 8 * HEADS)


@pytest.mark.parametrize(
    ("made", "given", "strides"),
    [
        (torch.zeros(2, 4, 3)[:, :2], torch.zeros(2, 4, 3), (6, 3, 1)),  # a slice
        (torch.zeros(2, 4, 3), torch.zeros(2, 3, 2).transpose(1, 2), (12, 1, 4)),  # what was gathered along dim 1
        (torch.zeros(4, 4, 3).expand(4, 4, 3)[:2], torch.zeros(4, 4, 3), (12, 3, 1)),
        (torch.zeros(4, 3).expand(2, 4, 3)[:, :2], torch.zeros(4, 3).expand(2, 4, 3), (0, 3, 1)),
        (torch.zeros(2, 4, 3), torch.zeros(2, 1, 3).expand(2, 2, 3), (12, 1, 4)),
    ],
)
def test_strides(made: Tensor, given: Tensor, strides: tuple[int, ...]) -> None:
    numbers = torch.arange(made.numel()).view(made.shape)
    assert lying_as(made, given).stride() == strides
    if 0 not in made.stride():
        made.copy_(numbers)
        assert torch.equal(lying_as(made, given), made)
