"""Modules that a model calls several times: in a loop, with and without gradients, from several places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.marking import in_turns
from tests.runtime.world import Member, world
from tpplan.parity.verification import verify_program
from tpplan.suggest import search

WIDTH, INNER = 16, 32
CELL = {"cell.up": "colwise", "cell.down": "rowwise"}
STREAM = {**CELL, "norm": "sequence"}


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Loop(nn.Module):
    """The first call reads the model's input, which has no gradient; later ones read results."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm, self.out = Cell(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.cell(self.norm(x))
        return self.out(x)


class Bare(Loop):
    """The layers themselves are called by the model."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.cell.down(self.cell.up(x).tanh())
        return self.out(x)


class Equilibrium(Loop):
    """Only the last of several steps has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(3):
                x = x + self.cell(self.norm(x))
        return self.out(x + self.cell(self.norm(x)))


class Frozen(Loop):
    """What the first call makes has no gradient, either."""

    def __init__(self) -> None:
        super().__init__()
        self.cell.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(self.out(self.cell(x)))


class Tree(nn.Module):
    """Inputs in a dict, and one pair of layers for both."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x = self.cell.down(self.cell.up(batch["x"]).relu())
        return {"x": self.cell.down(self.cell.up(x + batch["y"]).relu())}


class Scaled(nn.Module):
    def forward(self, x: Tensor, scaled: bool = False) -> Tensor:
        return x.relu() / x.shape[-1] if scaled else x.relu()


class Again(Loop):
    """A module that equal blocks call is called once more, in another way, by a number of its input's."""

    def __init__(self) -> None:
        super().__init__()
        self.act = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for _ in range(3):
            x = x + self.cell(x)
        return self.cell.down(self.act(self.cell.up(x), True))


class Block(Cell):
    def __init__(self) -> None:
        super().__init__()
        self.act = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class AgainInside(Again):
    """The blocks that are like the first aren't looked at again; the call after them is."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for _ in range(3):
            x = self.cell(x)
        return self.cell.down(self.cell.act(self.cell.up(x), True))


class Checkpointed(Loop):
    """The first run has no gradient, and the second, in the backward, has."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.out(x)
        for _ in range(2):
            x = x + checkpoint(lambda y: self.cell(self.norm(y)), x, use_reentrant=True)
        return self.out(x)


class Recursive(Loop):
    """The model calls itself."""

    def forward(self, x: Tensor, more: int = 2) -> Tensor:
        return self(x + self(self.cell(self.norm(x)), 0), more - 1) if more else self.out(x)


class RecursiveAgain(Loop):
    """What a checkpoint recomputes calls the model, in which a checkpoint calls it."""

    def forward(self, x: Tensor, more: int = 2) -> Tensor:
        if not more:
            return self.out(x)
        return checkpoint(self, self.out(x) + self.cell(self.norm(x)), more - 1, use_reentrant=True)


KINDS: dict[Callable[[], nn.Module], dict[str, Any]] = {
    Loop: CELL, Bare: CELL, Equilibrium: CELL, Frozen: CELL, Tree: CELL, Again: CELL, AgainInside: CELL,
    Recursive: CELL,
}  # fmt: skip
CASES = [*KINDS.items(), (Equilibrium, STREAM), (Checkpointed, CELL), (Checkpointed, STREAM), (RecursiveAgain, CELL)]


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def call_of(kind: Callable[[], nn.Module], seed: int = 1, wants_gradient: bool = False) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(2, 8, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    x.requires_grad_(wants_gradient)
    return ({"x": x, "y": y},) if kind is Tree else (x,)


def plan_of(rules: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "modules": rules}


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("case", "way"), in_turns(CASES, [(2, False), (2, True), (4, False)]))
def test_calls_of_one_module_are_right(
    case: tuple[Callable[[], nn.Module], dict[str, Any]], way: tuple[int, bool]
) -> None:
    (kind, rules), (tp, wants_gradient) = case, way
    report = tpplan.verify(made(kind), plan_of(rules), tp, call_of(kind, wants_gradient=wants_gradient))
    assert report.ok, report.problems
    if kind in (Checkpointed, RecursiveAgain):  # what runs again sends again
        return
    if kind is not Equilibrium or not wants_gradient:  # its input gets none: all that reads it is under `no_grad`
        assert report.collectives == report.predicted


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", [Loop, Bare, Tree])
def test_suggested_plans_split_them(kind: Callable[[], nn.Module], tp: int) -> None:
    model = made(kind)
    found = search(model, tp, call_of(kind), {}, False)
    assert CELL.keys() <= found.settings.keys()
    assert verify_program(model, found.program, (call_of(kind), {})).ok


def test_a_program_says_in_how_many_calls_nothing_comes_back() -> None:
    program = tpplan.compile_plan(made(Loop), plan_of(CELL), 2, call_of(Loop))
    counted = [program.count_collectives(backward=way)["all-reduce"] for way in (False, True)]
    assert counted == [3, 3 + 3]  # the norm's parameters want a gradient in each call
    bare = tpplan.compile_plan(made(Bare), plan_of(CELL), 2, call_of(Bare))
    assert [bare.count_collectives(backward=way)["all-reduce"] for way in (False, True)] == [3, 3 + 2]
    again = tpplan.Program.from_dict(bare.to_dict())
    assert again.digest == bare.digest and again.count_collectives() == bare.count_collectives()


def _trained(member: Member) -> list[dict[str, Tensor]]:
    """Of each, the weights after some steps."""
    found: list[dict[str, Tensor]] = []
    for kind, rules in CASES:
        model = made(kind)
        if member.size > 1:
            model = tpplan.parallelize(model, plan_of(rules), member.mesh(), call_of(kind))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            optimizer.zero_grad()
            result = model(*call_of(kind, seed))
            (result["x"] if isinstance(result, dict) else result).square().mean().backward()
            optimizer.step()
        whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
        found.append({name: weight.detach().clone() for name, weight in whole.items()})
    return found


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_on_processes(tp: int) -> None:
    (expected,) = world(1).run(_trained)
    for found in world(tp).run(_trained):
        for weights, mine in zip(expected, found, strict=True):
            for name, weight in weights.items():
                torch.testing.assert_close(mine[name], weight, rtol=1e-10, atol=1e-12)
