"""Cross entropy against float64, of all classes and of a vocabulary in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.numerics.harness import DEVICE, DTYPES, GATES, draw, relative_error
from tests.parity.test_kernel_losses import told_by_ranks
from tpplan import kernels
from tpplan.kernels.cross_entropy_ops import PARTS


def targets(rows: int, classes: int) -> Tensor:
    return torch.randint(0, classes, (rows,)).to(DEVICE)


def assert_exact(logits: Tensor, target: Tensor, gate: float | None = None, **settings: Any) -> None:
    loss = kernels.cross_entropy(logits, target, backend="triton", **settings)
    gradient = torch.ones((), device=DEVICE).expand(loss.shape)
    (dlogits,) = torch.autograd.grad(loss, logits, gradient)
    wide = logits.detach().double().requires_grad_()
    exact = functional.cross_entropy(wide, target, **settings)
    (wanted,) = torch.autograd.grad(exact, wide, gradient.double())
    assert loss.dtype == torch.float32
    assert dlogits.dtype == logits.dtype
    # The logits are read as they are, whatever their dtype: only the gradient is rounded to it.
    assert relative_error(loss, exact) <= (gate or GATES[torch.float32])
    assert relative_error(dlogits, wanted) <= (gate or GATES[logits.dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [1001, 9000])
def test_loss_and_gradient_are_exact(classes: int, dtype: torch.dtype) -> None:
    assert_exact(draw(5, classes, dtype=dtype), targets(5, classes))


def test_one_class_has_no_loss() -> None:
    logits = draw(3, 1)
    loss = kernels.cross_entropy(logits, targets(3, 1), backend="triton")
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None and not logits.grad.any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_reductions_smoothing_and_ignored_rows(reduction: str, smoothing: float) -> None:
    target = targets(7, 1001)
    target[2] = target[5] = -100
    assert_exact(draw(7, 1001), target, reduction=reduction, label_smoothing=smoothing)
    target[3] = 17
    assert_exact(draw(7, 1001), target.abs(), reduction=reduction, label_smoothing=smoothing, ignore_index=17)


def test_ignored_rows_get_no_gradient_even_if_they_hold_no_numbers() -> None:
    logits = draw(3, 50).detach()
    logits[1] = torch.nan
    logits.requires_grad_()
    loss = kernels.cross_entropy(logits, torch.tensor([4, -100, 2], device=DEVICE), backend="triton")
    loss.backward()
    assert loss.isfinite()
    assert logits.grad is not None and logits.grad.isfinite().all() and not logits.grad[1].any()


def test_logits_far_from_zero_neither_overflow_nor_vanish() -> None:
    assert_exact(draw(4, 300, mean=1e4), targets(4, 300))
    assert_exact(draw(4, 9000, mean=-1e4), targets(4, 9000))


def test_a_small_loss_keeps_its_digits() -> None:
    """The difference of log-sum-exp and logit, both above 1000, would be off by some 1e-3 of it."""
    logits = draw(4, 500, mean=1000.0).detach()
    logits[:, 7] = 1010.0
    assert_exact(logits.requires_grad_(), torch.full((4,), 7, device=DEVICE), gate=4e-6)


def test_a_rank_without_a_single_possible_class_adds_nothing() -> None:
    logits = torch.full((2, 300), -torch.inf, device=DEVICE).requires_grad_()
    highest, logsum, _, _ = PARTS(logits, torch.tensor([400, 500], device=DEVICE), 0, 600, -100, False)
    assert (highest.tolist(), logsum.tolist()) == ([0.0, 0.0], [-torch.inf, -torch.inf])
    (dlogits,) = torch.autograd.grad(torch.exp(logsum).sum(), logits)
    assert not dlogits.any()


def test_masked_classes_count_for_nothing() -> None:
    logits = draw(2, 9000).detach()
    logits[:, :5000] = -torch.inf  # the whole first tile of the row
    assert_exact(logits.requires_grad_(), torch.tensor([6000, 8999], device=DEVICE))


def test_a_target_that_is_no_class_is_no_number() -> None:
    for target in (50, 51, -1):
        loss = kernels.cross_entropy(draw(2, 50), torch.tensor([3, target], device=DEVICE), backend="triton")
        assert loss.isnan()


def test_leading_dims_and_strides_are_taken() -> None:
    logits = draw(2, 3, 400, grad=False)[..., 100:300].requires_grad_()
    target = targets(6, 200).view(2, 3)
    loss = kernels.cross_entropy(logits, target, reduction="none", backend="triton")
    exact = functional.cross_entropy(logits.detach().double().flatten(0, 1), target.flatten(), reduction="none")
    assert relative_error(loss, exact.view(2, 3)) <= GATES[torch.float32]
    transposed = draw(200, 6, grad=False).t().requires_grad_()
    assert_exact(transposed, targets(6, 200))


def test_no_rows_give_an_empty_loss() -> None:
    loss = kernels.cross_entropy(draw(0, 10), targets(0, 10), reduction="none", backend="triton")
    assert loss.shape == (0,)


@pytest.mark.parametrize("ranks", [4])
def test_the_parts_of_all_ranks_make_up_the_whole(ranks: int) -> None:
    logits, target = draw(6, 1000), targets(6, 1000)
    target[1] = -100
    columns = 1000 // ranks
    parts = [
        PARTS(logits[:, r * columns : (r + 1) * columns], target, r * columns, 1000, -100, True) for r in range(ranks)
    ]
    highest, logsum, picked, total = (torch.stack([part[i] for part in parts]) for i in range(4))
    loss = (highest + logsum).logsumexp(0) - picked.sum(0)
    kept = target != -100
    exact = functional.cross_entropy(logits.detach().double(), target, reduction="none")
    assert relative_error(loss[kept], exact[kept]) <= GATES[torch.float32]
    assert relative_error(total.sum(0)[kept], logits.double().sum(1)[kept]) <= 2 * GATES[torch.float32]
    (dlogits,) = torch.autograd.grad(loss[kept].sum(), logits)
    wide = logits.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(functional.cross_entropy(wide, target, reduction="sum"), wide)
    assert relative_error(dlogits, wanted) <= GATES[torch.float32]


def test_two_runs_are_equal_in_every_bit() -> None:
    logits, target = draw(4, 4097, dtype=torch.bfloat16), targets(4, 4097)
    losses = [kernels.cross_entropy(logits, target, backend="triton") for _ in range(2)]
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in losses]
    assert torch.equal(*losses)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_rows_of_a_split_loss_are_those_of_torch_s_operators(smoothing: float) -> None:
    for ours, stock in zip(*(told_by_ranks(kernel, smoothing, DEVICE) for kernel in (True, False)), strict=True):
        torch.testing.assert_close(ours, stock)
