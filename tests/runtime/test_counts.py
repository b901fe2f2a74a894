"""Rows that are split by how many each of several gets, such as tokens of experts: numbers of each call's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tpplan
from tests.compiler.toys import HIDDEN
from tests.runtime.simulated import plan_of, verdicts, worst
from tpplan.compiler.pipeline import compile_call
from tpplan.compiler.request import Request
from tpplan.compiler.trace.counts import shared_out
from tpplan.plan import CompileError
from tpplan.suggest import search

TOLERANCE = 1e-12
WIDTH, EXPERTS = 24, 4
RULES = {"experts.up": {"style": "colwise", "packed": ["gate", "up"]}, "experts.down": "rowwise"}
Split = Callable[[Tensor, list[int]], Any]


def by_method(rows: Tensor, counts: list[int]) -> Any:
    return rows.split(counts)


def by_keyword(rows: Tensor, counts: list[int]) -> Any:
    return [piece.T for piece in rows.T.split(split_size=counts, dim=-1)]


def by_function(rows: Tensor, counts: list[int]) -> Any:
    return torch.split(rows, counts, 0)


def by_sizes(rows: Tensor, counts: list[int]) -> Any:
    return torch.split_with_sizes(rows, counts)


def without_empty(rows: Tensor, counts: list[int]) -> Any:
    return [piece for piece, count in zip(rows.split(counts), counts, strict=True) if count > 0]


def unless_equal(rows: Tensor, counts: list[int]) -> Any:
    return rows.softmax(-1).split(counts) if counts[0] == counts[1] else rows.split(counts)


def by_offsets(rows: Tensor, counts: list[int]) -> Any:
    return [rows[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(len(counts))]


def by_ends(rows: Tensor, counts: list[int]) -> Any:
    """As in DeepSeek's first `moe_infer`."""
    pieces: list[Tensor] = []
    ends: Any = numpy.cumsum(numpy.array(counts, dtype=object))
    for i, end in enumerate(ends):
        start = 0 if i == 0 else ends[i - 1]
        if start == end:
            continue
        pieces.append(rows[start:end])
    return pieces


def up_to_the_last(rows: Tensor, counts: list[int]) -> Any:
    return [*rows[: sum(counts[:-1])].split(counts[:-1]), rows.T[..., sum(counts[:-1]) :].T]


def of_some(rows: Tensor, counts: list[int]) -> Any:
    return rows.split(sorted(counts))


def of_one(rows: Tensor, counts: list[int]) -> Any:
    return [rows[: counts[0]], *rows.split(counts)[1:]]


def of_another(rows: Tensor, counts: list[int]) -> Any:
    return [rows[: counts[1]], *rows.split(counts)[1:]]


def unless_empty(rows: Tensor, counts: list[int]) -> Any:
    return rows.softmax(-1).split(counts) if counts[0] == 0 else rows.split(counts)


def unless_empty_and(rows: Tensor, counts: list[int]) -> Any:
    return rows.split(counts) if counts[0] > 0 or rows.sum() > 0 else (-rows).split(counts)


def in_a_loop(rows: Tensor, counts: list[int]) -> Any:
    return [torch.stack([rows[0] for _ in range(counts[0])]), *rows.split(counts)[1:]]


def with_a_number(rows: Tensor, counts: list[int]) -> Any:
    return [rows.new_zeros(counts[0], HIDDEN), *rows.split(counts)[1:]]


def with_a_power(rows: Tensor, counts: list[int]) -> Any:
    return (rows * counts[0] ** 2).split(counts)


def of_more_rows(rows: Tensor, counts: list[int]) -> Any:
    longer = torch.cat([rows, rows])
    return [rows[: counts[0]] + longer[: counts[0]], *rows.split(counts)[1:]]


def unless_just_one_is_empty(rows: Tensor, counts: list[int]) -> Any:
    return rows.softmax(-1).split(counts) if counts.count(0) == 1 else rows.split(counts)


def with_another_for_each_empty(rows: Tensor, counts: list[int]) -> Any:
    pieces, start = list[Tensor](), 0
    for count in counts:
        pieces.append(rows[:1][:0] * 2 if count == 0 else rows[start : start + count])
        start += count
    return pieces


def numbers_of(counts: Tensor) -> list[int]:
    return counts.tolist()


class Sorted(nn.Module):
    """Tokens sorted by expert, a gated layer for each, and what they make added up by token."""

    def __init__(self, split: Split) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)
        self.split = split

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        hits = torch.zeros(len(rows), EXPERTS, device=x.device).scatter(1, chosen, 1.0)
        order = chosen.flatten().argsort(stable=True)
        pieces = self.split(rows[order // 2], numbers_of(hits.long().sum(0)))
        made: list[Tensor] = []
        for i, piece in enumerate(pieces):
            gate, values = F.linear(piece, self.up[i]).chunk(2, -1)
            made.append(F.linear(F.silu(gate) * values, self.down[i]))
        mixed = torch.cat(made) * weights.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // 2, mixed).view_as(x)


class Mixture(nn.Module):
    def __init__(self, split: Split) -> None:
        super().__init__()
        self.before, self.experts = nn.Linear(HIDDEN, HIDDEN), Sorted(split)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.before(x))


def model(split: Split = by_method) -> Mixture:
    torch.manual_seed(0)
    return Mixture(split).double()


def call(seed: int, length: int = 12) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(3, length, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_(),), {}


@pytest.mark.parametrize(
    "split", [by_method, by_keyword, by_function, by_offsets, by_ends, without_empty, of_one, up_to_the_last]
)
def test_rows_are_split_by_other_numbers_in_each_call(split: Any) -> None:
    assert max(worst(model(split), RULES, 2, call(0), [call(seed) for seed in range(3)])) < TOLERANCE


@pytest.mark.parametrize(
    "split", [by_method, by_offsets, by_ends, without_empty, unless_empty, with_another_for_each_empty]
)
def test_some_get_no_rows_at_all(split: Any) -> None:
    calls = [call(seed, length=1) for seed in range(4)]
    assert max(worst(model(split), RULES, 4, calls[0], [*calls, call(0), call(1)])) < TOLERANCE


def test_which_of_them_are_empty_together_is_held_against_the_proof() -> None:
    calls = [call(seed, length=1) for seed in range(8)]
    told = verdicts(model(unless_just_one_is_empty), RULES, 2, calls[0], calls)
    refused = [verdict for verdict in told if isinstance(verdict, str)]
    assert all("TP131" in verdict and "softmax" in verdict for verdict in refused)
    assert 0 < len(refused) < len(told) and all(isinstance(v, str) or v < TOLERANCE for v in told)


@pytest.mark.parametrize(
    "split",
    [unless_equal, of_some, of_another, by_sizes, in_a_loop, with_a_number, with_a_power, of_more_rows],
)
def test_whatever_else_is_done_with_the_numbers_is_refused(split: Any) -> None:
    with pytest.raises(CompileError) as error:
        compile_call(Request(model(split), plan_of(RULES), 2, *call(0), device=torch.device("cpu")))
    (found,) = error.value.diagnostics
    assert (found.code, found.subject) == ("TP110", "experts")
    assert "numbers by which rows are split" in (found.help or "") and "test_counts.py" in found.notes[0]


def test_what_empty_parts_steer_besides_is_refused() -> None:
    with pytest.raises(CompileError, match="does something else where some of the numbers"):
        compile_call(Request(model(unless_empty_and), plan_of(RULES), 2, *call(0), device=torch.device("cpu")))


def test_a_count_of_unknown_length_is_told_to_have_one() -> None:
    class Counted(Mixture):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.before(x).argmax(-1).flatten().bincount().sum()

    with pytest.raises(CompileError, match="`minlength`"):
        tpplan.compile_plan(Counted(by_method), {"version": 1, "modules": RULES}, 2, call(0)[0])


def test_no_axis_divides_what_each_gets_in_a_trace() -> None:
    assert shared_out(96, 4) == [23, 23, 19, 31]
    assert shared_out(6, 4) == [1, 1, 1, 3]
    for rows in range(1, 200):
        for among in range(2, 9):
            counts = shared_out(rows, among)
            assert len(counts) == among and sum(counts) == rows and min(counts) >= 0


def test_all_matrices_of_a_stack_are_split_by_a_suggested_plan() -> None:
    found = search(model(), 2, *call(0), False)
    styles = {name: held.style.value for name, held in found.settings.items() if name.startswith("experts.")}
    assert styles == {"experts.up": "colwise", "experts.down": "rowwise"}
