"""`tpplan validate --device`: a dry run on fake tensors of a device that isn't there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tpplan.cli.main import main
from tpplan.compat import is_built_for

CUDA = torch.device("cuda")
NEEDS_BUILD = pytest.mark.skipif(not is_built_for(CUDA), reason="needs a build of torch with CUDA, and no GPU")
PAIR = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}


class Branches(nn.Module):
    """Takes another path on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        made = self.up(x)
        made = made.softmax(-1) if x.is_cuda else made.relu()
        return self.down(made)


def test_code_takes_the_path_of_the_device() -> None:
    with torch.device("meta"):
        model = Branches()
    collectives = [
        tpplan.compile_plan(model, PAIR, 2, torch.zeros(2, 16), device=device).count_collectives()
        for device in (None, "cpu", "cuda")
    ]
    assert collectives[0] == collectives[1] == {"all-reduce": 1}
    assert collectives[2] != collectives[0]


def test_what_cant_run_there_is_a_finding() -> None:
    class Fails(Branches):
        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            assert type(made).__name__ != "FakeTensor", "made for numbers"
            return made

    with pytest.raises(tpplan.CompileError, match=r"TP136.*AssertionError: made for numbers"):
        tpplan.compile_plan(Fails(), PAIR, 2, torch.zeros(2, 16), device="cpu")


def test_reading_numbers_is_a_note() -> None:
    class Reads(Branches):
        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            return made * 2 if bool(x.sum() > 0) else made

    program = tpplan.compile_plan(Reads(), PAIR, 2, torch.zeros(2, 16), device="cpu")
    assert ("TP136", "note") in {(found.code, found.severity.value) for found in program.diagnostics}


def validate(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main(
        ["validate", "llama", "--model", "hf:llama", "--set", "num_hidden_layers=2", *arguments, "--format", "json"]
    )
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.skipif(is_built_for(CUDA), reason="for builds of torch without CUDA")
def test_a_build_without_the_device_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = validate(capsys, "--device", "cuda")
    assert code == 0 and "TP136" in json.dumps(found) and "has no `cuda`" in json.dumps(found)


def test_a_sharded_llama_runs_on_fake_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = validate(capsys, "--device", "cpu")
    assert code == 0 and "TP136" not in json.dumps(found)


@NEEDS_BUILD
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
def test_a_sharded_llama_runs_on_fake_cuda_tensors(capsys: pytest.CaptureFixture[str], attention: str) -> None:
    code, found = validate(capsys, "--device", "cuda", "--set", f"attn_implementation={attention}")
    assert code == 0 and "gathered" not in json.dumps(found)
    # Masks of `flex_attention` are made of numbers.
    assert "TP136" not in json.dumps(found) or attention == "flex_attention"


def test_a_device_without_a_model_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("version: 1\nmodules: {up: colwise}\n")
    assert main(["validate", str(plan), "--device", "cuda"]) == 2
