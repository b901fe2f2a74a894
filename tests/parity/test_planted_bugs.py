"""Each mistake that a compiler or a runtime of tensor parallelism can make fails, and is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import tpplan
from tests.parity.subjects import subject, with_module, with_parameter
from tpplan.compiler.ir.layout import Collective
from tpplan.parity import ParityReport, verify_program
from tpplan.runtime.bodies import layer_bodies
from tpplan.runtime.parameters.distribute import MeshDistributor


@pytest.fixture
def planted(monkeypatch):
    """Puts another body in the place of that of layers split by rows."""
    return lambda body: monkeypatch.setattr(layer_bodies, "row", body)


def verify_planted(plan: str, plant, tp: int = 2) -> ParityReport:
    model, program, example = subject(plan, tp)
    assert verify_program(model, program, example).ok
    return verify_program(model, plant(program), example)


def without_backward(module):
    entries = tuple(
        replace(r, backward=Collective.NONE) if r.backward is Collective.ALL_REDUCE else r for r in module.entries
    )
    assert entries != module.entries
    return replace(module, entries=entries)


def test_a_reduction_that_is_dropped_is_named_where_it_should_be():
    def plant(program):
        return with_module(program, "blocks.0.mlp.down", lambda module: replace(module, exits=()))

    report = verify_planted("torch_transformer", plant)
    assert not report.ok
    assert report.first_divergence == "blocks.0.mlp.down"
    assert report.max_error > 0.01


def test_a_reduction_that_is_lost_at_run_time_is_named_where_it_should_be(planted):
    model, program, example = subject("torch_transformer", 2)

    def unreduced(module, runtime, input, weight, bias, leave):
        return functional.linear(input, weight) + bias

    planted(unreduced)
    report = verify_program(model, program, example)
    assert report.first_divergence == "blocks.0.attention.o"
    assert any("the program says" in problem for problem in report.problems)


@pytest.mark.parametrize("plan", ["torch_transformer", "torch_transformer-sequence"])
def test_a_bias_that_every_rank_adds_before_the_sum_is_seen(planted, plan):
    model, program, example = subject(plan, 2)

    def biased_before(module, runtime, input, weight, bias, leave):
        return leave(functional.linear(input, weight, bias))

    planted(biased_before)
    report = verify_program(model, program, example)
    assert not report.ok
    assert report.first_divergence == "blocks.0.attention.o"


def test_a_bias_of_zeros_hides_nothing(planted):
    model, program, example = subject("torch_transformer", 2)
    fresh = type(model)(vocabulary=88).double()
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()

    def biased_before(module, runtime, input, weight, bias, leave):
        return leave(functional.linear(input, weight, bias))

    planted(biased_before)
    report = verify_program(fresh, program, example)
    assert report.first_divergence == "blocks.0.attention.o"
    assert all(not p.any() for name, p in fresh.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize("tp", [2, 4])
def test_heads_permuted_on_one_rank_are_named_at_their_projection(monkeypatch, tp):
    model, program, example = subject("llama", tp)
    cut = MeshDistributor._local

    def permuted(self, whole, placement):
        local = cut(self, whole, placement)
        wrong = placement.name == "model.layers.1.self_attn.q_proj.weight" and self.axis.rank == 1
        return local.unflatten(0, (-1, 6)).flip(0).flatten(0, 1) if wrong else local

    monkeypatch.setattr(MeshDistributor, "_local", permuted)
    report = verify_program(model, program, example)
    assert report.first_divergence == "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("plan", "norm"),
    [
        ("llama-sequence", "model.layers.0.post_attention_layernorm"),
        ("torch_transformer-sequence", "blocks.1.mlp_norm"),
    ],
)
def test_a_norm_whose_gradient_is_not_summed_is_named(plan, norm):
    def plant(program):
        return with_parameter(program, f"{norm}.weight", lambda parameter: replace(parameter, summed=False))

    report = verify_planted(plan, plant)
    assert not report.ok
    assert all(output.ok for output in report.outputs)
    assert [gradient.name for gradient in report.gradients if not gradient.ok] == [f"{norm}.weight"]
    assert report.divergence is not None
    assert (report.divergence.module, report.divergence.what) == (norm, "gradient")


def test_an_identity_in_place_of_f_is_named_at_the_module_before_it():
    def plant(program):
        entering = next(m.name for m in program.modules if m.name.startswith("blocks.1.mlp") and m.entries)
        return with_module(program, entering, without_backward)

    report = verify_planted("torch_transformer", plant)
    assert all(output.ok for output in report.outputs)
    assert report.first_divergence == "blocks.1.mlp_norm"
    assert "blocks.1.mlp.down.weight" not in {gradient.name for gradient in report.gradients if not gradient.ok}


def test_a_count_that_is_left_global_is_named():
    def plant(program):
        return with_module(program, "blocks.1.attention", lambda module: replace(module, local_attributes=()))

    report = verify_planted("torch_transformer", plant)
    assert report.first_divergence == "blocks.1.attention.o"


def test_a_program_that_miscounts_its_collectives_is_told():
    def plant(program):
        return with_module(program, "blocks.0.mlp.down", lambda module: replace(module, calls=module.calls + 1))

    report = verify_planted("torch_transformer", plant)
    assert report.ok
    assert report.first_divergence is None
    assert "the program says" in report.notes[0]


def test_half_precision_is_coarse_but_still_tells_a_lost_reduction():
    model, program, example = subject("torch_transformer", 2)
    assert verify_program(model, program, example, dtype=torch.bfloat16).ok
    bad = with_module(program, "blocks.0.mlp.down", lambda module: replace(module, exits=()))
    assert not verify_program(model, bad, example, dtype=torch.bfloat16).ok


def test_a_model_that_gives_no_numbers_shows_nothing():
    first = torch.nn.Linear(8, 8)
    torch.nn.init.constant_(first.weight, float("nan"))
    model = torch.nn.Sequential(first, torch.nn.Linear(8, 8))
    plan = {"version": 1, "modules": {"0": "colwise", "1": "rowwise"}}
    report = tpplan.verify(model, plan, 2, (torch.randn(3, 8),))
    assert not report.ok
    assert report.problems[0].startswith("the unsharded model itself gives NaN for ")


def test_a_model_that_gives_nothing_but_zeros_shows_nothing():
    last = torch.nn.Linear(8, 8)
    torch.nn.init.constant_(last.bias, -1e3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), last, torch.nn.ReLU())
    plan = {"version": 1, "modules": {"0": "colwise", "1": "rowwise"}}
    report = tpplan.verify(model, plan, 2, (torch.randn(3, 8),))
    assert report.problems[0].startswith("the unsharded model itself gives nothing but zeros")
