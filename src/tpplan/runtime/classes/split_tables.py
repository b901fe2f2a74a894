"""Look-ups in a table of whose rows each rank has a part.

in:  this rank's rows, the numbers of rows among those of all ranks
out: this rank's term of what torch's function makes of the whole table

    table[ids]:          row_i if this rank has it, else 0
    bag of ids, sum:     Σ_i w_i row_i over those that it has
    bag of ids, mean:    the same, by the number of all ids in the bag

A row that another rank has counts as zeros, and gets no gradient here. Of the weights w_i each rank makes the gradient
of those whose rows it has.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tpplan.compiler.ir.class_functions import ClassCall
from tpplan.runtime.classes.class_rows import ClassPart


def rows(call: ClassCall, part: ClassPart) -> Tensor:
    """This rank's term of a look-up."""
    ids, padding = _ids(call), call.padding
    if call.from_the_end:
        ids = torch.where(ids < 0, ids + part.classes, ids)
    if padding is not None:
        padding = range(part.classes)[padding] - part.first
        padding = padding if 0 <= padding < part.count else None
    return _own_rows(call.input, ids, part, padding)


def bags(call: ClassCall, part: ClassPart) -> Tensor:
    """This rank's term of rows that are reduced bag by bag."""
    ids, weights, offsets = _ids(call), call.weight, call.offsets
    if ids.dim() == 2:
        offsets = torch.arange(0, ids.numel(), ids.shape[1], device=ids.device)
        ids, weights = ids.reshape(-1), None if weights is None else weights.reshape(-1)
    found = _own_rows(call.input, ids, part, None)
    kept = None if call.padding is None else ids != range(part.classes)[call.padding]
    if kept is not None:
        found = found.masked_fill(~kept.unsqueeze(-1), 0)
    each, last = torch.arange(len(ids), device=ids.device), call.last_offset

    def reduced(of: Tensor, mode: str, by: Tensor | None = None) -> Tensor:
        return functional.embedding_bag(each, of, offsets, mode=mode, per_sample_weights=by, include_last_offset=last)

    if call.reduction == "sum" or kept is None:
        return reduced(found, call.reduction, weights)
    count = reduced(kept.to(found.dtype).unsqueeze(-1), "sum")
    return reduced(found, "sum") / count.clamp(min=1)


def _ids(call: ClassCall) -> Tensor:
    assert call.target is not None
    return call.target


def _own_rows(table: Tensor, ids: Tensor, part: ClassPart, padding: int | None) -> Tensor:
    local = ids - part.first
    index = local.clamp(0, max(part.count - 1, 0))
    foreign = index != local
    # A number that no rank has stays out of every rank's range, so that all of them raise as the stock table does.
    index = index.masked_fill((ids < 0) | (ids >= part.classes), -1)
    if part.count:
        found = functional.embedding(index, table, padding)
    else:  # a sum of no rows, whose gradient is an empty table's
        found = functional.embedding(index, table.new_zeros(1, table.shape[1])) + table.sum(0)
    return found.masked_fill(foreign.unsqueeze(-1), 0)


__all__ = ["bags", "rows"]
