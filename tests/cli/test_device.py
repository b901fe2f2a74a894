"""`tpplan validate --device`: a dry run on fake tensors of a device that isn't there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tpplan.cli.main import main
from tpplan.rehearsal.dry_run import is_built_for

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
    model = on_meta(Branches)
    collectives = [
        tpplan.compile_plan(model, PAIR, 2, torch.zeros(2, 16), device=device).count_collectives()
        for device in (None, "cpu", "cuda")
    ]
    assert collectives[0] == collectives[1] == {"all-reduce": 1}
    assert collectives[2] != collectives[0]


def test_what_cant_run_there_is_a_finding() -> None:
    class Fails(Branches):
        def forward(self, x: Tensor) -> Tensor:
            made = self.up(x)
            if type(made).__name__ == "FakeTensor":
                assert made.shape[-1] == 24, "made for all features"
            return self.down(made.relu())

    with pytest.raises(tpplan.CompileError, match=r"TP136.*as rank 0: AssertionError: made for all features"):
        tpplan.compile_plan(Fails(), PAIR, 2, torch.zeros(2, 16), device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for a machine without a GPU")
@pytest.mark.parametrize(
    "asks",
    [torch.cuda.synchronize, torch.cuda.get_device_capability, torch.Generator],
    ids=["synchronize", "capability", "generator"],
)
def test_what_asks_a_device_that_isnt_there_is_told_so(asks: Callable[[torch.device], object]) -> None:
    class Asks(Branches):
        def forward(self, x: Tensor) -> Tensor:
            asks(x.device)
            return self.down(self.up(x).relu())

    with pytest.raises(tpplan.CompileError, match=r"TP110(?s:.*)help: it asks a device that this machine"):
        tpplan.compile_plan(Asks(), PAIR, 2, torch.zeros(2, 16), device="cuda")


class Holds(Branches):
    """Tensors beside parameters and buffers."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.tables = torch.ones(16), [torch.ones(16)]
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.tables[0] * self.shift


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_BUILD)])
@pytest.mark.parametrize("make", [Holds, lambda: on_meta(Holds)])
def test_what_modules_hold_lies_with_their_parameters(make: Callable[[], nn.Module], device: str) -> None:
    program = tpplan.compile_plan(make(), PAIR, 2, torch.zeros(2, 16), device=device)
    assert "TP136" not in {found.code for found in program.diagnostics}


def test_a_model_that_fails_unsharded_is_told_so() -> None:
    class Mixed(Branches):
        def forward(self, x: Tensor) -> Tensor:
            if type(x).__name__ == "FakeTensor":
                raise RuntimeError("two different devices")
            return super().forward(x)

    with pytest.raises(
        tpplan.CompileError, match=r"TP136.*the unsharded model can't run on `cpu` either.*two different"
    ):
        tpplan.compile_plan(Mixed(), PAIR, 2, torch.zeros(2, 16), device="cpu")


@pytest.mark.parametrize(("device", "unused"), [("cpu", True), ("cuda", False)])
def test_kernels_for_a_gpu_have_an_effect_there(device: str, unused: bool) -> None:
    class Normed(Branches):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(self.norm(x)))

    plan = {**PAIR, "kernels": {"layer_norm": "triton"}}
    program = tpplan.compile_plan(Normed(), plan, 2, torch.zeros(2, 16), device=device)
    assert ("TP150" in {found.code for found in program.diagnostics}) == unused


def test_no_device_of_torch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'gpu' isn't a device of torch: write `\"cuda\"`"):
        tpplan.compile_plan(Branches(), PAIR, 2, torch.zeros(2, 16), device="gpu")


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
