"""A cross entropy over split classes takes its kernel; on CPU tensors the kernel's operators run their formulas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tpplan
from tests.kernels.launches import counted
from tests.parity.test_class_functions import PLAN, Head, Loss, criterion, of_rows, plain, summed, weighed, with_z
from tpplan.compiler.ir.program import KernelUse
from tpplan.parity import verify_program
from tpplan.runtime.classes import class_rows
from tpplan.runtime.classes.class_rows import ClassPart, Rows, Sums, joined

ROWS, WIDTH = 6, 8


@pytest.fixture
def launched() -> Iterator[Counter[str]]:
    """As where kernels run: how often each of the two operators is called."""
    with counted(class_rows, "PARTS", "BACKWARD") as calls:
        yield calls


def smoothed(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels, label_smoothing=0.3, reduction="sum")


def prove(loss: Loss, tp: int, classes: int = 12, choice: str | None = None) -> KernelUse:
    torch.manual_seed(0)
    labels = torch.randint(0, classes, (ROWS,))
    labels[::3] = -100
    model = Head(loss, classes)
    plan: dict[str, Any] = PLAN if choice is None else PLAN | {"kernels": {"cross_entropy": choice}}
    example = (torch.randn(ROWS, WIDTH), labels)
    program = tpplan.compile_plan(model, tpplan.load_plan(plan), tp=tp, inputs=example)
    report = verify_program(model, program, (example, {}), dtype=torch.float32)
    assert report.ok, str(report)
    assert not report.notes, str(report)  # the collectives are those of the program, without kernels
    (use,) = (use for use in program.kernels if use.kind == "cross_entropy")
    return use


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("loss", [plain, of_rows, summed, criterion, with_z, smoothed], ids=lambda loss: loss.__name__)
def test_the_loss_and_every_gradient_are_those_of_the_stock_model(loss: Loss, tp: int, launched: Counter[str]) -> None:
    use = prove(loss, tp)
    assert (use.module, use.refused) == ("criterion" if loss is criterion else "", "")
    assert launched["PARTS"] == launched["BACKWARD"] >= tp


def test_classes_that_the_axis_does_not_divide(launched: Counter[str]) -> None:
    prove(smoothed, 4, 13)
    assert launched["PARTS"] and launched["BACKWARD"]


def test_a_rank_without_classes_needs_no_kernel(launched: Counter[str]) -> None:
    prove(plain, 4, 5)
    assert launched["PARTS"] == launched["BACKWARD"] > 0


@pytest.mark.parametrize(("loss", "choice"), [(weighed, None), (plain, "torch")])
def test_weights_and_the_plan_keep_torch_s_operators(loss: Loss, choice: str | None, launched: Counter[str]) -> None:
    assert prove(loss, 2, choice=choice).refused in ("its classes have weights", "the plan says `torch`")
    assert not launched


def test_triton_has_an_effect_on_a_split_loss_and_none_on_a_whole_one(launched: Counter[str]) -> None:
    model, example = Head(plain), (torch.randn(ROWS, WIDTH), torch.randint(0, 12, (ROWS,)))
    for output, reported in (("shard", False), ("replicate", True)):
        plan = {"modules": {"head": {"style": "colwise", "output": output}}, "kernels": {"cross_entropy": "triton"}}
        program = tpplan.compile_plan(model, tpplan.load_plan({"version": 1} | plan), tp=2, inputs=example)
        found = [d.message for d in program.diagnostics if d.code == "TP150"]
        assert bool(found) == reported and all("classes aren't split" in message for message in found)


class _Rank:
    """One of two ranks, for what needs no collective."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


def told_by_ranks(kernel: bool, smoothing: float, device: str) -> list[Tensor]:
    """What two ranks tell of rows, the rows' sums, and each rank's gradients.

    Of logits that are far apart, and of a rank whose logits are all -inf: it has no say in the maximum.
    """
    torch.manual_seed(1)
    whole = torch.randn(5, 12)
    whole[0] *= 80
    whole[1] -= 300
    whole[2, :6] = -300 if smoothing else -torch.inf
    whole[3, 6:] = -1e4
    labels = torch.tensor([3, 7, 11, 2, -100], device=device)
    kept = labels != -100
    rows = [Rows(ClassPart(_Rank(r), 12), labels, kept, None, smoothing, kernel) for r in (0, 1)]  # pyright: ignore
    parts, some = [part.contiguous().to(device) for part in whole.chunk(2, 1)], slice(0, 5)
    numbers = [row.numbers(5, torch.float32, labels.device) for row in rows]
    for row, number, part in zip(rows, numbers, parts, strict=True):
        row.note(number, some, part)
    told = torch.stack(numbers)
    sums = Sums(*joined(told[:, 0], told[:, 1]))
    given = torch.arange(1.0, 6, device=device), torch.zeros(5, device=device)
    made = zip(rows, parts, (row.shares(*given) for row in rows), strict=True)
    gradients = [row.gradient(part, sums, share, some)[kept] for row, part, share in made]
    return [told[:, :, kept], sums.logsum[kept], *gradients]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_numbers_and_gradients_of_a_rank_are_those_of_torch_s_operators(smoothing: float) -> None:
    for ours, stock in zip(*(told_by_ranks(kernel, smoothing, "cpu") for kernel in (True, False)), strict=True):
        torch.testing.assert_close(ours, stock)
