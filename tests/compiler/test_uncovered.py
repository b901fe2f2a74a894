"""What no rule of a plan covers is said, once, if it is much."""

from __future__ import annotations

import torch
from torch import nn

import tpplan
from tests.compiler.toys import Mlp, X, compiled, plan_of, x_BSH


class Model(nn.Module):
    """Two equal layers without a rule and a covered one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(), Mlp(), Mlp()])
        self.norm = nn.LayerNorm(X[-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


COVERED = {"layers.0.up": "colwise", "layers.0.down": "rowwise"}


def findings(modules: dict[str, str]) -> list[tpplan.Diagnostic]:
    return list(tpplan.compile_plan(Model(), plan_of(modules), 2, (x_BSH().requires_grad_(),)).diagnostics)


def test_layers_that_a_pattern_missed_are_one_note_with_their_share() -> None:
    (note,) = findings(COVERED)
    assert note.code == "TP120" and str(note.severity) == "note"
    assert note.message.startswith("63% of the parameters stay whole")
    assert note.notes == ("`layers.*.down`: 1,024 parameters, 32%", "`layers.*.up`: 1,024 parameters, 32%")


def test_a_replicate_rule_on_a_container_says_that_it_is_meant() -> None:
    assert findings(COVERED | {"layers.{1,2}": "replicate"}) == []


def test_a_norm_needs_no_word() -> None:
    assert (
        compiled(nn.Sequential(Mlp(), nn.LayerNorm(X[-1])), {"0.up": "colwise", "0.down": "rowwise"}).diagnostics == ()
    )


def test_a_tied_parameter_is_covered_by_a_rule_on_either_name() -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False))
    model[2].weight = model[0].weight
    assert compiled(model, {"0": {"style": "colwise", "output": "replicate"}}).diagnostics == ()
