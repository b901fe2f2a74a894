"""TPPLAN_DEBUG=1: ranks that do different things, or have different values, are told so, each of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

import tpplan
from tests.marking import slow_but
from tests.runtime.test_recompute import PLANS, direct, reentrant, shown, stack, step, worst, x
from tests.runtime.world import Member, world

Break = Callable[[int, nn.Module], object]


def watched(member: Member, plan: str, **options: Any) -> nn.Module:
    mesh = member.mesh(1, member.size, names=("dp", "tp"))
    with mock.patch.dict(os.environ, {"TPPLAN_DEBUG": "1"}):
        return tpplan.parallelize(stack(**options), {"version": 1, "modules": PLANS[plan]}, mesh["tp"], (x(),))


def cut_by_layers(member: Member, model: nn.Module) -> None:
    mesh = member.mesh(1, member.size, names=("dp", "tp"))["dp"]
    for layer in (*model.get_submodule("layers").children(), model):
        fully_shard(layer, mesh=mesh)


def other_batch(rank: int, model: nn.Module) -> None:
    model(x() + rank)


def other_size(rank: int, model: nn.Module) -> None:
    model(x(8 - 2 * rank))


def other_mode(rank: int, model: nn.Module) -> None:
    model.train(rank == 0)
    model(x())


def other_gradients(rank: int, model: nn.Module) -> None:
    with torch.set_grad_enabled(rank == 0):
        model(x())


def extra_forward(rank: int, model: nn.Module) -> None:
    made = model(x())
    if rank == 0:
        model(x())
    made.sum().backward()


def extra_backward(rank: int, model: nn.Module) -> None:
    made = model(x())
    if rank == 0:
        made.sum().backward()
    model(x())


def other_norm(rank: int, model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("layers.1.norm.weight").to_local().add_(rank)  # pyright: ignore
    model(x())


def other_gradient(rank: int, model: nn.Module) -> None:
    made = model(x())
    made.backward(torch.full_like(made, 1.0 + rank))


def called_again(rank: int, model: nn.Module) -> None:
    """All ranks run a part once more, of which the program has no trace."""
    layer = model.get_submodule("layers.0.body.down")
    stock = type(layer).forward
    layer.__dict__["forward"] = lambda x: (stock(layer, x), stock(layer, x))[1]  # pyright: ignore
    model(x())


def new_kind(rank: int, model: nn.Module) -> None:
    """A setting that changed on one rank has it prove its next call anew."""
    if rank:
        model.get_submodule("layers.0.norm").__dict__["eps"] = 1e-3
        model.get_submodule("layers.0.norm").eps = 1e-2  # pyright: ignore
    model(x())


BREAKS: dict[str, tuple[Break, str]] = {
    "another batch": (other_batch, "were called with different arguments: `x` has different numbers"),
    "another size": (
        other_size,
        "`x` is float64(2, 8, 16) that requires grad and float64(2, 6, 16) that requires grad",
    ),
    "another mode": (other_mode, "`training` is True and False"),
    "without gradients": (other_gradients, "`the recording of gradients` is on and off"),
    "an extra forward": (
        extra_forward,
        "TP177 out-of-step: the ranks of the axis do different things: rank 0 is at call 3 of the model, and rank 1 at",
    ),
    "an extra backward": (extra_backward, "and rank 1 at call 3 of the model"),
    "another norm": (other_norm, "TP178 wrong-placement: "),
    "another gradient": (other_gradient, "TP178 wrong-placement: the gradient of the result of `layers.2`"),
    "more collectives": (called_again, "TP179 other-collectives: call 2"),
    "a new kind": (new_kind, "the ranks' comparison of a call of a new kind"),
}


def broken(member: Member, plan: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, (act, _) in BREAKS.items():
        model = watched(member, plan)
        model(x())
        try:
            act(member.rank, model)
        except tpplan.TpplanError as error:
            found[name] = str(error)
    return found


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("plan", slow_but(["tensor"], ["tensor", "sequence"]))
def test_ranks_that_part_are_told_so(plan: str) -> None:
    for seen in world(2).run(broken, plan, seconds=120):
        for name, (_, text) in BREAKS.items():
            if (name, plan) == ("another norm", "sequence"):
                continue  # only what has been summed differs there
            assert text in seen.get(name, "nothing"), f"{name}: {seen.get(name)}"
            assert "\n  help: " in seen[name]


def sound(member: Member, plan: str) -> dict[str, float]:
    errors: dict[str, float] = {}
    ways: dict[str, dict[str, Any]] = {"plain": {}, "checkpointed": {"run": direct}, "reentrant": {"run": reentrant}}
    for name, options in {**ways, "cut": {}}.items():
        model, stock = watched(member, plan, **options), stack(**options)
        if name == "cut":
            cut_by_layers(member, model)
        for again in range(3):
            errors[f"{name} {again}"] = worst(shown(model, step), shown(stock, step))
        model.eval()
        with torch.no_grad():
            errors[f"{name}, odd"] = float((model(x(5)) - stock.eval()(x(5))).abs().max())
            with FlopCounterMode(display=False):  # sees one forward, of a call that runs twice
                errors[f"{name}, seen"] = float((model(x()) - stock(x())).abs().max())
    return errors


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("plan", slow_but(["sequence"], ["tensor", "sequence"]))
def test_a_watched_loop_is_the_same_loop(plan: str) -> None:
    for errors in world(2).run(sound, plan, seconds=120):
        assert {name: error for name, error in errors.items() if not error < 1e-11} == {}
