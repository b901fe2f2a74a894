"""Right programs pass, in whatever way they are verified, and the user's model is left alone."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import tpplan
from tests.models.tiny import tiny_model
from tests.parity.subjects import PLANS, subject
from tpplan.parity import verify, verify_program
from tpplan.report.parity_tables import render_parity


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("plan", ["torch_transformer", "torch_transformer-sequence", "llama", "llama-sequence"])
@pytest.mark.one_in(5)
def test_shipped_plans_compute_the_same(plan, tp):
    model, program, example = subject(plan, tp)
    report = verify_program(model, program, example)
    assert report.ok, str(report)
    assert report.first_divergence is None
    assert report.max_error < 1e-13
    assert report.collectives == report.predicted
    assert {gradient.name for gradient in report.gradients} == {name for name, _ in model.named_parameters()}
    assert report.modules_compared >= 0.9 * len(program.modules)


def test_float32_stays_well_within_its_tolerance():
    model, program, example = subject("llama-sequence", 2)
    report = verify_program(model, program, example, dtype=torch.float32)
    assert report.ok, str(report)
    assert report.max_error < report.tolerance.outputs / 4
    assert report.tolerance.outputs < 1e-3


def test_the_tolerance_is_that_of_the_arithmetic_inside():
    """transformers' RMSNorm computes in float32 even in a float64 model."""
    exact = verify_program(*subject("torch_transformer", 2))
    coarser = verify_program(*subject("llama", 2))
    assert exact.tolerance.outputs < 1e-12
    assert 1e-6 < coarser.tolerance.outputs < 1e-3


def test_one_rank_computes_the_same():
    model, keywords = tiny_model("torch_transformer")
    assert verify(model, PLANS / "torch_transformer.yaml", 1, keywords).ok


def test_a_model_on_meta_gets_numbers():
    model, _ = tiny_model("llama", device="meta")
    stages: list[str] = []
    report = verify(model, PLANS / "llama.yaml", 2, progress=stages.append)
    assert report.ok, str(report)
    assert len(stages) == 3
    assert all(parameter.is_meta for parameter in model.parameters())


def test_the_model_is_left_as_it_was():
    model, keywords = tiny_model("torch_transformer")
    model.train()
    before, classes = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    verify(model, PLANS / "torch_transformer.yaml", 2, keywords)
    assert [type(module) for module in model.modules()] == classes
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_equal_seeds_give_equal_reports():
    model, program, example = subject("torch_transformer", 2)
    assert verify_program(model, program, example, seed=3) == verify_program(model, program, example, seed=3)


class KeyBias(nn.Module):
    """A key's bias has no effect on a softmax, so that its gradient is rounding and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return {"mixed": (self.out(scores.softmax(-1) @ x),), "scores": scores.detach() > 0}


def test_a_gradient_that_is_rounding_only_is_no_divergence():
    plan = {"version": 1, "modules": {"query": "colwise", "key": "colwise"}}
    inputs = torch.randn(3, 6, 16, requires_grad=True)
    report = verify(KeyBias(), plan, 2, (inputs,), dtype=torch.float32)
    assert report.ok, str(report)
    assert {output.name for output in report.outputs} == {"mixed.0", "scores"}
    assert report.gradients[-1].name == "inputs.0"


def test_an_output_that_is_left_sharded_is_joined():
    model, keywords = tiny_model("torch_transformer")
    plan = {"version": 1, "modules": {"head": {"style": "colwise", "output": "shard"}}}
    report = verify(model, plan, 2, keywords)
    assert report.ok, str(report)
    assert report.outputs[0].error < 1e-13


def test_the_package_is_the_function_too():
    model, keywords = tiny_model("torch_transformer")
    assert tpplan.verify(model, PLANS / "torch_transformer.yaml", tp=2, inputs=keywords).ok


@pytest.mark.slow
@pytest.mark.spawned
@pytest.mark.processes
def test_processes_compute_the_same():
    model, program, example = subject("torch_transformer-sequence", 2)
    report = verify_program(model, program, example, processes=True)
    assert report.ok, str(report)
    assert report.ranks == "processes"
    assert report.collectives == report.predicted


def test_the_report_is_plain_data():
    model, program, example = subject("torch_transformer", 2)
    report = verify_program(model, program, example)
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert plain["ok"] is True
    assert plain["size"] == 2
    assert plain["outputs"][0]["name"] == "output"


def test_the_report_is_shown_within_its_width():
    model, program, example = subject("torch_transformer", 2)
    text = render_parity(verify_program(model, program, example), width=80)
    assert text.startswith(f"{program.plan} for TorchTransformer at tp=2: computes the same")
    assert "all-reduce" in text
    assert "\x1b" not in text
    assert all(len(line) <= 80 for line in text.splitlines())


class TiedHead(nn.Module):
    """Reads a bias of its own through the layer that shares it, as heads of masked language models do."""

    def __init__(self):
        super().__init__()
        self.decoder, self.bias = nn.Linear(16, 16), nn.Parameter(torch.randn(16))
        self.decoder.bias = self.bias

    def forward(self, x):
        return x @ self.decoder.weight.t() + self.decoder.bias


def test_a_tied_parameter_may_be_read_by_either_name():
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16), TiedHead())
    plan = {"version": 1, "modules": {"0": "colwise", "1": "rowwise"}}
    report = tpplan.verify(model, plan, 2, (torch.randn(3, 4, 16),))
    assert report.ok, report
