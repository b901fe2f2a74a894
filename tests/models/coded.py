"""Weights of classes of their own, as libraries quantise them: tensors that torch can take apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.quantised import bytes_of, int8, nibbles

aten = torch.ops.aten


class Coded(Tensor):
    """Numbers in codes and scales; what their class says is done with them, it says below autograd."""

    KEPT: ClassVar[tuple[str, ...]] = ("codes", "scales")
    ACROSS: ClassVar[tuple[str, ...]] = ()
    """What of these is cut with the columns, too."""
    codes: Tensor
    scales: Tensor
    block: tuple[int, int]

    @staticmethod
    def __new__(cls, block: tuple[int, int], **inner: Tensor) -> Coded:
        shape = cls.shape_of(inner["codes"])
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=inner["scales"].dtype, device=inner["codes"].device)  # pyright: ignore
        vars(made).update(inner, block=block)
        return made

    def __init__(self, block: tuple[int, int], **inner: Tensor) -> None:
        super().__init__()

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [*self.KEPT], self.block

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], block: Any, *_: object) -> Coded:
        return cls(block, **inner)

    @classmethod
    def drawn(cls, outputs: int, inputs: int) -> Coded:
        return cls((1, inputs), codes=int8(outputs, inputs), scales=torch.rand(outputs, 1) / 100)

    @staticmethod
    def shape_of(codes: Tensor) -> torch.Size:
        return codes.shape

    def numbers(self, dtype: torch.dtype) -> Tensor:
        assert self.block[1] == self.shape[1]
        return self.codes.to(dtype) * self.scales

    def each(self, change: Callable[[str, Tensor], Tensor], block: tuple[int, int] | None = None) -> Coded:
        return type(self)(block or self.block, **{name: change(name, getattr(self, name)) for name in self.KEPT})

    def sliced(self, dim: int, start: int, end: int) -> Coded:
        count = end - start

        def cut(_: str, held: Tensor) -> Tensor:
            per = held.shape[dim] / self.shape[dim]
            return held if held.shape[dim] == 1 else held.narrow(dim, int(start * per), int(count * per))

        block = (self.block[0], count) if dim == 1 and self.block[1] == self.shape[1] else self.block
        return self.each(cut, block)

    def multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, self.numbers(x.dtype), bias)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            x, weight, bias = (*args, None)[:3]
            assert isinstance(weight, Coded) and isinstance(x, Tensor)
            return weight.multiplied(x, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = args[0]
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default, aten.alias.default):
            made = held.each(lambda _, inner: func(inner, **{k: v for k, v in (kwargs or {}).items() if k != "dtype"}))
            return made
        if func is aten.slice.Tensor:
            dim, start, end = args[1:4]
            return held.sliced(dim, start, min(end, held.shape[dim]))
        if func is aten.copy_.default:
            for name in held.KEPT:
                getattr(held, name).copy_(getattr(args[1], name))
            return held
        raise NotImplementedError(f"{cls.__name__} has no {func}")


class Below(Coded):
    """Dequantised below autograd, whatever is asked of it; it has no slices."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            return super().__torch_dispatch__(func, types, args, kwargs)
        plain = [held.codes.to(held.scales.dtype) * held.scales if isinstance(held, Coded) else held for held in args]
        return func(*plain, **(kwargs or {}))


class Unread(Coded):
    """Keeps zero points that its product doesn't read."""

    KEPT = ("codes", "scales", "zeros")

    @classmethod
    def drawn(cls, outputs: int, inputs: int) -> Coded:
        zeros = torch.arange(outputs)[:, None].to(torch.int8)
        return cls((1, inputs), codes=int8(outputs, inputs), scales=torch.rand(outputs, 1) / 100, zeros=zeros)


class Groups(Coded):
    """Two numbers to a byte, and a scale for each group of 8 inputs."""

    @classmethod
    def drawn(cls, outputs: int, inputs: int) -> Coded:
        return cls((1, 8), codes=bytes_of(outputs, inputs // 2), scales=torch.rand(outputs, inputs // 8) / 10)

    @staticmethod
    def shape_of(codes: Tensor) -> torch.Size:
        return torch.Size((codes.shape[0], 2 * codes.shape[1]))

    def numbers(self, dtype: torch.dtype) -> Tensor:
        codes = nibbles(self.codes).to(dtype) - 8
        return (codes.unflatten(1, (-1, self.block[1])) * self.scales[..., None]).flatten(1)


class Dynamic(Unread):
    """Rounds its input by each token's largest entry; the scales of outputs come after the product."""

    def multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
        product = (rows / scale).round() @ self.codes.to(x.dtype).t()
        if x.is_cpu:  # a branch that a run without a device would miss
            product = product * scale.expand(len(rows), len(self.codes))
        made = (product * self.scales.flatten()).view(*x.shape[:-1], -1)
        if bias is not None:
            made += bias
        return made


def coded(model: nn.Module, kind: type[Coded]) -> nn.Module:
    """A model whose linear layers have weights of a class."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(kind.drawn(*layer.weight.shape), requires_grad=False)
    return model
