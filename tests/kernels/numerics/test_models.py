"""Whole models with kernels in place of their bodies: outputs and every gradient, against the stock model."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch

import tpplan
from tests.kernels.numerics.harness import DEVICE
from tests.models.tiny import first_output, tiny_model
from tpplan import kernels
from tpplan.compat.dtensors import local_of
from tpplan.compat.modes import without_function_modes
from tpplan.compat.process_groups import fake_process_group
from tpplan.kernels import backend
from tpplan.kernels.backend import INTERPRETED

# Both sides compute in float32. The kernels round other intermediate results than torch does, so that the difference
# is a few roundings of what a sum of that many terms may lose: the tolerance that `verify` derives.
MODELS = {
    "llama": {"rms_norm", "swiglu"},
    "bert": {"layer_norm", "bias_gelu"},
    "gpt_neox": {"layer_norm", "bias_gelu"},
}

RESIDUAL = "\nkernels: {residual_norm: triton}\n"


def counted(monkeypatch: pytest.MonkeyPatch, on_shapes: bool = True) -> Counter[str]:
    """How often each kernel function is called; `on_shapes`: without numbers as well, as a program is tried."""
    calls: Counter[str] = Counter()
    for name in ("layer_norm", "rms_norm", "residual_rms_norm", "gelu", "bias_gelu", "swiglu", "geglu"):
        stock = getattr(kernels, name)

        def call(*arguments: Any, name: str = name, stock: Any = stock, **keywords: Any) -> Any:
            with without_function_modes():  # one of them answers for the device where the model will run
                calls[name] += on_shapes or not arguments[0].is_meta
            return stock(*arguments, **keywords)

        monkeypatch.setattr(kernels, name, call)
    return calls


@pytest.mark.skipif(not INTERPRETED, reason="a verification runs on the CPU")
@pytest.mark.parametrize("suffix", ["", "-sequence"])
@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", ["llama", "bert", pytest.param("gpt_neox", marks=pytest.mark.slow)])
def test_a_model_with_kernels_computes_what_the_stock_model_computes(
    name: str, tp: int, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(monkeypatch, on_shapes=False)
    model, keywords = tiny_model(name)
    plan = tpplan.load_plan(f"{name}{suffix}")
    report = tpplan.verify(model.float(), plan, tp, keywords, dtype=torch.float32)
    assert report.ok, report
    assert set(calls) == MODELS[name] and all(count % tp == 0 for count in calls.values())


@pytest.mark.skipif(not INTERPRETED, reason="a verification runs on the CPU")
def test_a_sum_and_the_norm_of_it_are_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, on_shapes=False)
    model, keywords = tiny_model("llama")
    plan = tpplan.load_plan(f"version: 1\nextends: llama-sequence{RESIDUAL}")
    report = tpplan.verify(model.float(), plan, 2, keywords, dtype=torch.float32)
    assert report.ok, report
    assert set(calls) == MODELS["llama"] | {"residual_rms_norm"}


@pytest.mark.skipif(INTERPRETED, reason="a model that isn't simulated runs on a GPU")
@pytest.mark.parametrize(
    ("name", "asked"), [("llama", ""), ("bert", ""), ("gpt_neox", ""), ("llama", RESIDUAL)], ids=str
)
def test_on_a_gpu_it_computes_what_the_stock_model_computes(
    name: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, keywords = tiny_model(name)
    exact = copy.deepcopy(model).to(DEVICE)
    keywords = {key: held.to(DEVICE) if isinstance(held, torch.Tensor) else held for key, held in keywords.items()}
    monkeypatch.setattr(backend, "minimum_elements", lambda *asked: 0)
    with fake_process_group(1):
        plan = tpplan.load_plan(f"version: 1\nextends: {name}{asked}")
        sharded = tpplan.parallelize(model.float(), plan, inputs=keywords)
        calls = counted(monkeypatch, on_shapes=False)
        ours, wanted = first_output(sharded(**keywords)), first_output(exact(**keywords))
        ours.square().sum().backward()
    wanted.square().sum().backward()
    assert set(calls) == MODELS[name] | ({"residual_rms_norm"} if asked else set())
    limit = 1000 * torch.finfo(torch.float32).eps  # of the largest: sums of some hundred terms, layer after layer
    assert float((ours - wanted).abs().max()) < limit * float(wanted.abs().max())
    gradients = {key: held.grad for key, held in exact.named_parameters()}
    scale = 1e-3 * max(float(held.abs().max()) for held in gradients.values() if held is not None)
    for key, held in sharded.named_parameters():
        expected = gradients[key]
        assert (held.grad is None) == (expected is None), key
        if held.grad is not None and expected is not None:
            error = (local_of(held.grad).double() - expected).abs().max()
            assert float(error) < limit * max(float(expected.abs().max()), scale), key


class Mlp(torch.nn.Module):
    """A norm, and a linear layer whose bias a kernel adds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.GELU()
        self.down = torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(self.norm(x))))


def parallelized(stock: torch.nn.Module) -> torch.nn.Module:
    plan = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
    with fake_process_group(1):
        return tpplan.parallelize(copy.deepcopy(stock), plan, inputs=(torch.zeros(3, 4, 16),))


def test_print_shows_the_kernels() -> None:
    text = str(parallelized(Mlp()))
    assert "kernel=layer_norm" in text and "kernel=bias_gelu" in text


def test_another_dtype_is_proved_for_itself_and_loses_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = Mlp()
    model = parallelized(stock).double()
    calls = counted(monkeypatch, on_shapes=False)  # the call's proof is rehearsed
    x = torch.randn(3, 4, 16, dtype=torch.float64, device=DEVICE)
    torch.testing.assert_close(model(x), stock.double().to(DEVICE)(x), rtol=1e-12, atol=1e-12)
    assert not calls["layer_norm"]  # which doesn't take float64
