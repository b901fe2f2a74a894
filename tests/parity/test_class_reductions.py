"""Reductions over split classes: losses and metrics that are written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.parity.test_class_functions import CLASSES, PLAN, ROWS, WIDTH, Head, Loss, prove
from tpplan.parity import verify_program
from tpplan.plan import CompileError, load_plan


def in_wholes(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    """What transformers' LabelSmoother does."""
    logp = -functional.log_softmax(logits, dim=-1)
    labels = labels.unsqueeze(-1)
    padding = labels.eq(-100)
    nll, smoothed = logp.gather(-1, labels.clamp(min=0)), logp.sum(dim=-1, keepdim=True, dtype=torch.float32)
    nll, smoothed = nll.masked_fill(padding, 0.0), smoothed.masked_fill(padding, 0.0)
    active = padding.numel() - padding.long().sum()
    return 0.9 * nll.sum() / active + 0.1 * smoothed.sum() / (active * model.classes)


def focal(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    chance = torch.softmax(logits.float(), dim=-1).gather(-1, labels.clamp(min=0)[:, None])
    return -((1 - chance) ** 2 * chance.log()).mean()


def entropy(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    chances = logits.softmax(-1)
    return -(chances * (chances + 1e-9).log()).sum(-1).square().mean() + functional.cross_entropy(logits, labels)


def accuracy(model: Head, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return functional.cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean()


def margin(model: Head, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    highest, where = logits.max(dim=-1)
    return (highest - logits.min(-1).values).square().mean(), where


def spread(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    centred = logits - logits.mean(-1, keepdim=True)
    return functional.cross_entropy(centred - centred.amax(-1, keepdim=True), labels)


def normed(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    """As `spread`, by the variance of each row."""
    mean = logits.mean(-1, keepdim=True)
    return functional.cross_entropy((logits - mean) / (logits - mean).square().mean(-1, keepdim=True).sqrt(), labels)


def least(model: Head, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.amin(-1).square().sum(), torch.argmin(logits, dim=-1)


def capped(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    """Several classes share the largest logit, on several ranks."""
    return logits.clamp(max=0.01).amax(-1).square().sum() * 1e3 + functional.cross_entropy(logits, labels)


def of_a_teacher(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    """Distillation from other logits of the same head."""
    with torch.no_grad():
        wanted = (logits * 2).softmax(-1)
    return functional.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean")


def among_others(model: Head, logits: Tensor, labels: Tensor) -> Tensor:
    """Beside reductions of rows, and of what isn't split."""
    weights = model.weight.softmax(0)  # pyright: ignore
    chances = logits.softmax(-1)
    return (chances.sum(-1) * chances.amax(-1)).sum() * weights.amax(0) + functional.cross_entropy(logits, labels)


WAYS = (in_wholes, focal, entropy, accuracy, margin, spread, normed, least, capped, of_a_teacher, among_others)


@pytest.mark.parametrize("loss", WAYS, ids=lambda loss: loss.__name__)
def test_a_loss_written_by_hand_is_that_of_all_classes(loss: Loss) -> None:
    prove(loss)


@pytest.mark.parametrize("classes", [13, 5])
def test_classes_that_the_axis_does_not_divide(classes: int) -> None:
    for loss in (focal, accuracy, margin, spread, capped):
        prove(loss, 4, classes)


def test_a_loss_in_a_module_of_its_own() -> None:
    """Its body is right with all logits as well, so that they may be gathered for it."""

    class Focal(nn.Module):
        def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
            return focal(None, logits, labels)  # pyright: ignore

    model = Head(lambda model, logits, labels: model.focal(logits, labels))  # pyright: ignore
    model.focal = Focal()
    example = (torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,)))
    program = tpplan.compile_plan(model, load_plan(PLAN), tp=2, inputs=example)
    assert verify_program(model, program, (example, {})).ok


def test_norms_stay_norms() -> None:
    """A reduction elsewhere is none over classes."""

    class Normed(Head):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.loss(self, self.head(self.norm(x)), labels)  # pyright: ignore

    model = Normed(focal)
    model.norm = nn.RMSNorm(WIDTH)
    example = (torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,)))
    program = tpplan.compile_plan(model, load_plan(PLAN), tp=2, inputs=example)
    assert verify_program(model, program, (example, {})).ok
    assert [m.name for m in program.modules if m.class_calls] == [""]


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, logits, labels: logits.sort(-1).values[:, 0].mean(),
        lambda model, logits, labels: logits.cumsum(-1).square().mean(),
        lambda model, logits, labels: logits.topk(2).values.square().mean(),
    ],
)
def test_what_needs_the_classes_of_others_is_refused(loss: Loss) -> None:
    with pytest.raises(CompileError, match=r"(TP107|TP127)(.|\n)*output: replicate"):
        prove(loss)
