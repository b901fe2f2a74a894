"""Calls of an empty batch, or of an empty sequence: results have the unsharded model's shapes, gradients are 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.simulated import on_ranks
from tpplan.compat.dtensors import local_of
from tpplan.compiler.ir.layout import sharded
from tpplan.compiler.rules.views import viewed

PROJECTIONS = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}


class Attention(nn.Module):
    """Four heads, behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        q, k, v = (m(n).view(*x.shape[:2], 4, 4).transpose(1, 2) for m in (self.q, self.k, self.v))
        weighted = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return x + self.o(weighted.transpose(1, 2).reshape(x.shape))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("rules", [PROJECTIONS, {"norm": "sequence", **PROJECTIONS}], ids=["split", "sequence"])
@pytest.mark.parametrize("shape", [(0, 8, 16), (2, 0, 16)], ids=["no batch", "no sequence"])
@pytest.mark.parametrize("tp", [2, 4])
def test_nothing_comes_of_nothing(rules: dict[str, Any], shape: tuple[int, ...], tp: int) -> None:
    example = torch.randn(2, 8, 16)

    def work(model: nn.Module, _: object) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for _ in range(2):
            result = model(torch.randn(shape))
            result.sum().backward()
            found.append(tuple(result.shape))
            assert not any(local_of(p.grad).any() for p in model.parameters() if p.grad is not None)
            with torch.no_grad():
                found.append(tuple(model(torch.randn(shape)).shape))
            assert torch.isfinite(model(example)).all()
        return found

    assert on_ranks(Attention(), rules, tp, ((example,), {}), work) == [[shape] * 4] * tp


@pytest.mark.parametrize("size", [2, 4])
def test_a_view_of_nothing_keeps_the_split_dim(size: int) -> None:
    assert viewed((0, 32), (0, 8, 32), sharded(1), size, 0) == sharded(2)
    assert viewed((0, 8, 32), (0, 32), sharded(2), size, 0) == sharded(1)
    assert viewed((2, 0, 16), (2, 0, 4, 4), sharded(2), size, 2) == sharded(2)
