"""Look-ups in a table: the calls of torch whose table may be split by rows over the ranks.

in:  a call of torch, as a function mode sees it
out: a `ClassCall`, as of the losses in `class_functions`; the rows stand for its classes

    embedding(ids, table, padding_idx=0)        ->   ClassCall(LOOK_UP, table, 0, target=ids, padding=0)
    table[ids], table.index_select(0, ids)      ->   ClassCall(LOOK_UP, table, 0, target=ids)
    embedding_bag(ids, table, starts)           ->   ClassCall(BAG, table, 0, target=ids, offsets=starts, …)

Most bodies index something, and a table that is a module of its own has a body of the runtime's. So look-ups are read
so in bodies alone that look up in a table which the plan splits by rows (`Trace.looking`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tpplan.compat.schemas import OpOverload
from tpplan.compiler.ir.class_functions import CLASS_LIBRARY, ClassCall

CLASS_LIBRARY.define("look_up(Tensor input, int dim, Tensor target, int? padding, bool from_the_end) -> Tensor")
CLASS_LIBRARY.define(
    "bag(Tensor input, int dim, Tensor target, Tensor? offsets, Tensor? weight, str reduction, bool last_offset, "
    "int? padding) -> Tensor"
)
LOOK_UP: OpOverload = torch.ops.tpplan_classes.look_up.default
BAG: OpOverload = torch.ops.tpplan_classes.bag.default
LOOK_UPS = frozenset((LOOK_UP, BAG))
LOOK_UP_NAMES = frozenset(operation.name().partition("::")[2] for operation in LOOK_UPS)
_WHOLE_NUMBERS = frozenset((torch.int64, torch.int32))


def look_up_call(func: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]) -> ClassCall | None:
    """What a call of torch looks up in a table; None for any other call, or one that needs all rows."""
    read = _READERS.get(func)
    if read is None:
        return None
    try:
        return read(*args, **keywords)
    except (TypeError, IndexError):
        return None


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> ClassCall | None:
    whole = max_norm is not None or scale_grad_by_freq or sparse
    return None if whole else _rows(weight, input, padding_idx)


def _torch_embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> ClassCall | None:
    padding = None if padding_idx == -1 else padding_idx
    return None if scale_grad_by_freq or sparse else _rows(weight, indices, padding)


def _indexed(input: Tensor, index: Any) -> ClassCall | None:
    return _rows(input, index, from_the_end=True)


def _selected(input: Tensor, dim: int, index: Tensor) -> ClassCall | None:
    return _rows(input, index) if dim in (0, -2) and index.dim() == 1 else None


def _rows(table: Tensor, ids: Any, padding: int | None = None, from_the_end: bool = False) -> ClassCall | None:
    if not _is_table(table) or not isinstance(ids, Tensor) or ids.dtype not in _WHOLE_NUMBERS:
        return None
    return ClassCall(LOOK_UP, table, 0, ids, padding=padding, from_the_end=from_the_end)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> ClassCall | None:
    whole = max_norm is not None or scale_grad_by_freq or sparse
    if whole or not _is_table(weight) or input.dtype not in _WHOLE_NUMBERS or mode not in ("sum", "mean", "max"):
        return None
    return ClassCall(
        BAG, weight, 0, input, per_sample_weights, mode, padding=padding_idx, offsets=offsets,
        last_offset=include_last_offset,
    )  # fmt: skip


def _is_table(table: Tensor) -> bool:
    return table.dim() == 2 and table.is_floating_point()


_READERS: dict[Any, Callable[..., ClassCall | None]] = {
    functional.embedding: _embedding,
    torch.embedding: _torch_embedding,
    functional.embedding_bag: _embedding_bag,
    Tensor.__getitem__: _indexed,
    torch.index_select: _selected,
    Tensor.index_select: _selected,
}
LOOK_UP_FUNCTIONS = frozenset(_READERS)


def call_look_up(table: Tensor, dim: int, ids: Tensor, padding: int | None, from_the_end: bool) -> Tensor:
    """The stock function, of an operation's arguments."""
    return table[ids] if from_the_end else functional.embedding(ids, table, padding)


def call_bag(
    table: Tensor, dim: int, ids: Tensor, offsets: Tensor | None, weights: Tensor | None, mode: str, last_offset: bool,
    padding: int | None,
) -> Tensor:  # fmt: skip
    """The stock function, of an operation's arguments."""
    return functional.embedding_bag(
        ids, table, offsets, mode=mode, per_sample_weights=weights, include_last_offset=last_offset, padding_idx=padding
    )


__all__ = [
    "BAG",
    "LOOK_UP",
    "LOOK_UPS",
    "LOOK_UP_FUNCTIONS",
    "LOOK_UP_NAMES",
    "call_bag",
    "call_look_up",
    "look_up_call",
]
