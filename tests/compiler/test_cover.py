"""The sizes that a proof covers: found without a call, and no more than a compilation of their own agrees with."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.zoo.architectures import build
from tpplan.calls.key import KeyReader
from tpplan.calls.proofs import covers
from tpplan.compiler.cover import Cover, NotCoveredError, cover
from tpplan.compiler.pipeline import Compiled, compile_call
from tpplan.compiler.request import Request
from tpplan.plan import load_plan

SAME = "attention_mask.shape[1] == input_ids.shape[1]"


def covered(model: nn.Module, plan: Any, keywords: dict[str, Any]) -> tuple[Compiled, Cover]:
    compiled = compile_call(Request(model, plan, 2, (), keywords))
    assert compiled.subject is not None
    return compiled, cover(compiled.subject, KeyReader(type(model).forward).sizes)


def resized(keywords: dict[str, Tensor], batch: int, length: int) -> dict[str, Tensor]:
    return {name: torch.zeros(batch, length, dtype=held.dtype, device="meta") for name, held in keywords.items()}


def sizes_of(keywords: dict[str, Tensor]) -> list[int]:
    return [size for held in keywords.values() for size in held.shape]


OTHERS = [
    ("mixtral", False, {SAME}, {6: True, 18: True}),
    ("opt", True, {SAME}, {6: True, 18: True}),
    ("bloom", False, set[str](), {18: True}),
    ("t5", True, set[str](), {18: True}),
    ("llama", False, {SAME}, {6: True, 18: True, 64: True}),
    ("mamba", True, {"input_ids.shape[1] == 16"}, {16: True, 18: False}),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "sequence", "conditions", "lengths"),
    [
        ("llama", True, {SAME}, {6: True, 18: True}),
        ("mistral", True, {SAME, "attention_mask.shape[1] >= 5"}, {4: False, 18: True}),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS),
    ],
)
def test_what_a_library_model_is_proved_of(
    name: str, sequence: bool, conditions: set[str], lengths: dict[int, bool]
) -> None:
    model, keywords = build(name)
    plan = tpplan.suggest_plan(model, 2, sequence, keywords)
    compiled, found = covered(model, plan, keywords)
    assert conditions <= {condition.text for condition in found.conditions}
    for length, holds in lengths.items():
        other = resized(keywords, 3, length)
        assert found.holds(sizes_of(other)) is holds
        if holds:  # what is compiled for that length by itself does the same in every module
            again = compile_call(Request(model, plan, 2, (), other, compiled.program.training, partly=True))
            assert covers(compiled.program, again)


class Sliced(nn.Module):
    """Takes so many entries as there are, in the example."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)[:, :8] + self.up(x[:, :, :])[:, : x.shape[1]][:, :8])


def test_slices_that_take_all_are_none_of_the_record_and_a_condition() -> None:
    plan = load_plan({"version": 1, "modules": {"up": "colwise", "down": "rowwise"}})
    _, found = covered(Sliced(), plan, {"x": torch.zeros(2, 8, 16)})
    assert {condition.text for condition in found.conditions} == {"x.shape[1] <= 8", "x.shape[2] == 16"}
    (broken,) = found.broken([2, 12, 16])
    assert "x.shape[1] <= 8" in broken and "test_cover.py" in broken


class Listed(nn.Module):
    """A column and a row for each item of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, items: list[Tensor]) -> Tensor:
        return torch.cat([self.down(self.up(item).relu()) for item in items], 1)


@pytest.mark.parametrize(("lengths", "alike"), [((8, 8, 8), "all"), ((8, 6, 8), "some"), ((8, 6, 4), "none")])
def test_equal_sizes_of_the_items_of_a_list_are_one(lengths: tuple[int, ...], alike: str) -> None:
    plan = load_plan({"version": 1, "modules": {"up": "colwise", "down": "rowwise"}})
    _, found = covered(Listed(), plan, {"items": [torch.zeros(2, length, 16) for length in lengths]})

    def broken(*lengths: int) -> list[str]:
        sizes = [size for length in lengths for size in (2, length, 16)]
        told = [*found.broken(sizes)]
        assert found.holds(sizes) is (not told)
        return told

    equal = ["`all items[*].shape[1] are equal`"]
    assert broken(5, 5, 5) == []
    assert broken(9, 5, 9) == (equal if alike == "all" else [])
    assert broken(5, 5, 9) == ([] if alike == "none" else equal)


class Counted(nn.Module):
    """Looks its size up."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * {8: 2.0}.get(x.shape[1], 3.0))


def test_what_cannot_be_recorded_with_symbols_is_proved_of_its_own_sizes_alone() -> None:
    plan = load_plan({"version": 1, "modules": {"up": "colwise", "down": "rowwise"}})
    with pytest.raises(NotCoveredError, match="unhashable"):
        covered(Counted(), plan, {"x": torch.zeros(2, 8, 16)})


def test_python_asks_no_symbol_for_its_class_once_a_cover_is_found() -> None:
    plain = builtins.isinstance
    plan = load_plan({"version": 1, "modules": {"up": "colwise", "down": "rowwise"}})
    covered(Sliced(), plan, {"x": torch.zeros(2, 8, 16)})
    assert builtins.isinstance is plain
