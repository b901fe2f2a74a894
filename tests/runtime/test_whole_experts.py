"""Whole experts on processes: training, clipping, checkpoints, and tokens that are generated with a cache."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import tpplan
from tests.marking import in_turns, slow_but
from tests.parity.test_expert_groups import INSIDE
from tests.parity.test_expert_groups import Block as GroupBlock
from tests.parity.test_expert_lists import Block as ListBlock
from tests.parity.test_split_stacks import INSIDE as INSIDE_STACKS
from tests.parity.test_split_stacks import Block as StackBlock
from tests.parity.test_whole_experts import PLAN, SEQUENCE, Block, of_grouped
from tests.runtime.test_decode import BATCH, LENGTH, generating, made, simulated
from tests.runtime.world import Member, world
from tests.zoo.architectures import VOCABULARY, build

WIDTH = 16
MAKERS: dict[str, Callable[[], nn.Module]] = {
    "stack": lambda: Block(of_grouped),
    "list": ListBlock,
    "split list": lambda: GroupBlock(2),
    "split stack": StackBlock,
}
SPLIT: dict[str, dict[str, Any]] = {"split list": INSIDE, "split stack": INSIDE_STACKS}  # by kind, the rules inside
PLANS: dict[str, dict[str, Any]] = {"tp": PLAN, "sequence": SEQUENCE}
CASES = [(kind, plan, size) for kind in MAKERS for plan in PLANS for size in (2, 4)]


def plan_of(kind: str, plan: str) -> dict[str, Any]:
    return {"version": 1, "modules": {**PLANS[plan]["modules"], **SPLIT.get(kind, {})}}


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MAKERS[kind]()


def inputs(step: int) -> Tensor:
    return torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(step))


def trained(model: nn.Module) -> list[tuple[float, float]]:
    """The loss and the norm of gradients in each of three steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[tuple[float, float]] = []
    for step in range(3):
        loss = model(inputs(step)).sin().mean() + model(inputs(step)[:2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        found.append((float(loss.detach()), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)))
    return found


def train_and_save(member: Member, kind: str, plan: str, folder: str) -> tuple[list[tuple[float, float]], bool]:
    """The steps of training; whether a model that is loaded from what was saved returns the same numbers."""
    model = tpplan.parallelize(model_of(kind), plan_of(kind, plan), member.mesh(), (inputs(0),))
    steps = trained(model)
    tpplan.save_weights(model, folder)
    other = tpplan.parallelize(MAKERS[kind](), plan_of(kind, plan), member.mesh(), (inputs(0),))
    tpplan.load_weights(other, folder)
    with torch.no_grad():
        return steps, torch.equal(model(inputs(9)), other(inputs(9)))


@pytest.mark.one_in(6)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "plan", "size"),
    slow_but(
        [("stack", "tp", 2), ("list", "sequence", 2), ("split list", "tp", 4), ("split stack", "sequence", 4)], CASES
    ),
)
def test_training_and_checkpoints_are_those_of_the_unsharded_model(kind: str, plan: str, size: int) -> None:
    stock = model_of(kind)
    expected = torch.tensor(trained(stock))
    with tempfile.TemporaryDirectory() as folder:
        results = world(size).run(train_and_save, kind, plan, folder)
        saved = load_file(Path(folder) / "model.safetensors")
    for steps, same in results:
        torch.testing.assert_close(torch.tensor(steps), expected, rtol=1e-5, atol=1e-6)
        assert same
    assert saved.keys() == stock.state_dict().keys()
    for name, tensor in stock.state_dict().items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-4, atol=2e-5)


def evaluated(member: Member, kind: str) -> list[Tensor]:
    """What calls of other sizes return where no gradient is recorded, and the parameters as a whole."""
    model = tpplan.parallelize(model_of(kind), plan_of(kind, "tp"), member.mesh(), (inputs(0),)).eval()
    with torch.no_grad():
        made = [model(inputs(step)[: step + 1]) for step in (0, 1, 2, 1)]
    held: Any = model.state_dict()
    return [*made, *(tensor.full_tensor() for tensor in held.values())]


@pytest.mark.processes
@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.one_in(3)
def test_experts_that_are_split_inside_are_evaluated(kind: str) -> None:
    stock = model_of(kind).eval()
    with torch.no_grad():
        expected = [*(stock(inputs(step)[: step + 1]) for step in (0, 1, 2, 1)), *stock.state_dict().values()]
    for returned in world(4).run(evaluated, kind):
        for found, wanted in zip(returned, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
@pytest.mark.sweep
def test_other_bodies_of_the_experts_generate_the_same(implementation: str) -> None:
    """In the loop over the experts that are hit, each rank calls its own."""
    stock = made("mixtral")
    stock.config._experts_implementation = implementation
    ids = torch.randint(4, VOCABULARY, (BATCH, LENGTH + 2), generator=torch.Generator().manual_seed(1))
    expected = generating(stock, ids)
    for steps in simulated(stock, "mixtral-experts", ids):
        for step, logits in zip(steps, expected, strict=True):
            assert float((step.logits - logits).abs().max()) < 1e-5 * float(logits.abs().max())
        assert [step.counts for step in steps] == [step.predicted for step in steps]


@pytest.mark.parametrize(("implementation", "size"), in_turns(["eager", "batched_mm"], [2, 4], quick=1))
def test_other_bodies_of_the_experts_train_the_same(implementation: str, size: int) -> None:
    stock, call = build("mixtral")
    config: Any = stock.config
    config._experts_implementation = implementation
    report = tpplan.verify(stock, "mixtral-experts-sequence", size, call)
    assert report.ok, report.problems


@pytest.mark.parametrize("form", ["", "-sequence"])
@pytest.mark.sweep
def test_a_token_costs_as_much_as_with_experts_that_are_split(form: str) -> None:
    stock = made("mixtral").float()  # torch has no grouped products in float64
    ids = torch.randint(4, VOCABULARY, (BATCH, LENGTH + 2), generator=torch.Generator().manual_seed(1))
    expected = generating(stock, ids)
    for steps in simulated(stock, f"mixtral-experts{form}", ids):
        for step, logits in zip(steps, expected, strict=True):
            assert float((step.logits - logits).abs().max()) < 1e-5 * float(logits.abs().max())
        assert [step.counts for step in steps] == [step.predicted for step in steps]
        for token in steps[1:]:
            assert token.counts["all-reduce"] <= 2 * stock.config.num_hidden_layers + 1
            assert set(token.counts) <= {"all-reduce", "all-gather"}


def copied(member: Member, kind: str) -> dict[str, Tensor]:
    """The gradients of a copy of a sharded model, of which some experts are elsewhere."""
    model = copy.deepcopy(tpplan.parallelize(model_of(kind), plan_of(kind, "tp"), member.mesh(), (inputs(0),)))
    model(inputs(1)).sin().sum().backward()
    gradients: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: held.full_tensor() for name, held in gradients.items() if held is not None}


@pytest.mark.one_in(3)
@pytest.mark.processes
@pytest.mark.parametrize("kind", MAKERS)
def test_a_copy_has_its_own_gradients(kind: str) -> None:
    stock = model_of(kind)
    stock(inputs(1)).sin().sum().backward()
    expected = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    for gradients in world(4 if kind in SPLIT else 2).run(copied, kind):
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
