"""Tokens that go to the ranks with their experts, on processes: other calls, recomputation, dtypes, watched ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.marking import in_thirds
from tests.parity.test_dispatch import PLAN, choosing
from tests.parity.test_whole_experts import WIDTH, Block, Experts, gated, of_picked
from tests.runtime.world import Member, world


def made(choices: int = 2) -> Block:
    torch.manual_seed(0)
    return Block(of_picked, choices)


def tokens(batch: int = 3, length: int = 8) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(batch + length))


def stepped(model: nn.Module, call: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> dict[str, Tensor]:
    """The result, and the gradients of the input and of all parameters."""
    call = call.clone().requires_grad_()
    model.zero_grad()
    result = run(model, call)
    result.float().sin().sum().backward()
    found: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
    whole = {name: held.full_tensor() if hasattr(held, "full_tensor") else held for name, held in found.items()}
    assert call.grad is not None
    given = {name: held for name, held in whole.items() if held is not None}
    return {"result": result.detach(), "input": call.grad, **given}


def worst(ours: dict[str, Tensor], stock: dict[str, Tensor]) -> float:
    """The largest difference, of each tensor's largest number."""
    assert ours.keys() == stock.keys()
    pairs = ((ours[name].double(), held.double()) for name, held in stock.items())
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-6)) for a, b in pairs)


def plainly(model: nn.Module, call: Tensor) -> Tensor:
    return model(call)


def cast(model: nn.Module, call: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(call)


def differing(member: Member, step: str, sizes: list[tuple[int, int]]) -> list[float]:
    """How far steps are from those of the stock model, for calls of these batches and lengths."""
    stock = made()
    if step == "to one rank":
        choosing(stock, 2, 3)
    model = tpplan.parallelize(copy.deepcopy(stock), PLAN, member.mesh(), (tokens().requires_grad_(),))
    if step == "compiled":
        model.compile(backend="aot_eager")
    run = cast if step == "autocast" else plainly
    return [worst(stepped(model, tokens(*n), run), stepped(stock, tokens(*n), run)) for n in sizes]


_STEPS = ["plain", "to one rank", "autocast", "watched", "compiled"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("step", "size"),
    in_thirds(
        [("plain", 2), ("to one rank", 4)],
        [("compiled", 2), ("watched", 2), ("autocast", 4)],
        [(step, n) for step in _STEPS for n in (2, 4)],
    ),
)
def test_calls_of_other_sizes(step: str, size: int) -> None:
    """Of one sequence too, and of sequences that the ranks can't share."""
    sizes = [(3, 8), (2, 12), (1, 8), (3, 7), (3, 8)]
    debug = {"TPPLAN_DEBUG": "1"} if step == "watched" else {}
    for found in world(size).run(differing_under, debug, step, sizes):
        assert max(found) < (0.1 if step == "autocast" else 1e-5), found


def differing_under(member: Member, variables: dict[str, str], step: str, sizes: list[tuple[int, int]]) -> list[float]:
    with mock.patch.dict(os.environ, variables):
        return differing(member, step, sizes)


class Recomputing(nn.Module):
    """A mixture whose forward is run again in the backward."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)  # pyright: ignore


def recomputing(reentrant: bool) -> nn.Module:
    model: Any = choosing(made(), 0, 1)
    model.moe = Recomputing(model.moe, reentrant)
    return model


def recomputed(member: Member, reentrant: bool) -> float:
    stock = recomputing(reentrant)
    rules = {name.replace("moe.", "moe.inner."): rule for name, rule in PLAN["modules"].items()}
    call = (tokens().requires_grad_(),)
    model = tpplan.parallelize(copy.deepcopy(stock), {**PLAN, "modules": rules}, member.mesh(), call)
    return worst(stepped(model, tokens(), plainly), stepped(stock, tokens(), plainly))


@pytest.mark.processes
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_in_the_backward(reentrant: bool) -> None:
    """A rank to which nobody sends anything exchanges the sizes again as well."""
    assert max(world(2).run(recomputed, reentrant)) < 1e-5


def of_wide(self: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    numbers = chosen.reshape(-1)
    rows = tokens.repeat_interleave(chosen.shape[-1], dim=0)
    held = torch.bmm(rows.unsqueeze(1), self.up[numbers]).squeeze(1)
    held = torch.bmm(gated(held).unsqueeze(1), self.down[numbers]).squeeze(1)
    return (held * weights.reshape(-1, 1).to(tokens.dtype)).view(*chosen.shape, WIDTH).sum(1)


class Widened(Block):
    """Its router works in float32, whatever the tokens' dtype, so that rows of two dtypes are sent together."""

    def __init__(self) -> None:
        super().__init__(of_wide)
        self.bfloat16()
        self.moe.router.float()
        self.moe.router.register_forward_pre_hook(lambda _, given: (given[0].float(),))


def widened(member: Member) -> list[float]:
    torch.manual_seed(0)
    stock = Widened()
    call = tokens().bfloat16()
    model = tpplan.parallelize(copy.deepcopy(stock), PLAN, member.mesh(), (call.clone().requires_grad_(),))
    ours, theirs = stepped(model, call, plainly), stepped(stock, call, plainly)
    return [worst({name: ours[name]}, {name: held}) for name, held in theirs.items()]


@pytest.mark.processes
def test_weights_of_another_dtype_than_tokens() -> None:
    for found in world(2).run(widened):
        assert max(found) < 0.1, found


def differentiated(member: Member, options: dict[str, bool]) -> str:
    call = tokens().requires_grad_()
    model = tpplan.parallelize(made(), PLAN, member.mesh(), (call,))
    result = model(call)
    gradient = torch.ones((2 if "is_grads_batched" in options else 1, *result.shape), dtype=result.dtype)
    try:
        torch.autograd.grad(result, call, gradient if len(gradient) > 1 else gradient[0], **options)
    except tpplan.TpplanError as error:
        return str(error)
    return ""


@pytest.mark.processes
@pytest.mark.parametrize(("option", "code"), [("create_graph", "TP138"), ("is_grads_batched", "TP117")])
def test_second_derivatives_and_batches_of_gradients_are_refused(option: str, code: str) -> None:
    assert all(said.startswith(code) for said in world(2).run(differentiated, {option: True}))
