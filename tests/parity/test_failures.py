"""What can't be verified is refused with a reason, and nothing hangs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.models.tiny import tiny_model
from tests.parity.subjects import PLANS, subject, with_module
from tpplan.parity import RankError, TooLargeError, UnshardedError, VerifyError, verify, verify_program


def with_impossible_heads(program):
    def change(module):
        return replace(module, local_attributes=tuple(replace(held, local=5) for held in module.local_attributes))

    return with_module(program, "blocks.0.attention", change)


def test_a_model_that_is_too_large_is_refused_with_a_way_out():
    model, _ = tiny_model("llama", device="meta", vocab_size=30_000_000, hidden_size=4096)
    with pytest.raises(TooLargeError, match=r"GiB.*\n.*num_hidden_layers=2"):
        verify(model, PLANS / "llama.yaml", 2)


def test_a_rank_that_raises_is_named():
    model, program, example = subject("torch_transformer", 2)
    with pytest.raises(RankError, match=r"rank \d raised RuntimeError: .*(view|shape)"):
        verify_program(model, with_impossible_heads(program), example)


@pytest.mark.slow
@pytest.mark.processes
def test_a_process_that_raises_is_named():
    model, program, example = subject("torch_transformer", 2)
    with pytest.raises(RankError, match=r"rank \d raised RuntimeError: .*(view|shape)") as caught:
        verify_program(model, with_impossible_heads(program), example, processes=True)
    assert "Traceback" in "".join(caught.value.__notes__)


class Choosy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr():  # not while it is captured, on tensors without memory
            raise ValueError("not today")
        return self.down(self.up(x))


PLAN = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}


def test_a_model_that_raises_by_itself_is_told_apart():
    with pytest.raises(UnshardedError, match=r"TP194.*the unsharded `Choosy` raised ValueError: not today") as caught:
        verify(Choosy(), PLAN, 2, (torch.randn(2, 8),))
    assert caught.value.code == "TP194"


class Opaque(Choosy):
    def forward(self, x: torch.Tensor) -> object:
        self.down(self.up(x))
        return object()


def test_a_model_that_returns_nothing_to_compare_is_not_called_right():
    with pytest.raises(VerifyError, match="returned no tensor"):
        verify(Opaque(), {"version": 1, "modules": {"up": "replicate"}}, 2, (torch.randn(2, 8),))


def test_a_model_that_cannot_travel_says_so():
    class Nested(nn.Sequential):
        pass

    model = Nested(nn.Linear(8, 16), nn.Linear(16, 8))
    plan = {"version": 1, "modules": {"0": "colwise", "1": "rowwise"}}
    assert verify(model, plan, 2, (torch.randn(2, 8),)).ok
    with pytest.raises(VerifyError, match=r"can't be sent to other processes.*\n.*top of a module"):
        verify(model, plan, 2, (torch.randn(2, 8),), processes=True)
