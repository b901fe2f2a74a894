"""`nn.MultiheadAttention` makes weights that callers drop: a body that runs from its record leaves them out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.runtime.simulated import worst
from tpplan.api import suggest_text
from tpplan.plan import CompileError

WIDTH, HEADS = 16, 4
PACKED: dict[str, Any] = {"style": "colwise", "packed": ["q", "k", "v"]}
RULES: dict[str, Any] = {"mix.in_proj_{weight,bias}": PACKED, "mix.out_proj.{weight,bias}": "rowwise"}


def x_of(batch: int, length: int, width: int = WIDTH) -> Tensor:
    return torch.randn(batch, length, width, dtype=torch.float64, requires_grad=True)


class Drops(nn.Module):
    """Attention whose weights nobody reads; `options` are those of the call."""

    def __init__(self, sizes: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **(sizes or {}))
        self.options = options

    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Any:
        mixed, _ = self.mix(x, k, v, **self.options)
        return x + mixed


class Asks(Drops):
    """Whether there are weights decides what it computes."""

    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Any:
        mixed, weights = self.mix(x, k, v)
        return x + mixed if weights is None else x - mixed


class Keeps(Drops):
    """The weights stay in an attribute."""

    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Any:
        mixed, self.weights = self.mix(x, k, v)
        return x + mixed


@pytest.mark.parametrize(
    ("sizes", "options", "tp"),
    [
        ({}, {}, 4),
        ({}, {"average_attn_weights": False}, 2),
        ({"kdim": 12, "vdim": 20}, {}, 2),
    ],
)
@pytest.mark.one_in(3)
def test_attention_is_split_by_heads(sizes: dict[str, int], options: dict[str, Any], tp: int) -> None:
    model = Drops(sizes, **options).double()
    width, other = sizes.get("kdim", WIDTH), sizes.get("vdim", WIDTH)
    calls = [((x_of(b, n), x_of(b, m, width), x_of(b, m, other)), {}) for b, n, m in ((3, 6, 5), (2, 4, 7))]
    plan = suggest_text(model, tp, inputs=calls[0][0])
    assert "mix.out_proj" in plan and "packed: [q, k, v]" in plan
    assert max(worst(model, plan, tp, calls[0], calls)) < 1e-12


@pytest.mark.parametrize("kind", [Asks, Keeps])
def test_weights_that_are_looked_at_are_no_dropped_ones(kind: type[Drops]) -> None:
    with pytest.raises(CompileError, match="TP107"):
        tpplan.compile_plan(kind().double(), {"version": 1, "modules": RULES}, 2, (x_of(3, 6),) * 3)


class Around(nn.Module):
    """What the help of a refused `nn.MultiheadAttention` says."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *arguments: Tensor) -> Any:
        return self.inner(*arguments)


def test_an_outermost_body_that_needs_a_record_is_refused_with_a_help_that_works() -> None:
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(WIDTH, HEADS, kdim=12, vdim=20, batch_first=True).double().eval()
    call = tuple(x_of(2, 5, width).detach() for width in (WIDTH, 12, 20))
    with pytest.raises(CompileError, match="TP123") as raised:
        suggest_text(stock, 2, False, call)
    assert "call `MultiheadAttention` from a module around it" in (raised.value.diagnostics[0].help or "")
    assert "v_proj_weight" in suggest_text(Around(stock), 2, False, call)
    assert tpplan.verify(Around(stock), tpplan.suggest_plan(Around(stock), 2, False, call), 2, call).ok
