"""Attention as one kernel: what a fused kernel makes and keeps, forward and backward, on shapes.

On `meta` torch takes the formula, which makes all scores. A fused kernel keeps query, key, value, result, and one
number a row (Dao et al., "FlashAttention", 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class AttentionObserver(Protocol):
    """Is told of each kernel."""

    def attention(self, shapes: tuple[Tensor, ...], causal: bool, backward: bool) -> None:
        """A kernel ran, with these query, key and value."""
        ...


class _FusedKernel(torch.autograd.Function):
    """Attention by shapes."""

    @staticmethod
    def forward(
        ctx: Any, observer: AttentionObserver, causal: bool, query: Tensor, key: Tensor, value: Tensor, bias: Any
    ) -> Tensor:
        outer, heads, rows = query.shape[:-3], query.shape[-3], query.shape[-2]
        result = query.new_empty(*outer, rows, heads, value.shape[-1]).transpose(-3, -2)  # as kernels lay it
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, bias, result, sums)
        ctx.told = (observer, causal)
        observer.attention((query, key, value), causal, False)
        return result

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias = ctx.saved_tensors[:4]
        observer, causal = ctx.told
        made = [torch.empty_like(held) for held in (query, key, value)]
        observer.attention((query, key, value), causal, True)
        return None, None, *made, None if bias is None or not ctx.needs_input_grad[5] else torch.empty_like(bias)


class KernelAttention(TorchFunctionMode):
    """Makes of each attention one kernel, and tells an observer."""

    def __init__(self, observer: AttentionObserver) -> None:
        """Tell `observer`."""
        super().__init__()
        self._observer = observer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self._fused(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _fused(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, **_: Any,
    ) -> Tensor:  # fmt: skip
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:
            bias = query.new_empty(bias.shape)
        return _FusedKernel.apply(self._observer, is_causal, query, key, value, bias)  # pyright: ignore


__all__ = ["AttentionObserver", "KernelAttention"]
