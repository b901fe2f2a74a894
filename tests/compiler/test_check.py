"""The run on local shapes sees what a placement can't: numbers that a body takes from shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.compiler.toys import HIDDEN, MLP, SEQUENCE, Block, Mlp, Normed, codes, compiled, plan_of, reshards, x_BSH
from tpplan.compiler.check.local_run import PassedCall, check
from tpplan.compiler.check.same_steps import CheckInput, Mismatch
from tpplan.compiler.ir.steps import Heard
from tpplan.compiler.pipeline import compile_call
from tpplan.compiler.request import Request
from tpplan.parity import verify_program


@pytest.fixture
def mismatches(monkeypatch: pytest.MonkeyPatch) -> list[Mismatch | None]:
    """What each check of a compilation found, in order."""
    found: list[Mismatch | None] = []

    def spying(given: CheckInput, *more: Any) -> Mismatch | PassedCall:
        checked = check(given, *more)
        found.append(checked if isinstance(checked, Mismatch) else None)
        return checked

    monkeypatch.setattr("tpplan.compiler.check.local_run.check", spying)
    return found


def after_norm(body: Callable[[Normed, Tensor, Tensor], Tensor]) -> nn.Module:
    class Module(Normed):
        def after(self, h: Tensor, x: Tensor) -> Tensor:
            return body(self, h, x)

    return Module()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda m, h, x: m.proj(h) / h.shape[1], "is called with 6 instead of 12"),
        (lambda m, h, x: m.proj(h) / torch.tensor(float(h.shape[1])), "constant with other values"),
        (lambda m, h, x: m.proj(h) + h.new_tensor([float(h.shape[1])]), "constant with other values"),
        (lambda m, h, x: m.proj(h) + x[:, h.shape[1] - 12 :].sum(), "runs aten.slice.Tensor"),
        (lambda m, h, x: torch.roll(x, h.shape[1] // 2, 1) + m.proj(h).sum(), "is called with"),
        (lambda m, h, x: m.proj(h) * torch.arange(h.shape[1], device=h.device)[:, None], "arange"),
    ],
)
def test_a_number_from_a_local_shape_is_seen(body: Any, reason: str, mismatches: list[Mismatch | None]) -> None:
    program = compiled(after_norm(body), SEQUENCE)
    assert mismatches[0] is not None and reason in mismatches[0].reason
    assert mismatches[-1] is None
    assert "norm (): S(1) -> R" in reshards(program)


def test_another_turn_on_a_local_shape_is_seen(mismatches: list[Mismatch | None]) -> None:
    program = compiled(after_norm(lambda m, h, x: m.proj(h) if h.shape[1] > 6 else m.proj(h).relu()), SEQUENCE)
    assert mismatches[0] is not None
    assert "norm (): S(1) -> R" in reshards(program)


def test_a_call_that_whole_shapes_do_not_make_is_seen() -> None:
    with pytest.raises(tpplan.CompileError) as raised:
        compiled(after_norm(lambda m, h, x: m.proj(m.proj(h) if h.shape[1] < 12 else h)), SEQUENCE)
    assert codes(raised.value) == ["TP107"]


def test_a_program_that_passes_is_checked_once(mismatches: list[Mismatch | None]) -> None:
    compiled(nn.Sequential(*(Block(Mlp()) for _ in range(4))), {f"*.body.{k}": v for k, v in MLP.items()})
    assert mismatches == [None]


def test_a_layer_of_another_class_is_not_taken_for_an_equal_one() -> None:
    """The two trace alike, but only one of them counts by a literal."""

    class Counts(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            return self.down(h.view(*h.shape[:-1], -1, 8).flatten(2))

    class Literal(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            return self.down(h.view(*h.shape[:-1], 4, 8).flatten(2))

    class Flagged(Mlp):
        def __init__(self, literal: bool) -> None:
            super().__init__()
            self.literal = literal

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            heads = 4 if self.literal else h.shape[-1] // 8
            return self.down(h.view(*h.shape[:-1], heads, 8).flatten(2))

    rules = {f"*.{k}": v for k, v in MLP.items()}
    for good, bad in ((Counts(), Literal()), (Flagged(False), Flagged(True))):
        program = compiled(nn.Sequential(good, bad), rules)
        recorded = [module.name for module in program.modules if module.recorded is not None]
        assert "1" in recorded, "the second can't run its own code on columns"
        assert "0" not in recorded or type(good) is type(bad)


def test_it_takes_a_positional_example_or_keywords() -> None:
    model = Block(Mlp())
    plan = {"version": 1, "modules": {f"body.{k}": v for k, v in MLP.items()}}
    x = x_BSH()
    programs = [tpplan.compile_plan(model, plan, 2, given) for given in ((x,), {"x": x}, x)]
    assert programs[0] == programs[1] == programs[2]


def test_what_is_not_contiguous_stays_so_where_nothing_is_sent() -> None:
    """A linear layer takes other operations for such a tensor."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(HIDDEN), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.norm(x).transpose(0, 1)).transpose(0, 1)

    program = compiled(Turned(), {f"mlp.{name}": style for name, style in MLP.items()})
    assert not program.diagnostics
    assert program.count_collectives() == {"all-reduce": 2}


class Wordless(nn.Module):
    """Refuses parts, and says nothing of what went wrong, as a bare assertion does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if h.shape[-1] != HIDDEN:
            raise ValueError
        return self.down(torch.relu(h))


def test_an_error_without_words_is_a_finding_too(mismatches: list[Mismatch | None]) -> None:
    program = tpplan.compile_plan(
        Wordless(), tpplan.load_plan({"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}), 2, (x_BSH(),)
    )
    assert mismatches[0] is not None and mismatches[0].reason == "ValueError"
    assert program.count_collectives(backward=False)["all-gather"] == 1


class Held(nn.Module):
    """A block that scales its features by what it holds."""

    def __init__(self, hold: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)
        self.hold = hold

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hold(self.up(x)))


class Config:
    def __init__(self, literal: bool) -> None:
        self.literal = literal

    def __call__(self, h: Tensor) -> Tensor:
        return h / (32 if self.literal else h.shape[-1])


def divided(h: Tensor, by: Any) -> Tensor:
    return h / (by or h.shape[-1])


@pytest.mark.parametrize(
    "holds",
    [
        (lambda h: h / 32, lambda h: h / h.shape[-1]),
        (Config(True), Config(False)),
        (functools.partial(divided, by=32), functools.partial(divided, by=None)),
        (functools.partial(divided, by=torch.tensor(32.0)), functools.partial(divided, by=None)),
        (Config(True).__call__, Config(False).__call__),
    ],
    ids=["function", "object", "partial", "tensor", "method"],
)
def test_equal_layers_that_hold_something_else_are_checked_each(
    holds: tuple[Any, Any], mismatches: list[Mismatch | None]
) -> None:
    """On whole tensors both divide by 32; on shards one of them divides by less."""
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), *map(Held, holds))  # so that both inputs want a gradient
    program = compiled(model, {"*.up": "colwise", "*.down": "rowwise"})
    assert mismatches[0] is not None and "is called with" in mismatches[0].reason
    assert verify_program(model, program, ((torch.randn(3, 12, HIDDEN, requires_grad=True),), {})).ok


def test_layers_that_hold_the_same_are_checked_once() -> None:
    model = nn.Sequential(*(Held(functools.partial(divided, by=32)) for _ in range(4)))
    plan = plan_of({"*.up": "colwise", "*.down": "rowwise"})
    root = compile_call(Request(model, plan, 2, (x_BSH(),), {})).streams[0].root
    likes = {step.module: step.like for step in root.steps if isinstance(step, Heard)}
    # The first layer's input wants no gradient, those of the others do.
    assert likes == {"0": None, "1": None, "2": ("1", 0), "3": ("1", 0)}


class Exchanged(nn.Module):
    """A difference whose operands change places on a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(HIDDEN, 32), nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x), self.gate(x)
        if a.shape[-1] < 32:
            a, b = b, a
        return self.down(a - b)


def test_operands_that_change_places_on_a_shard_are_seen(mismatches: list[Mismatch | None]) -> None:
    model = Exchanged()
    program = compiled(model, {"{up,gate}": "colwise", "down": "rowwise"})
    assert mismatches[0] is not None and "operand 1 of aten.sub.Tensor is another value" in mismatches[0].reason
    assert verify_program(model, program, ((torch.randn(3, 12, HIDDEN, requires_grad=True),), {})).ok
