"""Ranks agree on a program before any of them changes its model; if they can't, all of them say so, and none waits."""

from __future__ import annotations

import pytest
import torch

import tpplan
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
