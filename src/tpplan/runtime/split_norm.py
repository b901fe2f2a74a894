"""Split norms: a norm over features that are split over the ranks, of which each normalizes its own part.

in:  a `SplitNorm`, and how its statistics are summed
out: a body that stands in for the module's own

    y = x / sqrt(Σ_ranks Σ x² / n + eps) · w    (RMSNorm, Zhang & Sennrich 2019; LayerNorm, Ba et al. 2016, likewise)

Each rank's part counts in the statistics of all, so that their gradients are summed as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tpplan.compiler.program import SplitNorm
from tpplan.runtime.kernels import Body, Stock
from tpplan.runtime.reshard import Move


def split_norm_body(norm: SplitNorm, module: nn.Module, reduce: Move, size: int) -> Body:
    """The body of `module`, whose statistics `reduce` sums over `size` ranks.

    Where several ranks hold the same features, all statistics count these as often, and the mean comes out right.
    """

    def body(stock: Stock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (x,) = (*args, *kwargs.values())
        return normalized(x)

    def normalized(x: Tensor) -> Tensor:
        weight, bias = (None if name is None else getattr(module, name) for name in (norm.weight, norm.bias))
        wide = x.float() if x.dtype.itemsize < 4 else x
        count = x.shape[-1] * size
        if norm.centred:
            wide = wide - reduce(wide.sum(-1, keepdim=True)) / count
        result = wide * torch.rsqrt(reduce(wide.square().sum(-1, keepdim=True)) / count + norm.eps)
        if norm.cast == "before":
            result = result.to(x.dtype)
        if weight is not None:
            result = result * (weight + norm.offset if norm.offset else weight)
        if bias is not None:
            result = result + bias
        return result if norm.cast == "before" else result.to(x.dtype)

    return body


__all__ = ["split_norm_body"]
