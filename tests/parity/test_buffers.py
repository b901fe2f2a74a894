"""Buffers beside split features or heads: each rank reads its part of them, and they are stored whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tpplan import CompileError, load_plan
from tpplan.api import suggest_text
from tpplan.compiler.ir.program import Program
from tpplan.parity import verify_program
from tpplan.runtime.bodies import bodies

WIDTH, HEADS, SIZE, LENGTH = 12, 4, 6, 5
INNER = HEADS * SIZE
STREAM = torch.randn(3, LENGTH, WIDTH)


class Decaying(nn.Module):
    """Linear attention: packed features are scaled one by one, and what a head keeps decays at a rate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.heads = INNER, HEADS
        self.into, self.out = nn.Linear(WIDTH, 3 * INNER + HEADS), nn.Linear(INNER, WIDTH)
        self.register_buffer("scale", torch.rand(1, 1, 3 * INNER + HEADS) + 0.5, persistent=False)
        self.register_buffer("rates", torch.rand(HEADS, 1, 1))
        self.register_buffer("shift", torch.rand(HEADS))
        self.register_buffer("window", torch.rand(2, HEADS, 2 * LENGTH, 2 * LENGTH))
        self.scale: Tensor
        self.rates: Tensor
        self.shift: Tensor
        self.window: Tensor

    def forward(self, stream: Tensor) -> Tensor:
        batch, length, _ = stream.shape
        sizes = [self.inner, self.inner, self.inner, self.heads]
        q, k, v, gate = (self.into(stream) * self.scale).split(sizes, -1)
        q, k, v = (t.view(batch, length, -1, SIZE).transpose(1, 2) for t in (q, k, v))
        kept = torch.zeros(batch, self.heads, SIZE, SIZE, dtype=q.dtype, device=q.device)
        kept = kept * torch.exp(-self.rates * length) + k.transpose(-1, -2) @ v
        found = (q @ k.transpose(-1, -2) * self.window[1, :, :length, :length]).tril() @ v + q @ kept.triu()
        found = found * functional.silu(gate + self.shift).transpose(1, 2)[..., None]
        return self.out(found.transpose(1, 2).reshape(batch, length, -1))


class Counting(nn.Module):
    """It writes to what it scales by."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.register_buffer("scale", torch.ones(INNER))
        self.scale: Tensor
        self.replaces = replaces

    def forward(self, stream: Tensor) -> Tensor:
        up = self.up(stream) * self.scale
        if self.replaces:
            self.scale = self.scale * 0.5
        else:
            self.scale[:2].mul_(0.5)
        return self.down(up)


def plan() -> dict[str, Any]:
    packs = {"q": INNER, "k": INNER, "v": INNER, "gate": HEADS}
    return {
        "version": 1,
        "modules": {
            "into": {"style": "colwise", "packed": packs},
            "scale": {"style": "colwise", "packed": packs},
            "{rates,shift,window}": "colwise",
            "out": "rowwise",
        },
    }


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_reads_its_part_of_a_buffer(size: int) -> None:
    model = Decaying()
    program = tpplan.compile_plan(model, plan(), size, STREAM)
    assert {p.name: p.layout.dim for p in program.buffers} == {"scale": 2, "rates": 0, "shift": 0, "window": 1}
    assert program.count_collectives() == {"all-reduce": 1}
    report = verify_program(model, program, ((STREAM,), {}))
    assert report.ok, report.problems


@pytest.mark.parametrize("size", [2, 4])
def test_a_plan_for_it_writes_itself(size: int) -> None:
    program = tpplan.compile_plan(Decaying(), load_plan(suggest_text(Decaying(), size, False, STREAM)), size, STREAM)
    assert {p.name for p in program.parameters if not p.layout.is_sharded} == {"out.bias"}
    assert {p.name for p in program.buffers} == {"scale", "rates", "shift", "window"}


@pytest.mark.parametrize("left_out", ["scale", "{rates,shift,window}"])
def test_what_stands_beside_split_features_must_be_split(left_out: str) -> None:
    rules = plan()
    del rules["modules"][left_out]
    with pytest.raises(CompileError, match="TP107"):
        tpplan.compile_plan(Decaying(), rules, 2, STREAM)


def test_a_part_of_other_features_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decaying()
    program = tpplan.compile_plan(model, plan(), 2, STREAM)
    monkeypatch.setattr(bodies, "buffer_reader", lambda layout, shape, axis: bodies_reader(axis.size, shape))
    assert not verify_program(model, program, ((STREAM,), {})).ok


def bodies_reader(size: int, shape: tuple[int, ...]) -> Any:
    dim = next(d for d, n in enumerate(shape) if n in (HEADS, 3 * INNER + HEADS))
    return lambda tensor: tensor.narrow(dim, 0, shape[dim] // size)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_buffer_that_the_model_writes_to_stays_whole(replaces: bool) -> None:
    rules = {"version": 1, "modules": {"up": "colwise", "scale": "colwise", "down": "rowwise"}}
    with pytest.raises(CompileError, match="TP101"):
        tpplan.compile_plan(Counting(replaces), rules, 2, STREAM)


def test_a_buffer_is_no_row() -> None:
    rules = plan() | {"modules": plan()["modules"] | {"rates": "rowwise"}}
    with pytest.raises(CompileError, match="TP101"):
        tpplan.compile_plan(Decaying(), rules, 2, STREAM)


def test_a_program_with_buffers_survives_json() -> None:
    program = tpplan.compile_plan(Decaying(), plan(), 2, STREAM)
    assert Program.from_dict(program.to_dict()) == program
    without = tpplan.compile_plan(nn.Sequential(nn.Linear(4, 4)), {"version": 1, "modules": {}}, 2, torch.randn(2, 4))
    assert "buffers" not in without.to_dict()
