"""Gradients that the example's call had none of: of an input, of a table, of parameters that are thawed later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import tpplan
from tests.runtime.simulated import on_ranks, plan_of, worst
from tpplan.calls.proofs import covers
from tpplan.compiler.pipeline import Compiled, compile_call
from tpplan.compiler.request import Request
from tpplan.plan import CompileError

TOLERANCE = 1e-12
HIDDEN, WIDTH, IDS = 8, 16, torch.arange(16).view(2, 8) % 12
PLAIN = {"block.up": "colwise", "block.down": "rowwise"}
SEQUENCE = {"block.norm": "sequence", **PLAIN}
RULES = {"plain": PLAIN, "whole": {"block.norm": "replicate", **PLAIN}, "sequence": SEQUENCE}


class Block(nn.Module):
    """That of the README."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class OfStates(nn.Module):
    """A block that is given its states."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class OfIds(OfStates):
    """One behind a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(12, HIDDEN), nn.Parameter(torch.randn(8, HIDDEN))

    def forward(self, ids: Tensor) -> Tensor:
        return self.block(self.table(ids) + self.positions)


def built(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def states(wanted: bool, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(2, 8, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_(wanted),), {}


def set_wanted(wanted: bool, *names: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.startswith(names):
                parameter.requires_grad_(wanted)

    return change


@pytest.mark.one_in(9)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("order", [(False, True, False), (True, False, True)], ids=["without", "with"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_an_input_may_have_a_gradient_or_none(
    rules: dict[str, Any], tp: int, order: tuple[bool, ...], trained: bool
) -> None:
    stock = built(OfStates).requires_grad_(trained)
    calls = [states(wanted) for wanted in order]
    for example in (False, True):
        assert max(worst(stock, rules, tp, states(example, 2), calls)) < TOLERANCE


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_a_call_without_gradients_may_come_first(rules: dict[str, Any]) -> None:
    def unrecorded(model: nn.Module) -> None:
        with torch.no_grad():
            model(*states(True)[0])

    calls = [unrecorded, states(True), unrecorded, states(False)]
    assert max(worst(built(OfStates), rules, 2, states(False), calls)) < TOLERANCE


@pytest.mark.parametrize("rules", [SEQUENCE, {"table": "vocab", **SEQUENCE}, PLAIN], ids=["sequence", "vocab", "plain"])
@pytest.mark.parametrize("names", [("table", "positions"), ("block.norm",), ("",)], ids=["table", "norm", "all"])
@pytest.mark.one_in(5)
def test_parameters_may_be_thawed_and_frozen(rules: dict[str, Any], names: tuple[str, ...]) -> None:
    stock, call = built(OfIds), ((IDS,), {})
    set_wanted(False, *names)(stock)
    thaw, freeze = set_wanted(True, *names), set_wanted(False, *names)
    calls = [call, set_wanted(True, names[0]), call, thaw, call, freeze, call, thaw, call]
    assert max(worst(stock, rules, 2, call, calls)) < TOLERANCE


def test_a_gradient_that_only_one_program_sends_back_is_no_small_difference() -> None:
    def compiled(wanted: bool) -> Compiled:
        return compile_call(Request(built(OfStates), plan_of(SEQUENCE), 2, *states(wanted)))

    without, with_gradient = compiled(False), compiled(True)
    program = with_gradient.program
    assert covers(program, without) and not covers(without.program, with_gradient)
    assert not covers(program, replace(with_gradient, program=replace(program, takes_gradients=True)))
    frozen = tuple(replace(p, trainable=False) for p in program.parameters if not p.summed)
    rest = tuple(p for p in program.parameters if p.summed)
    assert not covers(replace(program, parameters=(*frozen, *rest)), with_gradient)


class WithConstants(Block):
    """A block with tensors that aren't parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.full((), 2.0, dtype=torch.float64)
        self.register_buffer("shift", torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return self.shift + self.down(torch.relu(self.up(self.norm(x))) * self.scale)


@pytest.mark.parametrize("name", ["scale", "shift"])
def test_what_is_no_parameter_has_no_gradient(name: str) -> None:
    stock = built(WithConstants)
    rules = {"up": "colwise", "down": "rowwise"}

    def work(own: nn.Module, _: object) -> str:
        own(*states(False)[0])
        getattr(own, name).requires_grad_()
        with pytest.raises(tpplan.UnprovedCallError) as raised:
            own(*states(False)[0])
        return str(raised.value)

    for message in on_ranks(stock, rules, 2, states(False), work):
        assert message.startswith(f"TP130 changed-model: `{name}` requires grad, and isn't a parameter")
    wanted = copy.deepcopy(stock)
    getattr(wanted, name).requires_grad_()
    with pytest.raises(CompileError, match=rf"TP112 [^\n]*`{name}` requires grad, and isn't a parameter"):
        compile_call(Request(wanted, plan_of(rules), 2, *states(False)))


def test_forward_mode_is_refused_with_and_without_recording() -> None:
    def work(model: Any, _: Any) -> None:
        for recorded in (True, False):
            with torch.set_grad_enabled(recorded), forward_ad.dual_level():
                x = torch.randn(2, 8, HIDDEN, dtype=torch.float64)
                with pytest.raises(tpplan.UnprovedCallError, match="forward_ad"):
                    model(forward_ad.make_dual(x, x))

    torch.manual_seed(0)
    on_ranks(OfStates().double(), PLAIN, 1, ((torch.randn(2, 8, HIDDEN, dtype=torch.float64),), {}), work)
