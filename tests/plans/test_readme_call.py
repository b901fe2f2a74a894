"""README's call, as it is printed there, for every shipped plan: without a mesh or inputs, and a step of training."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.marking import sweep_but
from tests.models.tiny import tiny_model
from tests.plans.parity import PLANS, tolerance
from tests.plans.test_others import OTHERS
from tests.runtime.world import Member, world
from tests.zoo.architectures import ARCHITECTURES, VOCABULARY, model_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]

OF_PLANS = {
    "falcon": "falcon_new",
    "falcon-multi-query": "falcon_old",
}
# Those that tests/plans/test_others.py tries are called with more than is made up here.
NAMES = sorted(path.stem for path in PLANS.glob("*.yaml") if path.stem.removesuffix("-sequence") not in OTHERS)
# Sequences, key and value heads fewer than ranks, packs, two streams.
SOME = [("llama-sequence", 4), ("phi3", 4), ("bart-sequence", 2), ("gpt_bigcode", 4)]
COARSE = tolerance(torch.float32)


def _subject(plan: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The stock model without dropout, and a call with numbers."""
    name = plan.removesuffix("-sequence")
    if name == "torch_transformer":
        return tiny_model(name)
    held = ARCHITECTURES[OF_PLANS.get(name, name)]
    torch.manual_seed(0)
    off = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model = model_of(dataclasses.replace(held, settings=held.settings | off) if held.kind else held)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    call: dict[str, Tensor] = {}
    for key, value in held.inputs().items():
        if value.is_floating_point():
            call[key] = torch.randn(value.shape)
        elif "mask" in key:
            call[key] = torch.ones(value.shape, dtype=value.dtype)
        else:
            call[key] = torch.randint(2, VOCABULARY, value.shape)
    takes = inspect.signature(model.forward).parameters
    if "labels" in takes and "input_ids" in call and "decoder_input_ids" not in call:
        call["labels"] = call["input_ids"]
    return model.train(), call


def _loss(result: Any) -> Tensor:
    if getattr(result, "loss", None) is not None:
        return result.loss
    return (result if isinstance(result, Tensor) else result[0]).float().square().mean()


def _trains(member: Member, plan: str) -> str:
    stock, call = _subject(plan)
    # A model outside of transformers needs an example of its inputs.
    inputs = None if hasattr(stock, "config") else call
    model = tpplan.parallelize(copy.deepcopy(stock), PLANS / f"{plan}.yaml", inputs=inputs)
    told: list[list[float]] = []
    for held in (stock, model):
        optimizer = torch.optim.SGD(held.parameters(), lr=0.01)
        loss = _loss(held(**call))
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(held.parameters(), 1.0)
        optimizer.step()
        after = _loss(held(**call))
        told.append([float(loss), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm), float(after)])
    expected, ours = told
    close = all(math.isclose(a, b, rel_tol=COARSE) for a, b in zip(expected, ours, strict=True))
    return "" if close else f"{plan}: {ours} instead of {expected}"


@pytest.mark.parametrize(("plan", "size"), sweep_but(SOME, [(plan, size) for plan in NAMES for size in (2, 4)]))
def test_the_call_trains_as_the_stock_model(plan: str, size: int) -> None:
    assert not any(world(size).run(_trains, plan))
