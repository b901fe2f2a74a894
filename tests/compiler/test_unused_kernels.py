"""A choice under `kernels` of which nothing comes is reported at its line; `auto` asks for nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.compiler.toys import HIDDEN, MLP, X
from tpplan import kernels
from tpplan.plan import Diagnostic

NOWHERE = "no body in the model, of those that this holds for, computes "


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 32), nn.GELU()
        self.down = nn.Linear(32, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(self.norm(x))))


def unused(choices: str) -> list[Diagnostic]:
    rules = "".join(f"  {name}: {style}\n" for name, style in MLP.items())
    plan = tpplan.load_plan(f"version: 1\nmodules:\n{rules}kernels:\n  {choices}\n")
    found = tpplan.compile_plan(Model(), plan, 2, (torch.zeros(X),)).diagnostics
    return [finding for finding in found if finding.code == "TP150"]


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ("residual_norm: triton", "isn't a sum in the body of the module that calls it"),
        ("residual_norm: torch", "only where the plan says `triton`"),
        ("cross_entropy: torch", NOWHERE),
        ("rms_norm: triton", NOWHERE),
        ("rms_norm: torch", NOWHERE),
        ("swiglu: triton", NOWHERE),
        ("gelu: torch", NOWHERE),  # the one there is has a bias
        ("up: {layer_norm: torch}", "no body in what `up` matches"),
    ],
)
def test_what_no_body_is_for_is_said_with_its_line(choice: str, why: str) -> None:
    (finding,) = unused(choice)
    assert why in finding.message and finding.severity == "warning"
    assert finding.span is not None and finding.span.start.line == 6


@pytest.mark.skipif(kernels.available("cpu").name == "triton", reason="kernels run here, in Triton's interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("choice", ["layer_norm: triton", "bias_gelu: triton", "norm: {layer_norm: triton}"])
def test_without_a_gpu_the_models_own_operations_run(choice: str) -> None:
    (finding,) = unused(choice)
    assert "the model's own operations run" in finding.message and finding.message.endswith("no GPU")


def test_with_kernels_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda device: kernels.Backend("triton", "for the test"))
    assert unused("layer_norm: triton") == [] and unused("bias_gelu: triton") == []


@pytest.mark.parametrize("choice", ["layer_norm: torch", "bias_gelu: torch", "act: {bias_gelu: torch}"])
def test_leaving_a_body_as_it_is_has_an_effect(choice: str) -> None:
    assert unused(choice) == []


@pytest.mark.parametrize("kind", ["rms_norm", "residual_norm", "cross_entropy", "layer_norm"])
def test_auto_is_never_reported(kind: str) -> None:
    assert unused(f"{kind}: auto") == []


def test_a_choice_that_others_override_everywhere_is_unused() -> None:
    (finding,) = unused("layer_norm: torch\n  norm: {layer_norm: torch}")
    assert finding.span is not None and finding.span.start.line == 6
