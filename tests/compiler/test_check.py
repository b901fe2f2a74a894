"""The run on local shapes sees what a placement can't: numbers that a body takes from shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.compiler.toys import HIDDEN, MLP, SEQUENCE, Block, Mlp, Normed, codes, compiled, reshards, x_BSH
from tpplan.compiler.check.compare import CheckInput, Mismatch
from tpplan.compiler.check.local_run import check


@pytest.fixture
def mismatches(monkeypatch: pytest.MonkeyPatch) -> list[Mismatch | None]:
    """What each check of a compilation found, in order."""
    found: list[Mismatch | None] = []

    def spying(given: CheckInput, *more: Any) -> Mismatch | None:
        found.append(check(given, *more))
        return found[-1]

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
        (lambda m, h, x: m.proj(h) / torch.tensor(float(h.shape[1])), "constant that has other numbers"),
        (lambda m, h, x: m.proj(h) + h.new_tensor([float(h.shape[1])]), "constant that has other numbers"),
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
