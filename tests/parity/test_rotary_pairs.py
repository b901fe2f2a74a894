"""Rotary embeddings that turn pairs of real numbers, as torchtune and gpt-fast write them, behind any projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.marking import in_thirds, slow_but
from tpplan.api import suggest_text

WIDTH, HEADS, LENGTH = 32, 4, 8
SIZE = WIDTH // HEADS
SAMPLE = torch.randn(2, LENGTH, WIDTH, requires_grad=True)


def table() -> Tensor:
    angles = torch.outer(torch.arange(LENGTH), 100.0 ** -(torch.arange(0, SIZE, 2) / SIZE))
    return torch.stack([angles.cos(), angles.sin()], -1)


def turned(pairs: Tensor, turns: Tensor) -> Tensor:
    turns = turns.view(1, LENGTH, 1, SIZE // 2, 2)
    even = pairs[..., 0] * turns[..., 0] - pairs[..., 1] * turns[..., 1]
    odd = pairs[..., 1] * turns[..., 0] + pairs[..., 0] * turns[..., 1]
    return torch.stack([even, odd], -1).flatten(3)


def selected(x: Tensor, turns: Tensor) -> Tensor:
    return turned(x.float().reshape(*x.shape[:-1], -1, 2), turns).type_as(x)


def unbound(x: Tensor, turns: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turns = turns.view(LENGTH, 1, SIZE // 2, 2)
    return torch.stack(
        (even * turns[..., 0] - odd * turns[..., 1], odd * turns[..., 0] + even * turns[..., 1]), -1
    ).flatten(-2)


def in_halves(x: Tensor, turns: Tensor) -> Tensor:
    one, other = x.unflatten(-1, (2, -1)).unbind(-2)
    turns = turns.view(LENGTH, 1, SIZE // 2, 2)
    return torch.cat((one * turns[..., 0] - other * turns[..., 1], other * turns[..., 0] + one * turns[..., 1]), -1)


def every_second(x: Tensor, turns: Tensor) -> Tensor:
    turns = turns.view(LENGTH, 1, SIZE // 2, 2)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack(
        (even * turns[..., 0] - odd * turns[..., 1], odd * turns[..., 0] + even * turns[..., 1]), -1
    ).flatten(-2)


def as_complex(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.view_as_complex(turns).view(1, LENGTH, 1, -1)).flatten(3).type_as(x)


TURNS = (selected, unbound, in_halves, every_second, as_complex)
Turn = Callable[[Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """What all have in common: heads that are turned, and keys and values for several queries."""

    def __init__(self, turn: Turn, keys: int) -> None:
        super().__init__()
        self.turn, self.heads, self.keys = turn, HEADS, keys
        self.register_buffer("turns", table(), persistent=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, length = q.shape[:2]
        q, k = self.turn(q, self.turns), self.turn(k, self.turns)  # pyright: ignore
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(self.heads // self.keys, dim=1) for t in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().view(batch, length, -1))


class Packed(Attention):
    """gpt-fast's: one projection of unequal packs."""

    rules: ClassVar = {"layers.*.mixer.wqkv": {"style": "colwise", "packed": ["q", "k", "v"]}}

    def __init__(self, turn: Turn, keys: int) -> None:
        super().__init__(turn, keys)
        self.wqkv = nn.Linear(WIDTH, (HEADS + 2 * keys) * SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        some = self.keys * SIZE
        q, k, v = self.wqkv(x).split([self.heads * SIZE, some, some], dim=-1)
        k, v = (t.view(batch, length, self.keys, SIZE) for t in (k, v))
        return self.mix(q.view(batch, length, self.heads, SIZE), k, v)


class Apart(Attention):
    """torchtune's: three projections."""

    rules: ClassVar = {"layers.*.mixer.{q,k,v}_proj": "colwise"}

    def __init__(self, turn: Turn, keys: int) -> None:
        super().__init__(turn, keys)
        self.q_proj = nn.Linear(WIDTH, HEADS * SIZE)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, keys * SIZE) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        k, v = (m(x).view(batch, length, -1, SIZE) for m in (self.k_proj, self.v_proj))
        return self.mix(self.q_proj(x).view(batch, length, self.heads, SIZE), k, v)


class Grouped(Attention):
    """One projection of groups, each of some queries with their key and value."""

    rules: ClassVar = {"layers.*.mixer.all": "colwise"}

    def __init__(self, turn: Turn, keys: int) -> None:
        super().__init__(turn, keys)
        self.all = nn.Linear(WIDTH, (HEADS + 2 * keys) * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.heads // self.keys
        groups = self.all(x).view(*x.shape[:2], self.keys, queries + 2, SIZE)
        q, k, v = groups.split([queries, 1, 1], dim=3)
        return self.mix(*(t.flatten(2, 3) for t in (q, k, v)))


class Pairs(Attention):
    """Views each projection as heads and pairs at once."""

    rules: ClassVar = {"layers.*.mixer.{q,k,v}": "colwise"}

    def __init__(self, turn: Turn, keys: int) -> None:
        super().__init__(lambda x, turns: turned(x, turns) if x.dim() == 5 else x, keys)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, keys * SIZE) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (m(x).view(*x.shape[:2], -1, SIZE // 2, 2) for m in (self.q, self.k))
        return self.mix(q, k, self.v(x).view(*x.shape[:2], -1, SIZE))


class Block(nn.Module):
    def __init__(self, mixer: Attention) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), mixer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class Model(nn.Module):
    def __init__(self, kind: type[Attention], turn: Turn, keys: int) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(kind(turn, keys)) for _ in range(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return x


def plan(kind: type[Attention], sequence: bool) -> dict[str, object]:
    norms = {"layers.*.norm": "sequence"} if sequence else {}
    return {"version": 1, "modules": {**kind.rules, "layers.*.mixer.out": "rowwise", **norms}}  # pyright: ignore


CASES = [
    *((kind, keys, tp) for kind in (Packed, Apart) for keys in (4, 2, 1) for tp in (2, 4)),
    *((Grouped, 2, 2), (Grouped, 2, 4), (Pairs, 2, 4), (Pairs, 1, 2)),
]


@pytest.mark.parametrize(("kind", "keys", "tp"), in_thirds(CASES[::3], CASES[1::3], CASES))
@pytest.mark.one_in(5)
def test_each_projection_is_split_by_heads(kind, keys, tp):
    model = Model(kind, selected, keys)
    for sequence in (False, True):
        report = tpplan.verify(model, plan(kind, sequence), tp, (SAMPLE,))
        assert report.ok, report
        assert "all-gather" not in report.predicted or sequence


@pytest.mark.one_in(3)
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("kind", slow_but([Grouped], [Packed, Apart, Grouped]))
def test_pairs_are_turned_in_any_spelling(kind, turn):
    report = tpplan.verify(Model(kind, turn, 2), plan(kind, False), 4, (SAMPLE,))
    assert report.ok, report
    assert "all-gather" not in report.predicted


def test_a_single_group_has_packs():
    with pytest.raises(tpplan.CompileError) as caught:
        tpplan.compile_plan(Model(Grouped, selected, 1), plan(Grouped, False), 2, (SAMPLE,))
    assert "`{style: colwise, packed: {q: 32, k: 8, v: 8}}`" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "keys", "tp"),
    in_thirds(
        [CASES[0], CASES[-2]],
        [(Grouped, 1, 2), (Packed, 2, 4)],
        [*CASES[::2], (Grouped, 1, 2), (Packed, 2, 4), (Apart, 2, 4)],
    ),
)
def test_a_plan_writes_itself(kind, keys, tp):
    model = Model(kind, selected, keys)
    text = suggest_text(model, tp, tp == 4, (SAMPLE,))
    report = tpplan.verify(model, text, tp, (SAMPLE,))
    assert report.ok, report
    rows = [rule for rule in tpplan.load_plan(text).rules if rule.style == "rowwise"]
    assert [rule.pattern.text for rule in rows] == ["layers.*.mixer.out"]
