# pyright: reportPrivateUsage=false
"""Tensors without numbers, on any device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode


def fake_tensors() -> AbstractContextManager[object]:
    """A block in which tensors are made without numbers, on whatever device they say that they lie on.

    For every torch.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)
"""What a fake tensor raises that is asked for a number."""


def fake_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> Any:
    """What the forward of a module on `meta` would return for such arguments on `device`, under autocast as well.

    For every torch.
    """

    class Forward(nn.Module):
        """Runs the forward, without the hooks around it."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner.forward(*args, **kwargs)

    def like(held: Any) -> Any:
        if not isinstance(held, Tensor):
            return held
        return torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device=device)

    if device == "meta":
        return module.forward(*map(like, args), **{name: like(held) for name, held in kwargs.items()})
    with FakeTensorMode():
        args, kwargs = tuple(map(like, args)), {name: like(held) for name, held in kwargs.items()}
        stored = (*module.named_parameters(), *module.named_buffers())
        return torch.func.functional_call(Forward(), {f"inner.{n}": like(t) for n, t in stored}, args, kwargs)
