"""A dict of torch's parallel styles is a plan; "auto" is one wherever a plan is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

import tpplan
from tests.runtime.world import Member, world

IDS = torch.arange(24).view(2, 12)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(8)
        self.output = nn.Linear(8, 24)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


class Own(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return module


TENSOR: dict[str, Any] = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
    "output": ColwiseParallel(output_layouts=Replicate()),
}
SEQUENCE: dict[str, Any] = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1)),
    "layers.*.norm": SequenceParallel(),
    "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
RULES: dict[str, object] = {
    "embedding": "vocab",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "output": {"style": "colwise", "output": "replicate"},
}


def test_styles_are_the_rules_that_say_the_same() -> None:
    program = tpplan.compile_plan(Model(), TENSOR, 2, (IDS,))
    rules = {"version": 1, "name": "parallelize_module", "modules": RULES}
    assert program.digest == tpplan.compile_plan(Model(), rules, 2, (IDS,)).digest
    assert program.diagnostics == ()


@pytest.mark.parametrize("styles", [TENSOR, SEQUENCE, TENSOR | {"embedding": ColwiseParallel()}])
def test_what_it_computes_is_the_same(styles: dict[str, ParallelStyle]) -> None:
    assert tpplan.verify(Model(), styles, 2, (IDS,)).ok


def test_what_the_compiler_places_by_itself_is_a_note() -> None:
    program = tpplan.compile_plan(Model(), SEQUENCE, 2, (IDS,))
    notes = [found for found in program.diagnostics if found.code == "TP217"]
    assert [found.subject for found in notes] == ["layers.*", "layers.*.up", "output"]
    assert {found.severity for found in notes} == {"note"}
    counted = program.count_collectives()
    assert counted["reduce-scatter"] and counted["all-gather"]


@pytest.mark.parametrize(
    ("styles", "says"),
    [
        ({"layers.*.up": ColwiseParallel(output_layouts=Shard(1))}, r"can't be handed out as S\(1\)"),
        ({"layers.*.down": RowwiseParallel(input_layouts=Shard(1))}, r"not S\(1\)"),
        ({"norm": SequenceParallel(sequence_dim=0)}, "splits dim 1"),
        ({"layers.*.up": Own()}, "`Own` isn't `ColwiseParallel`"),
        ({"layers.*.up": ColwiseParallel(), "output": "colwise"}, "'colwise'"),
        ({"layers.?.up": ColwiseParallel()}, "neither"),
        (ColwiseParallel(), "name the modules inside of it"),
        ({"norm": PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())}, "none of the"),
    ],
)
def test_what_no_rule_says_is_a_finding(styles: Any, says: str) -> None:
    with pytest.raises(tpplan.CompileError, match=says) as caught:
        tpplan.compile_plan(Model(), styles, 2, (IDS,))
    assert {found.code for found in caught.value.diagnostics} == {"TP217"}


def test_every_mistake_is_told() -> None:
    styles = {"embedding": Own(), "norm": SequenceParallel(sequence_dim=2), "output": ColwiseParallel()}
    with pytest.raises(tpplan.CompileError) as caught:
        tpplan.verify(Model(), styles, 2, (IDS,))
    assert [found.subject for found in caught.value.diagnostics] == ["embedding", "norm"]


def test_auto_is_a_plan_wherever_one_is_taken() -> None:
    found = tpplan.suggest_plan(Model(), 2, inputs=(IDS,))
    expected = tpplan.compile_plan(Model(), found, 2, (IDS,))
    assert tpplan.compile_plan(Model(), "auto", 2, (IDS,)).digest == expected.digest
    assert tpplan.verify(Model(), "auto", 2, (IDS,)).ok


def parallelized(member: Member, plan: Any, tp: int | None, named: bool) -> tuple[Any, float, str]:
    torch.manual_seed(0)
    model = Model()
    whole = model(IDS)
    mesh = member.mesh(member.size, names=("columns",)) if named else None
    tpplan.parallelize(model, plan, mesh, (IDS,), tp=tp)
    table: Any = model.embedding.weight
    error = (model(IDS) - whole).abs().max().item()
    return table.device_mesh.mesh_dim_names, error, str(tuple(table.to_local().shape))


@pytest.mark.one_in(3)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("plan", "tp", "named", "shape"),
    [("auto", None, False, "(12, 8)"), (TENSOR, 2, False, "(12, 8)"), ("auto", None, True, "(12, 8)"),
     (TENSOR, None, True, "(12, 8)"), ("auto", 1, False, "(24, 8)")],
)  # fmt: skip
def test_processes_take_them_too(plan: Any, tp: int | None, named: bool, shape: str) -> None:
    for names, error, local in world(2).run(parallelized, plan, tp, named):
        assert names == (("columns",) if named else ("tp",)) and error < 1e-6 and local == shape


def refused(member: Member, tp: int, over: bool) -> str:
    try:
        tpplan.parallelize(Model(), TENSOR, member.mesh() if over else None, (IDS,), tp=tp)
    except tpplan.CompileError as error:
        return str(error)
    return ""


@pytest.mark.processes
def test_a_number_of_ranks_that_isn_t_there_is_refused() -> None:
    assert all("TP115" in text and "doesn't divide the 2 processes" in text for text in world(2).run(refused, 3, False))
    assert all("TP115" in text and "the mesh has 2 ranks" in text for text in world(2).run(refused, 1, True))
