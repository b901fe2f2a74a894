"""Packs that follow from what a value meets: two halves of the heads whose attention is subtracted."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tpplan import load_plan
from tpplan.api import suggest_text
from tpplan.calls.guard import CallGuard
from tpplan.compiler.pipeline import Compiled
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.parity import verify_program
from tpplan.parity.materialise import copy_structure, copy_with_numbers
from tpplan.parity.rank import SimulatedDistributor
from tpplan.parity.threads import ThreadCommunicator, run_ranks
from tpplan.runtime.lower import lower

WIDTH, HEADS, KEYS, SIZE = 24, 16, 8, 3
STREAM = torch.randn(3, 5, WIDTH)


class Differential(nn.Module):
    """The values of each half of the heads serve all queries; halves of what comes out are subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(WIDTH, HEADS * SIZE)
        self.keys, self.values = (nn.Linear(WIDTH, KEYS * SIZE) for _ in range(2))
        self.out = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        batch, length, _ = stream.shape
        q, k, v = (
            layer(stream).view(batch, length, -1, SIZE).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        each = HEADS // KEYS
        k = k[:, :, None].expand(-1, -1, each, -1, -1).reshape(batch, -1, length, SIZE)
        found: list[Tensor] = []
        for half in v.chunk(2, 1):
            held = half.repeat(1, 2, 1, 1)
            held = held[:, :, None].expand(-1, -1, each, -1, -1).reshape(batch, -1, length, SIZE)
            found.append(functional.scaled_dot_product_attention(q, k, held, is_causal=True))
        one, other = torch.cat(found, -1).transpose(1, 2).chunk(2, 2)
        return self.out((one - 0.3 * other).reshape(batch, length, -1))


def suggested(size: int) -> str:
    return suggest_text(Differential(), size, False, STREAM)


@pytest.mark.parametrize("size", [2, 4])
def test_what_meets_packs_is_packed_alike(size: int) -> None:
    model, plan = Differential(), load_plan(suggested(size))
    program = tpplan.compile_plan(model, plan, size, STREAM)
    packs = {p.name: [pack.size for pack in p.layout.packs] for p in program.parameters if p.name.endswith("weight")}
    half, small = HEADS * SIZE // 2, KEYS * SIZE // 2
    assert packs == {
        "queries.weight": [half] * 2, "keys.weight": [small] * 2, "values.weight": [small] * 2, "out.weight": [],
    }  # fmt: skip
    report = verify_program(model, program, ((STREAM,), {}))
    assert report.ok, report.problems


def test_calls_of_another_batch_size_are_right() -> None:
    model, plan = copy_with_numbers(Differential(), torch.float64, 0), load_plan(suggested(2))
    program = tpplan.compile_plan(model, plan, 2, STREAM)
    calls = [torch.randn(batch, 4, WIDTH, dtype=torch.float64) for batch in (3, 2, 1, 5)]

    def work(axis: ThreadCommunicator) -> list[Tensor]:
        guard = CallGuard(make_skeleton(model).model, plan, Compiled(program, {}, ()), (STREAM,), {})
        own = lower(copy_structure(model), program, SimulatedDistributor(axis), guard).eval()
        with torch.no_grad():
            return [own(call) for call in calls]

    with torch.no_grad():
        reference = [copy.deepcopy(model)(call) for call in calls]
    for found in run_ranks(2, work):
        for ours, theirs in zip(found, reference, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_packs_that_only_one_of_them_has_are_gathered_again() -> None:
    halves = {"style": "colwise", "packed": ["a", "b"]}
    rules = {"queries": "colwise", "keys": "colwise", "values": halves, "out": "rowwise"}
    model = Differential()
    program = tpplan.compile_plan(model, {"version": 1, "modules": rules}, 2, STREAM)
    assert "TP104" in {finding.code for finding in program.diagnostics}
    report = verify_program(model, program, ((STREAM,), {}))
    assert report.ok, report.problems
