"""Products that einsum makes with a body's own parameters, whose heads are a dim of their own there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.marking import in_turns
from tests.runtime.simulated import Call, verdicts, worst
from tpplan import compile_plan
from tpplan.parity import verify_program
from tpplan.plan import CompileError, Style
from tpplan.suggest import search, write_plan

WIDTH, HEADS, EACH = 24, 4, 6


def call(batch: int, length: int) -> Call:
    return (torch.randn(batch, length, WIDTH, dtype=torch.float64, requires_grad=True),), {}


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 4)


class Attention(nn.Module):
    """Matrices of each head; biases of queries by head, and of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (parameter(HEADS, WIDTH, EACH) for _ in range(3))
        self.o, self.q_bias, self.o_bias = parameter(HEADS, EACH, WIDTH), parameter(HEADS, EACH), parameter(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bpd,hde->bphe", x, weight) for weight in (self.q, self.k, self.v))
        weights = torch.einsum("bqhe,bkhe->bhqk", q + self.q_bias, k).softmax(-1)
        return torch.einsum("bqhe,hed->bqd", torch.einsum("bkhe,bhqk->bqhe", v, weights), self.o) + self.o_bias


class Between(nn.Module):
    """Heads stand between the dims that a matrix multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (parameter(WIDTH, HEADS, EACH) for _ in range(3))
        self.o = parameter(HEADS, EACH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,dhk->bthk", x, weight) for weight in (self.q, self.k, self.v))
        weights = torch.einsum("bthk,bshk->bhts", q, k).softmax(-1)
        return torch.einsum("bthk,hkd->btd", torch.einsum("bhts,bshk->bthk", weights, v), self.o)


class Layers(nn.Module):
    """Two matrices, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = parameter(WIDTH, 40), parameter(40, WIDTH)
        self.up_bias, self.down_bias = parameter(40), parameter(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.einsum("btd,df->btf", x, self.up) + self.up_bias
        return torch.einsum("btf,fd->btd", made.relu(), self.down) + self.down_bias


class Picked(nn.Module):
    """Each token's experts are picked out of stacks, as gpt-fast does."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up, self.gate, self.down = parameter(4, 16, WIDTH), parameter(4, 16, WIDTH), parameter(4, WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        up, gate = (torch.einsum("ti,taoi->tao", tokens, stack[chosen]) for stack in (self.up, self.gate))
        made = torch.einsum("tao,taio->tai", up * gate.sigmoid(), self.down[chosen])
        return torch.einsum("tai,ta->ti", made, weights).view_as(x)


class Absorbed(nn.Module):
    """Matrices of each head are a part of a layer's weight, by which queries and results are multiplied (DeepSeek)."""

    def __init__(self, cached: bool = False) -> None:
        super().__init__()
        self.q, self.kv_a = nn.Linear(WIDTH, HEADS * EACH, bias=False), nn.Linear(WIDTH, 10, bias=False)
        self.kv_b, self.o = nn.Linear(10, HEADS * 2 * EACH, bias=False), nn.Linear(HEADS * EACH, WIDTH, bias=False)
        self.register_buffer("cache", torch.zeros(4, 16, 10) if cached else None, persistent=False)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        (batch, length, _), cache = x.shape, self.cache
        latent, weight = self.kv_a(x), self.kv_b.weight.view(HEADS, -1, 10)
        if isinstance(cache, Tensor):
            cache[:batch, start : start + length] = latent
            latent = cache[:batch, : start + length]
        q = torch.einsum("bshd,hdc->bshc", self.q(x).view(batch, length, HEADS, EACH), weight[:, :EACH])
        weights = torch.einsum("bshc,btc->bsht", q, latent).softmax(-1)
        mixed = torch.einsum("bsht,btc->bshc", weights, latent)
        return self.o(torch.einsum("bshc,hdc->bshd", mixed, weight[:, -EACH:]).flatten(2))


KINDS: dict[type[nn.Module], set[str]] = {
    Attention: {"q", "k", "v", "q_bias"},
    Between: {"q", "k", "v"},
    Layers: {"up", "up_bias"},
    Picked: {"up", "gate"},
}


class Net(nn.Module):
    """Two of a kind, beside layers whose features are no heads."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.layers, self.second = kind(), Layers(), kind()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        x = x + self.layers(x)
        return x + self.second(x)


@pytest.mark.parametrize(("kind", "tp"), in_turns([*KINDS], [2, 4]))
@pytest.mark.one_in(3)
def test_a_plan_writes_itself(kind: type[nn.Module], tp: int) -> None:
    torch.manual_seed(0)
    model, example = Net(kind).double(), call(3, 6)
    found = search(model, tp, *example, False)
    columns = {name for name, held in found.settings.items() if held.style is Style.COLWISE}
    wanted = {f"{block}.{name}" for block in ("first", "second") for name in KINDS[kind]}
    assert wanted | {"layers.up", "layers.up_bias"} <= columns
    assert "all-gather" not in found.program.count_collectives()
    seen = verdicts(model, write_plan(found, "net"), tp, example, [example, call(2, 5), call(1, 1)])
    assert all(not isinstance(held, str) and held < 1e-12 for held in seen), seen


RULES: dict[str, Any] = {"*.{q,k,v,q_bias}": "colwise", "*.{o,o_bias}": "rowwise"}


@pytest.mark.parametrize("tp", [2, 4])
def test_matrices_of_heads_may_be_a_layers_weight(tp: int) -> None:
    rules = {"*.{q,kv_b}": "colwise", "*.o": "rowwise"}
    example = call(3, 6)
    assert max(worst(Net(Absorbed).double(), rules, tp, example, [example, call(2, 5)])) < 1e-12


def test_what_is_kept_beside_them_needs_no_gradient_to_be_whole() -> None:
    stock = nn.Sequential(Absorbed(cached=True).double())
    with pytest.raises(CompileError, match=r"requires_grad_\(False\)"):
        compile_plan(stock, {"modules": {"0.{q,kv_b}": "colwise", "0.o": "rowwise"}, "version": 1}, 2, *call(3, 6)[0])
    stock.requires_grad_(False)
    example = (call(3, 6)[0][0].detach(),), {}
    program = compile_plan(stock, {"modules": {"0.{q,kv_b}": "colwise", "0.o": "rowwise"}, "version": 1}, 2, example[0])
    assert program.count_collectives() == {"all-reduce": 1}
    report = verify_program(stock, program, example)
    assert report.ok, report.problems


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_rule_may_name_the_parameters(tp: int) -> None:
    example = call(3, 6)
    assert max(worst(Net(Attention).double(), RULES, tp, example, [example])) < 1e-12
