"""Registering operators with torch: schema, implementation, fake kernel, autograd and sharding rule in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, Placement

from tpplan.compat.propagator import register_sharding
from tpplan.compat.schemas import OpOverload

NAMESPACE = "tpplan"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")

ROWS = "rows"
"""A tensor that is sharded as the rows are: the input, the result, the statistics."""
COLUMNS = "columns"
"""One that belongs to the columns of the last dim: a weight or a bias. Replicated while rows are sharded."""
COLUMN_SUMS = "column sums"
"""The gradient of such a tensor: partial while rows are sharded."""


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
) -> OpOverload:
    """Define the operator `tpplan::schema` for the CPU and for GPUs; returns it."""
    name = schema.partition("(")[0]
    qualified = f"{NAMESPACE}::{name}"
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def no_second_backward(context: Any, *gradients: Any) -> None:
    """The derivative of a backward, which no kernel computes."""
    raise NotImplementedError(
        "the kernels of tpplan have no second derivative; pass backend='torch' where a gradient is differentiated again"
    )


def shard_rows(
    operator: OpOverload,
    results: tuple[str, ...],
    tensors: tuple[str, ...],
    dims_at: int | None = None,
    whole_dims: int = 0,
    columns_too: bool = False,
) -> None:
    """Tell DTensor how `operator` may be sharded: along any dim that isn't normalized over.

    Args:
        operator: the operator; its tensors come before its other arguments.
        results, tensors: the role of each result and of each tensor argument.
        dims_at: the position of an argument that says how many trailing dims of the first tensor stay whole.
        whole_dims: how many do, if no argument says it.
        columns_too: whether the last dim may be sharded together with the tensors of the columns.
    """

    def rule(*arguments: Any) -> list[tuple[list[Placement | None], list[Placement | None]]]:
        shape = arguments[0].shape
        whole = whole_dims if dims_at is None else arguments[dims_at]
        last = len(shape) - 1 if columns_too else -1
        acceptable: list[tuple[list[Placement | None], list[Placement | None]]] = []
        for dim in (None, *range(len(shape) - whole)):
            placed = [_placement(role, dim, dim == last) for role in results]
            given: list[Placement | None] = [None for _ in arguments]
            for position, role in enumerate(tensors):
                if arguments[position] is not None:
                    given[position] = _placement(role, dim, dim == last)
            acceptable.append((placed, given))
        return acceptable

    register_sharding(operator, rule)


def _placement(role: str, dim: int | None, is_columns: bool) -> Placement:
    if dim is None:
        return Replicate()
    if role == ROWS:
        return Shard(dim)
    if is_columns:
        return Shard(0)
    return Partial() if role == COLUMN_SUMS else Replicate()
