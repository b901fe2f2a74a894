"""A `sequence` rule for a body that reads other positions is what is at fault, not what comes before it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan

IDS = torch.zeros(2, 8, dtype=torch.long)
BODIES: dict[str, Callable[[Tensor], Tensor]] = {
    "token shift": lambda z: z + torch.cat([torch.zeros_like(z[:, :1]), z[:, :-1]], 1),
    "roll": lambda z: z.roll(1, 1),
    "cumsum": lambda z: z.cumsum(1),
    "pad": lambda z: functional.pad(z, (0, 0, 1, 0))[:, :-1],
    "convolution": lambda z: functional.conv1d(z.transpose(1, 2), torch.ones(8, 8, 3), padding=1).transpose(1, 2),
}


class Mid(nn.Module):
    def __init__(self, body: str) -> None:
        super().__init__()
        self.body = body

    def forward(self, z: Tensor) -> Tensor:
        return BODIES[self.body](z)


class Net(nn.Module):
    def __init__(self, body: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.mid = Mid(body)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.mid(self.embedding(ids))
        return h + self.down(self.up(h).relu())


@pytest.mark.parametrize("body", BODIES)
def test_the_rule_of_the_body_is_named_and_without_it_all_is_well(body: str) -> None:
    rules = {"embedding": "vocab", "mid": "sequence", "up": "colwise", "down": "rowwise"}
    with pytest.raises(tpplan.CompileError) as caught:
        tpplan.compile_plan(Net(body), {"version": 1, "modules": rules}, 2, (IDS,))
    (found,) = caught.value.diagnostics
    assert (found.code, found.subject) == ("TP107", "mid")
    assert "on a part of the sequence" in found.message and "remove the rule for `mid`" in (found.help or "")
    del rules["mid"]
    tpplan.compile_plan(Net(body), {"version": 1, "modules": rules}, 2, (IDS,))


class Projected(Mid):
    """A body that reads other positions, and then splits features."""

    def __init__(self, body: str) -> None:
        super().__init__(body)
        self.q, self.o = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, z: Tensor) -> Tensor:
        q, k = self.q(BODIES[self.body](z)).chunk(2, -1)
        return self.o(q * k)


PACKED = {"style": "colwise", "packed": ["q", "k"]}


@pytest.mark.parametrize("body", BODIES)
def test_it_is_named_beside_rules_inside_of_the_body(body: str) -> None:
    net = Net(body)
    net.mid = Projected(body)
    inside = {"mid.q": PACKED, "mid.o": "rowwise"}
    rules = {"embedding": "vocab", "mid": "sequence", "up": "colwise", "down": "rowwise", **inside}
    with pytest.raises(tpplan.CompileError) as caught:
        tpplan.compile_plan(net, {"version": 1, "modules": rules}, 2, (IDS,))
    (found,) = caught.value.diagnostics
    assert (found.code, found.subject) == ("TP107", "mid")
    assert "remove the rule for `mid`" in (found.help or "") and str(found.notes[0]).startswith("in `mid`, at ")
    del rules["mid"]
    tpplan.compile_plan(net, {"version": 1, "modules": rules}, 2, (IDS,))


def test_a_split_of_features_inside_is_at_fault_by_itself() -> None:
    net = Net("roll")
    net.mid = mid = Projected("roll")
    mid.forward = lambda z: mid.o(mid.q(z).cumsum(-1)[..., :16])
    rules = {"embedding": "vocab", "mid": "sequence", "mid.q": "colwise", "mid.o": "rowwise"}
    with pytest.raises(tpplan.CompileError) as caught:
        tpplan.compile_plan(net, {"version": 1, "modules": rules}, 2, (IDS,))
    assert not any("part of the sequence" in found.message for found in caught.value.diagnostics)
