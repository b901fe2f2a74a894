"""What a plan doesn't compile without is allowed rung by rung, and told."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.compiler.test_unread import CALL, Blocks, Joint
from tests.parity.test_gathers import RULES, WIDTH, Talking
from tpplan.compiler.ir.freedoms import Freedoms
from tpplan.compiler.later import before_any_call
from tpplan.compiler.trace.surroundings import Surroundings, same_files
from tpplan.report.program_page import FREEDOMS, render_program


def test_each_freedom_has_its_words() -> None:
    assert [*FREEDOMS] == [field.name for field in fields(Freedoms)]


@pytest.mark.parametrize(
    ("model", "rules", "call", "allowed"),
    [
        (nn.Sequential(Talking()), RULES, (torch.randn(2, 4, WIDTH),), ("heads", "slices", "moving")),
        (
            Blocks(Joint),
            {"blocks.*.up": "colwise", "blocks.*.down_x": "rowwise", "blocks.0.down_t": "rowwise"},
            CALL,
            ("slices", "unread", "moving"),
        ),
    ],
)
def test_a_program_tells_what_its_plan_needed(
    model: nn.Module, rules: dict[str, str], call: tuple[torch.Tensor, ...], allowed: tuple[str, ...]
) -> None:
    program = tpplan.compile_plan(model, {"version": 1, "modules": rules}, 2, call)
    assert program.freedoms == allowed
    page = " ".join(render_program(program).split())
    assert all(FREEDOMS[name] in page for name in allowed)


def test_files_are_looked_through_once_in_a_block_and_anew_for_another_hook() -> None:
    model = nn.Sequential(Talking())
    assert Surroundings(model).spaces is not Surroundings(model).spaces
    with same_files():
        before = Surroundings(model)
        assert Surroundings(model).spaces is before.spaces
        model.register_forward_hook(lambda *_: None)
        assert Surroundings(model).spaces is not before.spaces


class Tabled(nn.Module):
    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if Tabled.table is None:
            Tabled.table = torch.arange(x.shape[-1]).cos()
        return x * Tabled.table


def test_what_is_noted_of_a_table_that_is_taken_away_is_put_back_after_it() -> None:
    model, x = Tabled(), torch.randn(2, 4)
    model(x)
    kept = Tabled.table
    with same_files():
        around = Surroundings(model)
        with before_any_call(model) as filled:
            inner = Surroundings(model)
            model(x)
            inner.restore()
            assert filled and Tabled.table is None
        around.restore()
    assert Tabled.table is kept
