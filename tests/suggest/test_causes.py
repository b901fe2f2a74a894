"""Models of which nothing can be sharded: the finding names the parameter, the line and what it does there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tpplan.plan import CompileError
from tpplan.suggest import search


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.w * x.mean())  # by a number of the input


class Gated(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.w * self.gate(x).mean())  # by a number that a layer makes


class Summed(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.w, self.w.sum(1))


class Outside(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.w) * x.mean()


def x_of() -> Tensor:
    return torch.randn(2, 3, 16)


@pytest.mark.parametrize("body", [Scaled, Gated])
def test_a_weight_that_depends_on_the_input_is_named_with_its_line(body: type[nn.Module]) -> None:
    with pytest.raises(CompileError) as caught:
        search(nn.Sequential(nn.Sequential(body())), 2, (x_of(),), {}, False)
    text = str(caught.value)
    assert "`0.0` reads `0.0.w` by aten.mul.Tensor, with what the call is passed" in text
    assert "test_causes.py:" in text


class Sorted(Scaled):
    """Leaves its parameter aside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).sort(-1)[0])


def test_a_parameter_that_is_not_read_is_no_cause() -> None:
    with pytest.raises(CompileError) as caught:
        search(nn.Sequential(Sorted()), 2, (x_of(),), {}, False)
    text = str(caught.value)
    assert "aten.sort.default" in text
    assert "0.w" not in text


def test_so_it_is_for_a_rule_on_it_whose_help_works() -> None:
    plan = {"version": 1, "modules": {"0.w": "colwise"}}
    with pytest.raises(CompileError, match="scale the product's result by that number"):
        tpplan.compile_plan(nn.Sequential(Scaled()), plan, 2, (x_of(),))
    assert tpplan.verify(nn.Sequential(Outside()), plan, 2, (x_of(),)).ok


def test_a_plan_that_compiles_by_hand_is_named() -> None:
    with pytest.raises(CompileError, match=r"`0\.w: colwise` compiles"):
        search(nn.Sequential(Summed()), 2, (x_of(),), {}, False)
    assert tpplan.verify(nn.Sequential(Summed()), {"version": 1, "modules": {"0.w": "colwise"}}, 2, (x_of(),)).ok


class Noisy(nn.Module):
    """Noise from a generator of its own, or from where the help says."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("noise", torch.randn(32))
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.source == "own":
            h = h + torch.randn(32, generator=torch.Generator().manual_seed(1))
        elif self.source == "default":
            h = h + torch.randn(32)
        else:
            h = h + self.noise
        return self.down(h.relu())


def test_a_generator_of_its_own_is_told_with_a_help_that_works() -> None:
    plan = {"version": 1, "modules": {"0.up": "colwise", "0.down": "rowwise"}}
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(nn.Sequential(Noisy("own")), plan, 2, (x_of(),))
    text = str(caught.value)
    assert "aten.randn.generator draws from a generator of the model's own" in text
    assert "test_causes.py:" in text
    assert "remove the rules" not in text
    for source in ("default", "buffer"):
        assert tpplan.verify(nn.Sequential(Noisy(source)), plan, 2, (x_of(),)).ok
