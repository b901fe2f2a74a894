"""Storage: the memory that a run takes for what it computes, counted as tensors are made and freed.

A storage counts from the operation that makes it until Python frees the last tensor of it, on `meta` as on any device.
What a kernel needs inside of an operation isn't seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tpplan.compat.modes import TorchDispatchMode
from tpplan.compat.tensors import storage_key
from tpplan.compiler.ir.pytree import leaves
from tpplan.compiler.ir.trace import Geometry
from tpplan.compiler.trace.recorder import Recorder


class StorageMeter(TorchDispatchMode):
    """Counts the bytes of the storages that operations make while this mode is on.

    Attributes:
        live: the bytes that there are.
        peak: the most that there were.
    """

    def __init__(self, there: Iterable[Tensor] = ()) -> None:
        """Count the storages of `there` as well, which the run may free, such as an old cache."""
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()
        for tensor in there:
            self._add(tensor)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage_key(tensor), storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        result = func(*args, **keywords)
        read = {storage_key(tensor) for tensor in _tensors((args, keywords))}
        for tensor in _tensors(result):
            if storage_key(tensor) not in read:
                self._add(tensor)
        return result


class FusedAttention(TorchFunctionMode):
    """Makes of an attention only what a fused kernel makes; on `meta` torch takes the formula, with all scores."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _fused(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _fused(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    bias = query.new_empty(attn_mask.shape) if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
    sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
    result = query.new_empty(*query.shape[:-1], value.shape[-1])
    del bias, sums
    return result


class Forgetful(Recorder):
    """Keeps no tensor that it has met."""

    def _new_value(
        self,
        tensor: Tensor,
        geometry: Geometry,
        differentiable: bool,
        storage_of: int | None,
        numbers: Tensor | None = None,
    ) -> int:
        value = super()._new_value(tensor, geometry, differentiable, storage_of, numbers)
        self.alive.pop()
        weakref.finalize(tensor, self._identity.pop, id(tensor), None)
        return value


def _tensors(held: Any) -> Iterator[Tensor]:
    return (item for _, item in leaves(held) if isinstance(item, Tensor))


__all__ = ["Forgetful", "FusedAttention", "StorageMeter"]
