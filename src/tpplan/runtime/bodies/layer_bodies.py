"""Layers whose split bodies are written out: columns, rows, and embedding tables split by rows.

in:  a layer's input, and this rank's parts of its weight and bias
out: its result, as its program has it

    column:  X (…, in)         ->  y (…, out / size)
    row:     X (…, in / size)  ->  y (…, out)      the products are summed, then the bias is added once
    table:   ids (…)           ->  (…, hidden)     ids that another rank holds give zero rows, and rows are summed

These are functions of the package, not closures: equal layers share their compiled graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tpplan.compat.dynamo import is_traced
from tpplan.compat.modes import without_function_modes
from tpplan.runtime.modules.writes import stock_class
from tpplan.runtime.ranks.reshard import Move

if TYPE_CHECKING:
    from tpplan.runtime.modules.module_runtime import ModuleRuntime

Layer = Callable[[nn.Module, "ModuleRuntime", Tensor, Tensor, Tensor | None, Move | None], Tensor]


def layer_of(style: str | None, module: nn.Module) -> Layer | None:
    """The written body of a module that the plan gives this style; None for one that runs its own."""
    stock = stock_class(module)
    if style == "colwise" and stock.forward is nn.Linear.forward:
        return column
    if style == "rowwise":
        return row
    return table if style == "vocab" and issubclass(stock, nn.Embedding) else None


def column(
    module: nn.Module, runtime: ModuleRuntime, input: Tensor, weight: Tensor, bias: Tensor | None, leave: Move | None
) -> Tensor:
    """A linear layer split by columns."""
    result = product(input, weight, bias, runtime.transposed)
    return result if leave is None else leave(result)


def product(input: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """A linear layer's product; `transposed` for a weight of (inputs, outputs), as transformers' Conv1D has it."""
    if not transposed:
        return functional.linear(input, weight, bias)
    if bias is None:
        return input @ weight
    return torch.addmm(bias, input.reshape(-1, input.shape[-1]), weight).view(*input.shape[:-1], weight.shape[1])


def row(
    module: nn.Module, runtime: ModuleRuntime, input: Tensor, weight: Tensor, bias: Tensor | None, leave: Move | None
) -> Tensor:
    """A linear layer split by rows."""
    result = None
    if not is_traced() and runtime.scattered is not None:
        result = runtime.scattered(input, weight)
    if result is not None:
        leave = None
    else:
        result = product(input, weight, None, runtime.transposed)
    if leave is not None:
        result = leave(result)
    return result if bias is None else result + bias.to(result.dtype)  # autocast makes products of another dtype


def table(
    module: nn.Module, runtime: ModuleRuntime, input: Tensor, weight: Tensor, bias: Tensor | None, leave: Move | None
) -> Tensor:
    """A table split by rows."""
    rows, (first_row, all_rows) = weight.shape[0], runtime.table
    local = input - first_row
    index = local.clamp(0, max(rows - 1, 0))
    foreign = index != local
    # An id that no rank holds stays out of every rank's range, so that all of them raise as the stock table does.
    index = index.masked_fill(input.clamp(0, all_rows - 1) != input, -1)
    padding: int | None = module.__dict__["padding_idx"]
    if padding is not None:
        padding -= first_row
        padding = padding if 0 <= padding < rows else None
    if rows:
        result = _rows(module, runtime, index, weight, padding)
    else:  # a sum of no rows, whose gradient is an empty table's
        result = _rows(module, runtime, index, weight.new_zeros(1, weight.shape[1]), None) + weight.sum(0)
    result = result.masked_fill(foreign.unsqueeze(-1), 0)
    return result if leave is None else leave(result)


def _rows(module: Any, runtime: ModuleRuntime, index: Tensor, weight: Tensor, padding: int | None) -> Tensor:
    """Rows of this rank's table, scaled as the stock class does."""
    stock = stock_class(module)
    if stock.forward is nn.Embedding.forward:
        return functional.embedding(index, weight, padding)
    own = module.__dict__
    before = {name: own[name] for name in ("padding_idx", "weight") if name in own}
    own["padding_idx"], own["weight"] = padding, weight
    try:
        with without_function_modes() if runtime.handed_out.watched else nullcontext():
            return stock.forward(module, index)
    finally:
        del own["weight"]
        own.update(before)


def without_gradients(layer: Layer, module: nn.Module) -> Layer:
    """A layer's body in calls that record no gradient.

    Of a table, which ids other ranks hold is looked up in a table of all ids. An id that no rank holds raises there, on
    all ranks.
    """
    if layer is not table or stock_class(module).forward is not nn.Embedding.forward:
        return layer
    embedding = torch.embedding
    foreign = places = None

    def looked_up(
        module: nn.Module,
        runtime: ModuleRuntime,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        leave: Move | None,
    ) -> Tensor:
        nonlocal foreign, places
        rows, (first_row, all_rows) = weight.shape[0], runtime.table
        if not rows:
            return table(module, runtime, input, weight, bias, leave)
        if foreign is None or places is None or foreign.device != weight.device:
            rows_here = torch.arange(-first_row, all_rows - first_row, device=weight.device)
            places = rows_here.clamp(0, rows - 1)
            foreign = (places != rows_here).unsqueeze(-1)
        outside = embedding(foreign, input)  # raises for ids below zero, too, which `take` counts from the end
        here = places.take(input if input.dtype is torch.long else input.long())
        result = embedding(weight, here).masked_fill_(outside, 0)
        return result if leave is None else leave(result)

    return looked_up


__all__ = ["Layer", "column", "layer_of", "product", "row", "table", "without_gradients"]
