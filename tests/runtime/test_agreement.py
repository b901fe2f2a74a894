"""Ranks agree on a program before any of them changes its model; if they can't, all of them say so, and none waits."""

from __future__ import annotations

import pytest
import torch

import tpplan
from tests.compiler.test_digest import KINDS, RULES, Draws, Exchanges, Masks, Ordered, Sums
from tests.compiler.toys import X
from tests.models.tiny import tiny_model
from tests.plans.parity import PLANS
from tests.runtime.world import Member, world

pytestmark = pytest.mark.processes


def refusal(member: Member, plan: object, **settings: object) -> tuple[str, str, bool]:
    """The error's class, its text, and whether the model is still the stock one."""
    model, keywords = tiny_model("torch_transformer", **settings)  # pyright: ignore
    before = dict(model.state_dict())
    try:
        tpplan.parallelize(model, plan, member.mesh(), keywords)  # pyright: ignore
    except Exception as error:
        after = model.state_dict()
        untouched = list(before) == list(after) and all(torch.equal(before[name], after[name]) for name in before)
        return type(error).__name__, str(error), untouched
    return "", "", False


def _other_plan(member: Member) -> tuple[str, str, bool]:
    name = "torch_transformer" if member.rank == 0 else "torch_transformer-sequence"
    return refusal(member, PLANS / f"{name}.yaml")


def _one_cannot_compile(member: Member) -> tuple[str, str, bool]:
    nowhere = {"version": 1, "modules": {"**": "vocab"}}
    return refusal(member, PLANS / "torch_transformer.yaml" if member.rank == 0 else nowhere)


def _one_has_no_plan(member: Member) -> tuple[str, str, bool]:
    return refusal(member, PLANS / ("torch_transformer.yaml" if member.rank == 0 else "nowhere.yaml"))


def _one_has_other_inputs(member: Member) -> tuple[str, str, bool]:
    model, keywords = tiny_model("torch_transformer")
    try:
        given = keywords if member.rank == 0 else {"ids": "no tensor"}
        tpplan.parallelize(model, PLANS / "torch_transformer.yaml", member.mesh(), given)
    except Exception as error:
        return type(error).__name__, str(error), True
    return "", "", False


def test_ranks_with_different_plans_all_raise() -> None:
    for kind, text, untouched in world(2).run(_other_plan, seconds=60):
        assert kind == "CompileError" and "TP116" in text and "different programs" in text
        assert untouched


def test_where_one_rank_cannot_compile_the_others_say_which_and_why() -> None:
    (kind, text, untouched), (own, reason, also) = world(2).run(_one_cannot_compile, seconds=60)
    assert kind == own == "CompileError"
    assert "TP116" in text and "rank 1" in text
    assert "TP116" not in reason and reason.splitlines()[0].split(": ", 1)[-1] in text
    assert untouched and also


@pytest.mark.parametrize("work", [_one_has_no_plan, _one_has_other_inputs])
def test_whatever_one_rank_fails_with_the_others_do_not_wait_for_it(work: object) -> None:
    (kind, text, _), (own, _, _) = world(2).run(work, seconds=60)  # pyright: ignore
    assert kind == "CompileError" and "TP116" in text and "rank 1" in text
    assert own


def _in_an_order_of_its_own(member: Member, kind: type[Ordered]) -> tuple[str, bool]:
    """The error's text; or whether each rank has what the stock model computes, and its gradient."""
    order = KINDS if member.rank == 0 else KINDS[::-1]
    models = [kind(order).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    calls = [torch.randn(X, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    calls[1].data.copy_(calls[0].data)
    try:
        tpplan.parallelize(models[0], {"version": 1, "modules": RULES}, member.mesh(), (calls[0],))
    except tpplan.CompileError as error:
        return str(error), False
    results = [model(call) for model, call in zip(models, calls, strict=True)]
    for result in results:
        result.square().sum().backward()
    torch.testing.assert_close(*results)
    torch.testing.assert_close(calls[0].grad, calls[1].grad)
    return "", True


def test_ranks_that_make_masks_in_another_order_compute_what_the_model_does() -> None:
    assert world(2).run(_in_an_order_of_its_own, Masks, seconds=60) == [("", True)] * 2


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        (
            Exchanges,
            "rank 0 comes to the results of `mlps.full.down`, and rank 1 to the results of `mlps.chunked.down`",
        ),
        (Draws, "what they exchange is the same"),
        (Sums, "what they exchange is the same"),
    ],
)
def test_ranks_that_would_exchange_in_another_order_are_told_of_sets(kind: type[Ordered], where: str) -> None:
    for text, _ in world(2).run(_in_an_order_of_its_own, kind, seconds=60):
        assert text.startswith("TP116") and "in another order" in text and "PYTHONHASHSEED" in text and where in text
