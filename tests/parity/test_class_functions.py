"""Functions over split classes: losses in a body, by whatever functions of torch it computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tpplan.compiler.ir.program import SplitClasses
from tpplan.parity import verify_program
from tpplan.plan import CompileError, load_plan
from tpplan.rehearsal.rehearse import ShapeCommunicator
from tpplan.runtime.bodies.open_bodies import OpenBodies
from tpplan.runtime.classes.class_scope import ClassBody, ClassCounter

ROWS, WIDTH, CLASSES = 6, 8, 12
PLAN = {"version": 1, "modules": {"head": {"style": "colwise", "output": "shard"}}}
Loss = Callable[["Head", Tensor, Tensor], Any]


class Head(nn.Module):
    """A head and a loss."""

    def __init__(self, loss: Loss, classes: int = CLASSES) -> None:
        super().__init__()
        self.classes = classes
        self.head = nn.Linear(WIDTH, classes)
        self.loss = loss
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.register_buffer("weight", torch.rand(classes) + 0.5)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss(self, self.head(x), labels)


def prove(loss: Loss, tp: int = 2, classes: int = CLASSES, rows: tuple[int, ...] = (ROWS,)) -> tpplan.Program:
    """Compile, and compare with the unsharded model."""
    torch.manual_seed(0)
    labels = torch.randint(0, classes, rows)
    labels.view(-1)[::3] = -100
    model, plan = Head(loss, classes), load_plan(PLAN)
    example = (torch.randn(*rows, WIDTH), labels)
    program = tpplan.compile_plan(model, plan, tp=tp, inputs=example)
    report = verify_program(model, program, (example, {}))
    assert report.ok, str(report)
    assert not report.notes, str(report)  # all collectives were predicted
    return program


def plain(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels)


def of_rows(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    return (functional.cross_entropy(logits, labels, reduction="none") * torch.arange(ROWS)).sum()


def summed(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels, reduction="sum") / (labels != -100).sum()


def weighed(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels, model.weight, label_smoothing=0.2)  # pyright: ignore


def criterion(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    return model.criterion(logits, labels)


def with_z(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels) + 1e-2 * torch.logsumexp(logits, -1).square().mean()


def written_out(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    return functional.nll_loss(logits.log_softmax(-1), labels, model.weight, reduction="sum")  # pyright: ignore


def in_float32(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    logp = functional.log_softmax(logits, dim=1, dtype=torch.float32)
    return functional.nll_loss(logp, labels)


def centred(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits - logits.logsumexp(-1, keepdim=True), labels)


def capped(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(torch.tanh(logits / 3) * 3, labels.clamp(1), ignore_index=1)


def all_ignored(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, torch.full_like(labels, -100), reduction="sum") + logits.logsumexp(1).sum()


def beside_others(model: Head, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """One of the calls is of whole classes."""
    other = functional.cross_entropy(model.weight[None].repeat(ROWS, 1), labels)  # pyright: ignore
    return functional.cross_entropy(logits, labels) + other, logits


WAYS = (plain, of_rows, summed, weighed, criterion, with_z, written_out, in_float32, centred, capped, all_ignored)


@pytest.mark.parametrize("loss", (*WAYS, beside_others), ids=lambda loss: loss.__name__)
def test_a_loss_of_split_classes_is_that_of_all(loss: Loss) -> None:
    prove(loss)


@pytest.mark.parametrize("classes", [13, 5])
def test_classes_that_the_axis_does_not_divide(classes: int) -> None:
    prove(weighed, 4, classes)
    prove(with_z, 4, classes)


def test_it_takes_one_collective() -> None:
    program = prove(plain)
    root = next(module for module in program.modules if not module.name)
    assert root.class_calls == (SplitClasses("cross_entropy", CLASSES),)
    assert dict(program.count_collectives(backward=False)) == {"all-gather": 1}
    (exchange,) = root.inner
    assert (exchange.shape, exchange.bytes) == ((2 * 3, ROWS), 2 * 3 * ROWS * 4)


def test_only_calls_of_the_body_itself_are_counted() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.log_softmax(x, -1)

    model = Head(lambda model, logits, labels: functional.cross_entropy(logits, labels) + model.inner(model.weight)[0])  # pyright: ignore
    model.inner = Inner()
    example = (torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,)))
    program = tpplan.compile_plan(model, load_plan(PLAN), tp=2, inputs=example)
    assert verify_program(model, program, (example, {})).ok
    assert {m.name for m in program.modules if m.counted_apart} == {"head", "inner"}


def test_labels_in_another_shape() -> None:
    """Shifted by a token, flattened by a number that counts all classes."""

    def shifted(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits[:, :-1].reshape(-1, model.classes), labels[:, 1:].reshape(-1))

    def second(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.transpose(1, 2), labels)

    prove(shifted, rows=(2, 4))
    prove(second, rows=(2, 4))


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, logits, labels: functional.cross_entropy(logits, logits.detach().softmax(-1)),
        lambda model, logits, labels: plain(model, logits, labels) - logits.log_softmax(-1).mean(),
        lambda model, logits, labels: functional.multi_margin_loss(logits, labels.clamp(0)),
    ],
)
def test_what_has_no_form_for_split_classes_is_refused(loss: Loss) -> None:
    with pytest.raises(CompileError, match=r"TP107|TP127"):
        prove(loss)


def test_calls_that_were_not_proved_are_refused() -> None:
    logits, labels = torch.randn(ROWS, CLASSES // 2), torch.zeros(ROWS, dtype=torch.int64)

    def call(*functions: str) -> None:
        body = ClassBody(
            OpenBodies[ClassCounter](), (SplitClasses("cross_entropy", CLASSES),), ShapeCommunicator(2, 0), "it"
        )
        with body:
            for function in functions:
                functional.cross_entropy(logits, labels) if function == "loss" else logits.logsumexp(-1)

    call("loss")
    with pytest.raises(tpplan.ClassCallError, match=r"TP166.*once more"):
        call("loss", "loss")
    with pytest.raises(tpplan.ClassCallError, match=r"TP166.*`logsumexp`"):
        call("sum")
    logits = torch.randn(ROWS, CLASSES)
    with pytest.raises(tpplan.ClassCallError, match=r"TP166.*12 classes"):
        call("loss")


class ScaledTable(nn.Embedding):
    """As Gemma and BART have it."""

    def __init__(self, rows: int, width: int, padding_idx: int | None = None) -> None:
        super().__init__(rows, width, padding_idx)
        self.register_buffer("scale", torch.tensor(width**0.5), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale.to(self.weight.dtype)  # pyright: ignore


class Tied(nn.Module):
    """A head that is tied to a table of the given class."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table
        self.head = nn.Linear(WIDTH, table.num_embeddings, bias=False)
        self.head.weight = table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(torch.tanh(self.table(ids))), labels)


@pytest.mark.parametrize(("classes", "tp"), [(12, 2), (5, 4)])
def test_a_table_that_scales_its_rows_is_split_with_its_head(classes: int, tp: int) -> None:
    model = Tied(ScaledTable(classes, WIDTH, padding_idx=1))
    plan = load_plan({"version": 1, "modules": {"table": "vocab", **PLAN["modules"]}})  # pyright: ignore
    example = (torch.arange(ROWS) % classes, torch.arange(ROWS) % classes)
    program = tpplan.compile_plan(model, plan, tp=tp, inputs=example)
    report = verify_program(model, program, (example, {}))
    assert report.ok, str(report)
    assert not report.notes


def test_a_table_that_adds_to_its_rows_is_not() -> None:
    class Shifted(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * self.weight.sum()

    plan = load_plan({"version": 1, "modules": {"table": "vocab"}})
    ids = torch.arange(ROWS)
    with pytest.raises(CompileError, match="TP101"):
        tpplan.compile_plan(Tied(Shifted(CLASSES, WIDTH)), plan, tp=2, inputs=(ids, ids))
