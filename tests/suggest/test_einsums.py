"""Products by `einsum` with bare parameters: projections by heads, and experts to which tokens are handed out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.marking import slow_but
from tests.runtime.simulated import Call, worst
from tpplan.suggest import search, write_plan
from tpplan.suggest.sharded_share import model_share

WIDTH, HEADS, EXPERTS, INNER = 32, 4, 4, 48


def weight(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*sizes) / 6)


class ByHeads(nn.Module):
    """Attention and an MLP in one body, whose residual sums are the body's own."""

    def __init__(self, order: str) -> None:
        super().__init__()
        head = WIDTH // HEADS
        sizes = {"h": HEADS, "d": WIDTH, "k": head}
        self.order = order
        self.query, self.key, self.value = (weight(*(sizes[dim] for dim in order)) for _ in range(3))
        self.out, self.up, self.down = weight(HEADS, head, WIDTH), weight(WIDTH, INNER), weight(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum(f"btd,{self.order}->bthk", x, w) for w in (self.query, self.key, self.value))
        scores = torch.einsum("bqhk,bshk->bhqs", q, k) / (WIDTH // HEADS) ** 0.5
        x = x + torch.einsum("bqhk,hkd->bqd", torch.einsum("bhqs,bshk->bqhk", scores.softmax(-1), v), self.out)
        return x + torch.einsum("btf,fd->btd", torch.einsum("btd,df->btf", x, self.up).relu(), self.down)


class Dispatched(nn.Module):
    """Each token goes to one expert, by a one-hot matrix, if there is room."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.down = weight(EXPERTS, WIDTH, INNER), weight(EXPERTS, INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        room = 2 * len(tokens) // EXPERTS
        gate, chosen = self.gate(tokens).softmax(-1).max(-1)
        mask = functional.one_hot(chosen, EXPERTS).to(x.dtype)
        place = ((mask.cumsum(0) * mask).sum(-1) - 1).long()
        slots = functional.one_hot(place.clamp(0, room - 1), room).to(x.dtype)
        sent = (mask * (place < room)[:, None])[:, :, None] * slots[:, None]
        inside = torch.einsum("ecd,edf->ecf", torch.einsum("nec,nd->ecd", sent, tokens), self.up).relu()
        made = torch.einsum("ecf,efd->ecd", inside, self.down)
        return torch.einsum("nec,ecd->nd", sent * gate[:, None, None], made).view_as(x)


class Everywhere(nn.Module):
    """Every expert sees every token; what the gate doesn't want counts as little."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.first, self.second = weight(EXPERTS, WIDTH, INNER), weight(EXPERTS, INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1).permute(2, 0, 1)
        inside = torch.einsum("bsd,edf->ebsf", x, self.first).relu() * share[..., None]
        return x + torch.einsum("ebsf,efd->bsd", inside, self.second)


def stream(batch: int, length: int) -> Call:
    return (torch.randn(batch, length, WIDTH, dtype=torch.float64, requires_grad=True),), {}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    ("kind", "arguments"), [(ByHeads, "hdk"), (ByHeads, "dhk"), (Dispatched, None), (Everywhere, None)]
)
def test_what_an_einsum_multiplies_by_is_split(kind: Any, arguments: str | None, tp: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(*([arguments] if arguments else []))).double()
    calls = [stream(2, 6), stream(3, 5)]
    found = search(model, tp, calls[0][0], {}, False)
    assert model_share(found.program).percent > 90
    assert max(worst(model, write_plan(found, "plan"), tp, calls[0], calls)) < 1e-12


class Uneven(nn.Module):
    """Heads that the ranks can't share out evenly, with a bias for each."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (weight(WIDTH, heads, 8) for _ in range(3))
        self.bias, self.out = weight(heads, 8), weight(heads, 8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,dhk->bthk", x, w) for w in (self.q, self.k, self.v))
        q, k, v = (held.transpose(1, 2) for held in (q + self.bias, k, v))
        made = functional.scaled_dot_product_attention(q, k, v)
        return torch.einsum("bthk,hkd->btd", made.transpose(1, 2), self.out)


@pytest.mark.parametrize(("heads", "tp"), slow_but([(6, 4)], [(5, 2), (6, 4)]))
def test_heads_that_the_ranks_cant_share_out_evenly_stay_heads(heads: int, tp: int) -> None:
    torch.manual_seed(0)
    model, calls = nn.Sequential(Uneven(heads)).double(), [stream(2, 6), stream(3, 5)]
    found = search(model, tp, calls[0][0], {}, False)
    held = {p.name: p.local_shape for p in found.program.parameters}
    assert held["0.q"] == (WIDTH, -(-heads // tp), 8) and held["0.out"] == (-(-heads // tp), 8, WIDTH)
    assert found.program.count_collectives() == {"all-reduce": 2}
    assert max(worst(model, write_plan(found, "plan"), tp, calls[0], calls)) < 1e-12
