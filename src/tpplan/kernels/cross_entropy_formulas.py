"""What cross entropy needs of one rank's part of the vocabulary, in plain torch: the reference of its kernels.

With logits z, classes v of which this rank holds some, and target t, the loss of a row is

    (1 - α)·(lse - z_t) + α·(lse - Σ_v z_v / V),    lse = log Σ_v exp(z_v),

α being the label smoothing. lse, z_t and Σ z_v are all that ranks have to share. lse is kept as
m + log Σ_v exp(z_v - m) with the largest logit m, and m is taken from z_t first: the difference of two large numbers
would have few digits. Sources: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016, for
the smoothing; Shoeybi et al., "Megatron-LM", 2019, for the split vocabulary; Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018, for the single pass.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(
    logits: Tensor, target: Tensor, first: int, classes: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The largest logit m, log Σ exp(z - m), the target's logit and the sum of logits, over this rank's classes alone.

    Args:
        logits: (rows, columns), float32, bfloat16 or float16.
        target: (rows), int64, counted over all classes.
        first: the class of the first column.
        classes: how many there are on all ranks.
        ignore_index: a target whose row counts for nothing: its results are 0.

    Returns:
        Four tensors (rows), float32. m is 0 where all logits are -inf. The target's logit is 0 where another rank holds
        it, and not a number for a target that no rank holds.
    """
    wide = logits.float()
    kept = target != ignore_index
    zero = torch.zeros((), dtype=torch.float32, device=logits.device)
    local = target - first
    held = (local >= 0) & (local < logits.shape[1]) & kept
    picked = torch.where(held, wide.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0], zero)
    picked = torch.where(kept & ((target < 0) | (target >= classes)), torch.nan, picked)
    highest = wide.amax(1)
    highest = torch.where(kept & (highest != -torch.inf), highest, zero)
    logsum = (wide - highest[:, None]).exp().sum(1).log()
    return highest, torch.where(kept, logsum, zero), picked, torch.where(kept, wide.sum(1), zero)


def backward(
    dlogsum: Tensor,
    dpicked: Tensor,
    dtotal: Tensor,
    logits: Tensor,
    target: Tensor,
    highest: Tensor,
    logsum: Tensor,
    first: int,
    ignore_index: int,
) -> Tensor:
    """The gradient dz_v = exp(z_v - lse)·dlogsum + [v = t]·dpicked + dtotal, and 0 in ignored rows.

    m is a constant to this derivative: what it adds to the logarithm, the loss takes off again.

    Args:
        dlogsum, dpicked, dtotal: (rows), float32, the gradients of the results of `forward`.
        logits, target, first, ignore_index: as there.
        highest, logsum: (rows), float32, as they were returned.

    Returns:
        A tensor of the logits' shape and dtype.
    """
    wide = logits.float()
    zero = torch.zeros((), dtype=torch.float32, device=logits.device)
    share = torch.where(wide == -torch.inf, zero, torch.exp(wide - highest[:, None] - logsum[:, None]))
    at_target = torch.arange(logits.shape[1], device=logits.device)[None, :] == (target - first)[:, None]
    gradient = share * dlogsum[:, None] + torch.where(at_target, dpicked[:, None], zero) + dtotal[:, None]
    return torch.where((target != ignore_index)[:, None], gradient, zero).to(logits.dtype).contiguous()
