"""Weights that a weight norm computes: the computed weight is split, and what it is computed of follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import tpplan
from tpplan.plan import CompileError

normed: Any = parametrizations.weight_norm
GATHERED = {"style": "colwise", "output": "replicate"}


class Pair(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).sin())


def linear(first: Any, second: Any) -> tuple[nn.Module, tuple[Tensor]]:
    pair = Pair(first(nn.Linear(16, 32)), second(nn.Linear(32, 16)))
    return pair.double(), (torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True),)


def convolution(first: Any, second: Any, kind: Any = nn.Conv1d) -> tuple[nn.Module, tuple[Tensor]]:
    pair = Pair(first(nn.Conv1d(16, 32, 3)), second(kind(32, 16, 3)))
    return pair.double(), (torch.randn(2, 16, 9, dtype=torch.float64, requires_grad=True),)


def plain(module: nn.Module) -> nn.Module:
    return module


def by_columns(module: nn.Module) -> nn.Module:
    return normed(module, dim=1)


CASES: dict[str, tuple[Callable[[], tuple[nn.Module, tuple[Tensor]]], Any]] = {
    "columns": (lambda: linear(normed, plain), "rowwise"),
    "rows": (lambda: linear(plain, by_columns), "rowwise"),
    "gathered": (lambda: linear(normed, normed), GATHERED),
    "channels": (lambda: convolution(normed, plain), "rowwise"),
    "transposed": (lambda: convolution(normed, normed, nn.ConvTranspose1d), "rowwise"),
    "gathered channels": (lambda: convolution(normed, normed), GATHERED),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_parts_of_a_weight_follow_it(case: str, tp: int) -> None:
    make, second = CASES[case]
    model, call = make()
    plan = {"version": 1, "modules": {"first": GATHERED if second is GATHERED else "colwise", "second": second}}
    program = tpplan.compile_plan(model, plan, tp, call)
    for placement in program.parameters:
        whole = second == "rowwise" and placement.name == "second.bias"
        assert whole or placement.local_shape != placement.shape
    report = tpplan.verify(model, plan, tp, call)
    assert report.ok, report.problems


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize(("dim", "style"), [(0, "rowwise"), (1, "colwise"), (None, "colwise"), (None, "rowwise")])
@pytest.mark.parametrize("make", [linear, convolution])
@pytest.mark.one_in(5)
def test_lengths_of_vectors_of_which_each_rank_has_a_part_are_sums(
    make: Any, dim: int | None, style: str, tp: int
) -> None:
    wrapped: Any = lambda m: normed(m, dim=dim)  # pyright: ignore  # noqa: E731
    model, call = make(*((wrapped, plain) if style == "colwise" else (plain, wrapped)))
    plan = {"version": 1, "modules": {"first": "colwise", "second": "rowwise"}}
    program = tpplan.compile_plan(model, plan, tp, call)
    name = "first" if style == "colwise" else "second"
    assert {m.name for m in program.modules if m.inner} == {f"{name}.parametrizations.weight.0"}
    report = tpplan.verify(model, plan, tp, call)
    assert report.ok, report.problems


def test_a_spectral_norm_is_refused() -> None:
    model, call = linear(parametrizations.spectral_norm, plain)
    with pytest.raises(CompileError, match="isn't a parameter"):
        tpplan.compile_plan(model, {"version": 1, "modules": {"first": "colwise"}}, 2, call)
