"""Kernels on a machine that can't run them: the model's own operations, and a word where the plan asked for more."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import tpplan
from tests.compiler.toys import HIDDEN, MLP
from tpplan import kernels
from tpplan.compat.process_groups import fake_process_group
from tpplan.compiler.ir.program import KernelUse
from tpplan.runtime.bodies.kernel_bodies import active_uses
from tpplan.runtime.modules.writes import stock_class

pytestmark = pytest.mark.skipif(
    kernels.available("cpu").name == "triton", reason="kernels run here, in Triton's interpreter"
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 32), nn.GELU()
        self.down = nn.Linear(32, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(self.norm(x))))


def parallelized(kernels: dict[str, str]) -> tuple[nn.Module, list[str]]:
    plan: dict[str, Any] = {"version": 1, "modules": MLP, "kernels": kernels}
    with warnings.catch_warnings(record=True) as caught, fake_process_group(2):
        warnings.simplefilter("always")
        model = tpplan.parallelize(Model(), plan, inputs=(torch.zeros(3, 12, HIDDEN),))
    return model, [str(w.message) for w in caught if "Triton" in str(w.message)]


def test_auto_keeps_the_models_own_operations_without_a_word() -> None:
    model, said = parallelized({"gelu": "auto"})
    assert said == []
    assert stock_class(model.get_submodule("act")) is nn.GELU and "kernel=" not in str(model)


def test_triton_says_which_kernels_are_missing_and_why() -> None:
    _, (said,) = parallelized({"bias_gelu": "triton", "layer_norm": "triton"})
    assert "(bias_gelu, layer_norm)" in said and said.endswith("no GPU")


def test_a_refused_use_is_never_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    program = tpplan.compile_plan(Model(), {"version": 1, "modules": MLP, "kernels": {"layer_norm": "torch"}}, 2,
                                  (torch.zeros(3, 12, HIDDEN),))  # fmt: skip
    there = kernels.Backend("triton", "for the test")
    monkeypatch.setattr(kernels, "available", lambda device: there)
    uses: dict[str, KernelUse] = active_uses(program, torch.device("cpu"))
    assert set(uses) == {"act"} and uses["act"].parts == ("up",)
