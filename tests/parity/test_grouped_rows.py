"""Experts whose features the axis cuts to rows that torch's product of grouped rows doesn't take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

import tpplan
from tests.zoo.architectures import build
from tpplan.compat.process_groups import fake_process_group
from tpplan.parity import verify_program
from tpplan.plan import CompileError

WIDTH, EXPERTS, CHOSEN = 16, 4, 2
TOKENS = (torch.randn(3, 8, WIDTH, requires_grad=True),)


class Experts(nn.Module):
    """Stacks of gate and up, feature by feature or one after the other, and down, with biases as gpt-oss has them."""

    def __init__(self, features: int, interleaved: bool) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * features) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, features, WIDTH) / 4)
        self.gate_up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * features))
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        numbers, order = chosen.reshape(-1).sort()
        counts = torch.histc(numbers.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        both = functional.grouped_mm(tokens[order // CHOSEN], self.gate_up, offs=ends) + self.gate_up_bias[numbers]
        gate, up = (both[..., ::2], both[..., 1::2]) if self.interleaved else both.chunk(2, -1)
        made = functional.grouped_mm(functional.silu(gate) * up, self.down, offs=ends) + self.down_bias[numbers]
        made = made * weights.reshape(-1)[order, None]
        return torch.zeros_like(tokens).index_add(0, order // CHOSEN, made)


class Block(nn.Module):
    def __init__(self, features: int, interleaved: bool) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts(features, interleaved)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = torch.topk(functional.softmax(self.router(tokens), -1), CHOSEN, -1)
        return x + self.experts(tokens, chosen, weights).view_as(x)


def plan_of(interleaved: bool) -> dict[str, Any]:
    column = "colwise" if interleaved else {"style": "colwise", "packed": ["gate", "up"]}
    stacks = {"experts.gate_up{,_bias}": column, "experts.down{,_bias}": "rowwise"}
    return {"version": 1, "modules": stacks}


def rows(program: tpplan.Program, name: str = "experts.down") -> list[int]:
    """How many features each rank contracts."""
    down = next(held for held in program.parameters if held.name == name)
    return [down.stored_shape(program.size, rank)[1] for rank in range(program.size)]


# In units of 8 features, of two bytes each, where these are enough; else of 16 bytes of the model's dtype.
UNEVEN = [
    (80, 3, [32, 24, 24]),
    (20, 3, [8, 8, 4]),
    (80, 6, [16] * 4 + [8] * 2),
    (60, 6, [12] * 3 + [8] * 3),
    (200, 16, [16] * 9 + [8] * 7),
    (72, 16, [8] * 2 + [4] * 14),
]


@pytest.mark.parametrize(("features", "tp", "held"), UNEVEN)
@pytest.mark.parametrize("interleaved", [False, True], ids=["packed", "interleaved"])
@pytest.mark.one_in(3)
def test_ranks_have_whole_rows(features: int, tp: int, held: list[int], interleaved: bool) -> None:
    model, plan = Block(features, interleaved), plan_of(interleaved)
    program = tpplan.compile_plan(model, plan, tp, TOKENS)
    assert rows(program) == held
    assert not program.diagnostics and not program.freedoms
    report = verify_program(model, program, (TOKENS, {}), dtype=torch.float32)
    assert report.ok, str(report)
    assert report.collectives == report.predicted
    assert {held.name for held in report.gradients} >= {name for name, _ in model.named_parameters()}
    assert tpplan.Program.from_dict(program.to_dict()) == program


@pytest.mark.parametrize(("features", "tp"), [(80, 2), (48, 3), (80, 4)])
def test_what_fits_is_split_evenly(features: int, tp: int) -> None:
    program = tpplan.compile_plan(Block(features, False), plan_of(False), tp, TOKENS)
    assert rows(program) == [features // tp] * tp
    assert "parts" not in str(next(p.layout for p in program.parameters if p.name == "experts.down"))


def test_half_precision_takes_units_of_twice_as_many() -> None:
    program = tpplan.compile_plan(Block(72, True).bfloat16(), plan_of(True), 6, (torch.randn(3, 8, WIDTH).bfloat16(),))
    assert rows(program) == [16, 16, 16, 8, 8, 8]


@pytest.mark.parametrize("interleaved", [False, True], ids=["packed", "interleaved"])
def test_fewer_rows_than_ranks_are_refused(interleaved: bool) -> None:
    with pytest.raises(CompileError) as raised:
        tpplan.compile_plan(Block(20, interleaved), plan_of(interleaved), 6, TOKENS)
    assert {finding.code for finding in raised.value.diagnostics} == {"TP102"}
    (first, *_) = raised.value.diagnostics
    assert "its features make 5 of these for 6 ranks" in first.message
    assert "use at most 5 ranks" in str(first.help)
    tpplan.compile_plan(Block(20, interleaved), plan_of(interleaved), 5, TOKENS)


def test_experts_of_groups_have_whole_rows() -> None:
    """4 experts on 12 ranks: 3 ranks share out the 80 features of each."""
    model, call = build("gpt_oss")
    stacks = {"gate_up_{proj,proj_bias}": "colwise", "down_{proj,proj_bias}": "rowwise"}
    rules: dict[str, Any] = {f"model.layers.*.mlp.experts.{name}": style for name, style in stacks.items()}
    plan = {"version": 1, "modules": {"model.layers.*.mlp.experts": "experts", **rules}}
    program = tpplan.compile_plan(model, plan, 12, call)
    assert rows(program, "model.layers.0.mlp.experts.down_proj") == [32, 24, 24] * 4
    report = verify_program(model, program, ((), call), dtype=torch.float32)
    assert report.ok, str(report)
    assert report.collectives == report.predicted


def test_counted_as_predicted() -> None:
    predicted = tpplan.compile_plan(Block(20, True), plan_of(True), 3, TOKENS).count_collectives()
    with fake_process_group(3):
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        sharded = tpplan.parallelize(Block(20, True), plan_of(True), mesh, TOKENS)
        with CommDebugMode() as mode:
            sharded(*TOKENS).sum().backward()
    assert mode.get_total_counts() == sum(predicted.values())


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("interleaved", [False, True], ids=["packed", "interleaved"])
def test_processes_compute_the_same(interleaved: bool) -> None:
    report = tpplan.verify(Block(20, interleaved), plan_of(interleaved), 3, TOKENS, processes=True)
    assert report.ok, str(report)
    assert report.collectives == report.predicted
