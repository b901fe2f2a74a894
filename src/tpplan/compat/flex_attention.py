# pyright: reportPrivateUsage=false
"""flex_attention as a higher-order operator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import _permute_strides, flex_attention

from tpplan.compat.dynamo import _STANCE

# -- flex attention ---------------------------------------------------------------------------------------------------
FLEX_ATTENTION: Any = flex_attention
"""What a function mode sees of `torch.nn.attention.flex_attention`, of whatever version, compiled or not."""


def flex_function(function: Callable[..., Tensor], arguments: Sequence[Tensor]) -> Tensor:
    """What `flex_attention` makes of one score by a function of the user's, which may index tensors by tensors.

    For every torch.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # it takes seconds

    with TransformGetItemToIndex():
        return function(*arguments)


def run_flex_attention(args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Call the operator where nothing else is compiled.

    As it is written it holds all scores in memory, and what its functions read gets no gradient. For every torch.
    """
    from torch._dynamo.exc import BackendCompilerFailed  # it takes a second

    with _STANCE.taken(False):
        if args[0].is_cuda:
            try:
                return _compiled_flex_attention(True)(*args[:_FLEX_ARGUMENTS], **keywords)
            except BackendCompilerFailed:  # inductor has no kernel for some sizes
                pass
        return _compiled_flex_attention(False)(*args[:_FLEX_ARGUMENTS], **keywords)


_FLEX_ARGUMENTS = 7  # behind these come tensors that Dynamo has taken out of functions, which are none outside of it


@functools.cache
def _compiled_flex_attention(fused: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return FLEX_ATTENTION(*args, **kwargs)

    return torch.compile(call, backend="inductor" if fused else "eager", fullgraph=True)


def flex_strides(made: Tensor, query: Tensor) -> Tensor:
    """A result of `flex_attention`, which lies in memory as its queries do. For every torch."""
    return _permute_strides(made, query.stride())
