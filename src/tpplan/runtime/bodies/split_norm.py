"""Split norms: a norm over features that are split over the ranks, of which each normalizes its own part.

in:  a `SplitNorm`, and how its statistics are summed
out: a body that stands in for the module's own

    y = x / sqrt(Σ_ranks Σ x² / n + eps) · w    (RMSNorm, Zhang & Sennrich 2019; LayerNorm, Ba et al. 2016, likewise)

It may be gated: x · silu(z) for x, or y · silu(z) for y. Each rank's part counts in the statistics of all, so that
their gradients are summed as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tpplan.compiler.ir.replaced_bodies import SplitNorm
from tpplan.compiler.trace.signatures import argument_names
from tpplan.runtime.bodies.kernel_bodies import Body, Stock
from tpplan.runtime.modules.writes import stock_class
from tpplan.runtime.ranks.reshard import Move


def split_norm_body(
    norm: SplitNorm, module: nn.Module, modules: Mapping[str, nn.Module], reduce: Move, size: int
) -> Body:
    """The body of `module`, whose statistics `reduce` sums over `size` ranks.

    Where several ranks hold the same features, all statistics count these as often, and the mean comes out right.
    """
    names = argument_names(stock_class(module).forward)
    own_eps = getattr(module, "eps", norm.eps) is None  # torch's norms then take that of the dtype they compute in
    weight_at, bias_at = (_place(name, modules) for name in (norm.weight, norm.bias))

    def body(stock: Stock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        gate = None if norm.gate is None else given.pop(norm.gate)
        (x,) = (held for held in given.values() if isinstance(held, Tensor))
        if gate is None:
            return normalized(x)
        wide = functional.silu(widened(gate))
        return normalized(x, wide) if norm.gated_first else (normalized(x) * wide).to(x.dtype)

    def widened(x: Tensor) -> Tensor:
        return x.float() if x.dtype.itemsize < 4 or norm.narrows else x

    def normalized(x: Tensor, gate: Tensor | None = None) -> Tensor:
        weight, bias = (None if at is None else getattr(*at) for at in (weight_at, bias_at))
        wide = widened(x)
        wide = wide if gate is None else wide * gate
        count = x.shape[-1] * size
        if norm.centred:
            wide = wide - reduce(wide.sum(-1, keepdim=True)) / count
        eps = torch.finfo(wide.dtype).eps if own_eps else norm.eps
        result = wide * torch.rsqrt(reduce(wide.square().sum(-1, keepdim=True)) / count + eps)
        if norm.cast == "before":
            result = result.to(x.dtype)
        if weight is not None:
            result = result * (weight + norm.offset if norm.offset else weight)
        if bias is not None:
            result = result + bias
        return result if norm.cast == "before" else result.to(x.dtype)

    return body


def _place(name: str | None, modules: Mapping[str, nn.Module]) -> tuple[nn.Module, str] | None:
    """A parameter's module and its name there."""
    if name is None:
        return None
    owner, _, leaf = name.rpartition(".")
    return modules[owner], leaf


__all__ = ["split_norm_body"]
