"""Layers whose split bodies are written out: columns, rows, and embedding tables split by rows."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from tpplan.compat.dynamo import active_compiler, is_traced, skip_frame
from tpplan.compat.modes import without_function_modes
from tpplan.runtime.around.outside_calls import call_alone
from tpplan.runtime.around.standalone import starts_alone
from tpplan.runtime.compiled.compiled_calls import trace_call
from tpplan.runtime.compiled.compiled_entry import call_compiled
from tpplan.runtime.modules.module_runtime import RUNTIME, ModuleRuntime
from tpplan.runtime.modules.sharded_modules import ShardedModule
from tpplan.runtime.modules.writes import stock_class


class ShardedLinear(ShardedModule):
    """A linear layer split by columns, its body written out to spare the detour over attributes."""

    def forward(self, input: Tensor) -> Tensor:
        """X (…, in) to y (…, out / size)."""
        if is_traced():
            return trace_call(self, (input,), {})
        runtime: ModuleRuntime = self.__dict__[RUNTIME]
        if runtime.walked:
            return super().forward(input)
        if active_compiler() is not None:
            return call_compiled(self, (input,), {})
        if runtime.handed_out.shards is None and starts_alone(runtime.handed_out):
            return call_alone(self, ShardedLinear.forward, (input,), {})
        if runtime.entries:
            input = runtime.entries[0].step(input)
        own: dict[str, Any] = self._parameters
        assert runtime.weight is not None
        bias = None if runtime.bias is None else runtime.bias(own["bias"])
        result = functional.linear(input, runtime.weight(own["weight"]), bias)
        return runtime.exits[0].step(result) if runtime.exits else result


class ReducedLinear(ShardedModule):
    """A linear layer split by rows: the products are reduced, then the bias is added once."""

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """X (…, in / size) to y (…, out)."""
        if is_traced():
            return trace_call(self, args, kwargs)
        runtime: ModuleRuntime = self.__dict__[RUNTIME]
        if runtime.walked:
            return super().forward(*args, **kwargs)
        if active_compiler() is not None:
            return call_compiled(self, args, kwargs)
        (input,) = (*args, *kwargs.values())  # whatever its name is
        if runtime.handed_out.shards is None and starts_alone(runtime.handed_out):
            return call_alone(self, ReducedLinear.forward, (input,), {})
        if runtime.entries:
            input = runtime.entries[0].step(input)
        own: dict[str, Any] = self._parameters
        assert runtime.weight is not None
        weight, bias = runtime.weight(own["weight"]), None if runtime.bias is None else runtime.bias(own["bias"])
        return self._product(runtime, input, weight, bias)

    def _on_shards(self, *args: Any, **kwargs: Any) -> Any:
        runtime: ModuleRuntime = self.__dict__[RUNTIME]
        if runtime.walked:
            return super()._on_shards(*args, **kwargs)
        (input,) = (*args, *kwargs.values())
        if runtime.entries:
            input = runtime.entries[0].step(input)
        bias = None if runtime.bias is None else self.__dict__["bias"]
        return self._product(runtime, input, self.__dict__["weight"], bias)

    def _product(self, runtime: ModuleRuntime, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result = input @ weight if runtime.transposed else functional.linear(input, weight)
        if runtime.exits:
            result = runtime.exits[0].step(result)
        return result if bias is None else result + bias.to(result.dtype)  # autocast makes products of another dtype


class VocabularyEmbedding(ShardedModule):
    """An embedding table split by rows: ids that another rank holds give zero rows, and the ranks' rows are summed."""

    def forward(self, input: Tensor) -> Tensor:
        """Ids (…) to rows (…, hidden)."""
        if is_traced():
            return trace_call(self, (input,), {})
        runtime: ModuleRuntime = self.__dict__[RUNTIME]
        if runtime.walked:
            return super().forward(input)
        if active_compiler() is not None:
            return call_compiled(self, (input,), {})
        if runtime.handed_out.shards is None and starts_alone(runtime.handed_out):
            return call_alone(self, VocabularyEmbedding.forward, (input,), {})
        assert runtime.weight is not None
        return self._looked_up(runtime, input, runtime.weight(self._parameters["weight"]))  # pyright: ignore

    def _on_shards(self, *args: Any, **kwargs: Any) -> Any:
        runtime: ModuleRuntime = self.__dict__[RUNTIME]
        if runtime.walked:
            return super()._on_shards(*args, **kwargs)
        (input,) = (*args, *kwargs.values())
        return self._looked_up(runtime, input, self.__dict__["weight"])

    def _looked_up(self, runtime: ModuleRuntime, input: Tensor, table: Tensor) -> Tensor:
        rows, (first_row, all_rows) = table.shape[0], runtime.table
        local = input - first_row
        index = local.clamp(0, max(rows - 1, 0))
        foreign = index != local
        # An id that no rank holds stays out of every rank's range, so that all of them raise as the stock table does.
        index = index.masked_fill(input.clamp(0, all_rows - 1) != input, -1)
        padding: int | None = self.__dict__["padding_idx"]
        if padding is not None:
            padding -= first_row
            padding = padding if 0 <= padding < rows else None
        if rows:
            result = self._rows(runtime, index, table, padding)
        else:  # a sum of no rows, whose gradient is an empty table's
            result = self._rows(runtime, index, table.new_zeros(1, table.shape[1]), None) + table.sum(0)
        result = result.masked_fill(foreign.unsqueeze(-1), 0)
        return runtime.exits[0].step(result) if runtime.exits else result

    def _rows(self, runtime: ModuleRuntime, index: Tensor, table: Tensor, padding: int | None) -> Tensor:
        """Rows of this rank's table, scaled as the stock class does."""
        stock = stock_class(self)
        if stock.forward is nn.Embedding.forward:
            return functional.embedding(index, table, padding)
        own = self.__dict__
        before = {name: own[name] for name in ("padding_idx", "weight") if name in own}
        own["padding_idx"], own["weight"] = padding, table
        try:
            with without_function_modes() if runtime.handed_out.watched else nullcontext():
                return stock.forward(self, index)
        finally:
            del own["weight"]
            own.update(before)


for _function in (ShardedLinear.forward, ReducedLinear.forward, VocabularyEmbedding.forward):
    skip_frame(_function)

__all__ = ["ReducedLinear", "ShardedLinear", "VocabularyEmbedding"]
