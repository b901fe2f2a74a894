# pyright: reportPrivateUsage=false
"""Classes of tensors that compute otherwise than plain ones."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def without_tensor_classes() -> AbstractContextManager[Any]:
    """A block whose calls no class of tensors sees. For every torch."""
    return cast("AbstractContextManager[Any]", torch._C.DisableTorchFunctionSubclass())


def wrapper_like(kind: type[Any], shown: Tensor, device: torch.device) -> Any:
    """A tensor of class `kind` without memory, of the geometry of `shown`, on `device`. For every torch."""
    geometry = {"strides": shown.stride(), "storage_offset": shown.storage_offset(), "dtype": shown.dtype}
    return Tensor._make_wrapper_subclass(kind, shown.shape, device=device, **geometry)  # pyright: ignore


OFF: Any = cast("Any", torch._C)._disabled_torch_function_impl
"""As `__torch_function__` of a class of tensors whose operations give plain ones."""


def made_wrapper(
    kind: type[Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    stride: Sequence[int] | None = None,
) -> Tensor:
    """A tensor of a class of its own without numbers of its own, made without the class's constructor.

    For every torch.
    """
    strides = None if stride is None else tuple(stride)
    return Tensor._make_wrapper_subclass(kind, tuple(shape), strides=strides, dtype=dtype, device=device)  # pyright: ignore


def takes_apart(tensor: Tensor) -> bool:
    """Whether torch can take a tensor apart into others, as it can one of quantised numbers; DTensors don't count.

    For every torch.
    """
    return not isinstance(tensor, DTensor) and is_traceable_wrapper_subclass(tensor)


def class_to_ask(types: Iterable[type[Any]]) -> Any:
    """The class of tensors that says what a function does with its tensors, which torch can take apart; None for none.

    Within what it says, it isn't asked again. For every torch.
    """
    if not types or not torch._C._is_torch_function_enabled():  # pyright: ignore
        return None
    return next((kind for kind in types if hasattr(kind, "__tensor_flatten__") and not issubclass(kind, DTensor)), None)


# What a class of tensors may have of its own and compute as any other: how tensors are made, shown, copied and moved.
_AS_ANY_CLASS = frozenset(
    f"__{name}__"
    for name in (
        "new", "init", "init_subclass", "repr", "str", "format", "hash", "dir", "copy", "deepcopy", "reduce",
        "reduce_ex", "getstate", "setstate", "module", "doc", "dict", "weakref", "annotations", "slots",
        "class_getitem",
    )
) | {"to", "cpu", "cuda"}  # fmt: skip


@functools.cache
def computes_otherwise(kind: type[Tensor]) -> bool:
    """Whether a class of tensors says itself what operations on its tensors compute, or what their methods do.

    A fake tensor computes what a plain one does, without its numbers. For every torch.
    """
    known = (Tensor, nn.Parameter, nn.Buffer, DTensor)
    if kind in known or f"{kind.__module__}.{kind.__name__}" == "torch._subclasses.fake_tensor.FakeTensor":
        return False
    own = [held for held in kind.__mro__ if not any(issubclass(plain, held) for plain in known)]
    said = {name for held in own for name in vars(held) if hasattr(Tensor, name) and name not in _AS_ANY_CLASS}
    plain = {"__torch_function__": nn.Parameter, "__torch_dispatch__": Tensor}  # classes in which these are off
    return any(getattr(kind, name) is not getattr(plain.get(name), name, None) for name in said)
