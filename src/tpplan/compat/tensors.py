# pyright: reportPrivateUsage=false
"""Tensors: their memory, versions, names, gradients and references."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

READ_VERSION: Any = cast("Any", Tensor)._version.__get__
"""What a function mode sees of a body that reads how often a tensor was written to."""


MEMORY_OF_OTHERS: dict[Any, str] = {
    cast("Any", Tensor)._base.__get__: "_base",
    cast("Any", Tensor)._is_view: "_is_view()",
}
"""What a function mode sees of a body that asks whether a tensor has the memory of another one. For every torch."""


def storage_key(tensor: Tensor) -> int:
    """What tells a tensor's memory from all other memory, while it is alive. For every torch."""
    functorch: Any = cast("Any", torch._C)._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()._cdata


def memory_span(held: Any) -> tuple[int, int] | None:
    """Where the numbers of a plain tensor, or of an array of numpy's, begin and end; None if they have no addresses.

    For every torch.
    """
    shape: Sequence[int] = getattr(held, "shape", ())
    if isinstance(held, numpy.ndarray):
        first, steps = held.ctypes.data, held.strides
    elif type(held) in (Tensor, nn.Parameter) and held.layout is torch.strided and not held.is_meta:
        first, steps = held.data_ptr(), [stride * held.itemsize for stride in held.stride()]
    else:
        return None
    ways = [(size - 1) * step for size, step in zip(shape, steps, strict=True)]
    low, high = (sum(way for way in ways if (way < 0) is below) for below in (True, False))
    return (first + low, first + high + int(held.itemsize)) if 0 not in shape else None


def has_own_memory(tensor: Tensor) -> bool:
    """Whether no other tensor has the memory of a plain one, and no array can. For every torch."""
    storage = tensor.untyped_storage()
    # Held by the tensor and by `storage`; one that has shown an array, or was made of one, can't be resized.
    # What DLPack gives others holds the tensor.
    alone = use_count(tensor) == 1 and cast("Any", torch._C)._storage_Use_Count(storage._cdata) == 2
    return alone and storage.resizable()


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor stands for a batch of them, as gradients do under `is_grads_batched=True`. For every torch."""
    return cast("Any", torch._C)._functorch.is_legacy_batchedtensor(tensor)


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor of one-byte floats, which not every backend sends, as bytes; any other as it is. For every torch."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 and tensor.dtype.is_floating_point else tensor


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written to; None of one that was made in inference mode. For every torch."""
    return None if tensor.is_inference() else tensor._version


def buffer_versions(module: nn.Module) -> list[object]:
    """How often each buffer of a module and of those inside was written to, as far as is known. For every torch."""
    versions = map(version_of, module.buffers())
    return [object() if version is None else version for version in versions]


def foreach_norm(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> Sequence[Tensor]:
    """The norm of each of several tensors, computed in `dtype`. For every torch."""
    return cast("Any", torch)._foreach_norm(list(tensors), order, dtype=dtype) if tensors else ()


_DATA: Any = torch._C.TensorBase.data


_GRADIENT: Any = Tensor.grad


def gradient_of(parameter: Tensor) -> Tensor | None:
    """`parameter.grad`; of one that lies as its parameter without a call of Python's. For every torch."""
    held = _GRADIENT.__get__(parameter)
    return held if held is None or type(held) is type(parameter) else parameter.grad


def use_count(tensor: Tensor) -> int:
    """How many hold a tensor: Python, its views, and the graph of autograd that ends in it. For every torch."""
    return tensor._use_count()  # pyright: ignore


def base_of(held: object) -> Tensor | None:
    """The tensor of which an object is a view; None if it is no view. For every torch."""
    return held._base if issubclass(type(held), Tensor) else None  # pyright: ignore


def name_tensor(tensor: DTensor, name: str) -> None:
    """Let a DTensor, and what has its geometry and dtype, be known by a name. For every torch."""
    tensor._spec = copy.copy(tensor._spec)  # FSDP's have one for all that lie alike  # pyright: ignore
    tensor._spec.__dict__["tpplan_name"] = name  # pyright: ignore


def geometry_of(tensors: Iterable[DTensor]) -> list[Any]:
    """How DTensors lie, to be compared: quickly where nothing was changed. For every torch."""
    return [tensor._spec for tensor in tensors]  # pyright: ignore


def name_alike(tensor: DTensor, named: DTensor) -> None:
    """Let a DTensor that lies as another one does be known by its name. For every torch."""
    name = name_of(named)
    if name is not None and name_of(tensor) is None:
        name_tensor(tensor, name)


def mark_gathered(tensor: DTensor) -> None:
    """Let a DTensor, which has a name, and what has its geometry and dtype, be known as FSDP's for a forward.

    For every torch.
    """
    tensor._spec.__dict__["tpplan_gathered"] = True  # pyright: ignore


def is_gathered(tensor: DTensor) -> bool:
    """Whether a DTensor is what FSDP has gathered for a forward. For every torch."""
    return "tpplan_gathered" in tensor._spec.__dict__  # pyright: ignore


def name_of(tensor: DTensor) -> str | None:
    """The name by which a DTensor, or that of which it has the geometry, is known. For every torch."""
    return tensor._spec.__dict__.get("tpplan_name")  # pyright: ignore
