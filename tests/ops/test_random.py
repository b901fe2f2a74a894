"""Operators that draw random numbers: each rank draws those of its part, and all draw alike for what is whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tpplan
from tests.ops.operators import Between, define
from tests.runtime.world import Member, world

RULES: dict[str, Any] = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}


def drop(x: Tensor) -> tuple[Tensor, Tensor]:
    """A dropout of a half, and what it keeps."""
    kept = (torch.rand(x.shape, device=x.device) > 0.5).to(x.dtype)
    return 2 * x * kept, kept


dropped: Any = define(
    "dropped", "(Tensor x) -> (Tensor, Tensor)", drop, fake=lambda x: (torch.empty_like(x), torch.empty_like(x))
)


def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(output[1])


def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
    return 2 * gradient * ctx.saved_tensors[0]


torch.library.register_autograd("tests::dropped", backward, setup_context=setup)
tpplan.register_operator(dropped, "... -> ..., ...", random=True)
function = tpplan.operator("... -> ..., ...", random=True)(drop)


class Drops(Between):
    """Drops split features, and those of the stream, in one body."""

    def __init__(self, function: Any, stream: bool, before: bool = True) -> None:
        super().__init__(function)
        self.stream, self.before = stream, before

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        held = self.up(x)
        dropped, *kept = self.function(held) if self.before else (functional.dropout(held),)
        made = self.down(dropped)
        added, *others = self.function(made) if self.stream else (made,)
        return (x + added, *kept, *others)


def masks(member: Member, which: str, before: bool) -> Any:
    torch.manual_seed(0)
    made = torch.ops.tests.dropped if which == "operator" else function
    x = torch.randn(2, 6, 16)
    model: Any = tpplan.parallelize(Drops(made, True, before), RULES, member.mesh(), inputs=(x,))
    results = model(x)
    results[0].sum().backward()
    return [held.tolist() for held in results], model.down.bias.grad.tolist()


@pytest.mark.processes
@pytest.mark.parametrize("which", ["operator", "function"])
@pytest.mark.parametrize("before", [True, False])
def test_ranks_draw_their_own_parts(which: str, before: bool) -> None:
    ours, theirs = world(2).run(masks, which, before)
    assert ours == theirs  # the stream, all masks once they are gathered, and gradients
    _, *kept = map(torch.tensor, ours[0])
    if before:
        one, other = kept[0].chunk(2, -1)
        assert not torch.equal(one, other)
    assert kept[-1].unique().tolist() == [0, 1]


@pytest.mark.parametrize("function", [dropped, function])
def test_nothing_is_gathered_and_the_rule_is_assumed(function: Any) -> None:
    program = tpplan.compile_plan(Drops(function, False), RULES, 2, torch.zeros(2, 6, 16))
    assert program.count_collectives() == {"all-reduce": 1, "all-gather": 1}  # of the mask, which is a result
    (assumed,) = program.assumed
    assert "it draws random numbers, so that shapes alone were tried" in assumed
    (root,) = [module for module in program.modules if module.name == ""]
    assert root.random == "split"


def test_it_has_to_be_said() -> None:
    secret = tpplan.operator("... -> ..., ...")(drop)
    with pytest.raises(tpplan.OperatorRuleError, match=r"TP151.*and has no `random=True`"):
        tpplan.compile_plan(Drops(secret, False), RULES, 2, torch.zeros(2, 6, 16))


def test_trials_draw_nothing_from_the_callers_generator() -> None:
    model = Drops(dropped, True)
    before = torch.get_rng_state()
    tpplan.compile_plan(model, RULES, 2, torch.zeros(2, 5, 16))
    assert torch.equal(before, torch.get_rng_state())
