"""Attention in a body that runs from its record is torch's one call again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import tpplan
from tests.marking import in_turns
from tests.runtime.simulated import on_ranks, plan_of, worst

WIDTH, HEADS = 16, 4
RULES: dict[str, Any] = {"*.{q,k,v}": "colwise", "*.out": "rowwise"}
ENCODER: dict[str, Any] = {
    "layer.self_attn.in_proj_{weight,bias}": {"style": "colwise", "packed": ["q", "k", "v"]},
    "layer.self_attn.out_proj.{weight,bias}": "rowwise",
    "*.linear1": "colwise", "*.linear2": "rowwise",
}  # fmt: skip


class Attention(nn.Module):
    """Its heads have a size that the body derives from the width, so that it runs from its record."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.options = options

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, **self.options)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attend(*(self.heads(layer(x)) for layer in (self.q, self.k, self.v)))
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Masked(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[-2])
        return functional.scaled_dot_product_attention(q, k, v, (places[:, None] - places).abs() < 3)


class Twice(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(super().attend(q, k, v), k, v)


class Apart(Attention):
    """What attention consists of, written out: not torch's pieces."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Encoder(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        return self.layer(x, mask, padding)


class Calls(TorchFunctionMode):
    """Counts the calls of torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.dropouts = 0, list[float]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            self.count += 1
            self.dropouts.append((kwargs or {}).get("dropout_p", 0.0))
        return func(*args, **(kwargs or {}))


CASES = {
    "plain": (lambda: Block(Attention()), 1), "causal": (lambda: Block(Attention(is_causal=True)), 1),
    "scaled": (lambda: Block(Attention(scale=0.3)), 1), "masked": (lambda: Block(Masked()), 1),
    "twice": (lambda: Block(Twice()), 2), "apart": (lambda: Block(Apart()), 0),
    "dropping": (lambda: Block(Attention(dropout_p=0.3)), 1),
}  # fmt: skip


def x_of(length: int = 6, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("name", "tp"), in_turns([*CASES], [2, 4]))
def test_it_is_one_call(name: str, tp: int) -> None:
    made, count = CASES[name]
    model = made().double()
    program = tpplan.compile_plan(model, {"version": 1, "modules": RULES}, tp, (x_of(),))
    assert [module.name for module in program.modules if module.recorded] == ["inner"]

    def counted(sharded: nn.Module, _: object) -> int:
        sharded(x_of())  # which records the body
        with Calls() as calls:
            sharded(x_of())
        return calls.count

    assert on_ranks(model, RULES, tp, ((x_of(),), {}), counted) == [count] * tp
    if name != "dropping":
        example, *calls = [((x_of(*sizes),), {}) for sizes in ((6,), (6,), (9, 3), (1, 1))]
        assert max(worst(model, RULES, tp, example, calls)) < 1e-12


def test_an_encoder_layer_of_torch() -> None:
    torch.manual_seed(0)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, 4:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    for given in ({}, {"padding": padding}, {"mask": causal}, {"mask": causal, "padding": padding.double() * -5}):
        model = Encoder().double()
        report = tpplan.verify(model, plan_of(ENCODER), 2, {"x": x_of(), **given})
        assert report.ok, report.problems


def test_dropout_goes_with_the_call() -> None:
    def dropped(sharded: nn.Module, _: object) -> list[float]:
        sharded(x_of())
        with Calls() as calls:
            sharded(x_of())
        return calls.dropouts

    model = Block(Attention(dropout_p=0.3)).double()
    assert on_ranks(model, RULES, 2, ((x_of(),), {}), dropped) == [[pytest.approx(0.3, abs=1e-12)]] * 2
