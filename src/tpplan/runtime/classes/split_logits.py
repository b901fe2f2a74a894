"""Split logits: what `generate` gets from a model whose head has `output: shard`; to all code a tensor of all classes.

    logits[:, -1].to(float32)        stays split
    logits / temperature             likewise, and so do comparisons with a number a row, and masks of these
    torch.argmax(logits, -1)         two numbers a row from each rank, in place of its classes
    torch.topk(logits, 50)           likewise
    torch.multinomial(softmax(…))    likewise
    anything else                    the logits are gathered, once, and are then a plain tensor

So a loop that is written for whole logits computes what it computes with these, and sends less where it can.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from tpplan.compat.subclasses import made_wrapper, without_tensor_classes
from tpplan.compiler.ir.pytree import with_items
from tpplan.runtime.classes import class_choices
from tpplan.runtime.classes.class_rows import ClassPart


class SplitLogits(Tensor):
    """This rank's part of a tensor whose last dim is split over the ranks; its shape is that of the whole."""

    @staticmethod
    def of(local: Tensor, part: ClassPart, view: tuple[SplitLogits, Callable[[Tensor], Tensor]] | None = None) -> Any:
        """A tensor around this rank's part; if it is a view, with what it is a view of, and how."""
        shape = (*local.shape[:-1], part.classes)
        made: Any = made_wrapper(SplitLogits, shape, local.dtype, local.device)
        made.__dict__.update(part=part, own=local, all=None, view=view)
        return made

    @property
    def local(self) -> Tensor:
        """This rank's part, a plain tensor; of the whole, once that is known to others, who may write to it."""
        known, part = self._known(), self.part
        return self.__dict__["own"] if known is None else known.narrow(-1, part.first, part.count)

    @property
    def part(self) -> ClassPart:
        """Which classes this rank has."""
        return self.__dict__["part"]

    def whole(self) -> Tensor:
        """The numbers of all classes, a plain tensor; a collective when it is first called.

        That of a view is a view of the whole, so that who writes to the one writes to the other.
        """
        held: dict[str, Any] = vars(self)
        if held["view"] is not None:
            held["view"][0].whole()
        elif held["all"] is None:
            held["all"] = class_choices.gathered(held["own"], held["part"])
        known = self._known()
        assert known is not None
        return known

    def _known(self) -> Tensor | None:
        held: dict[str, Any] = vars(self)
        if held["all"] is None and held["view"] is not None:
            base, viewed = held["view"]
            known = base._known()
            held["all"] = None if known is None else viewed(known)
        return held["all"]

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        with without_tensor_classes():
            return f"SplitLogits({tuple(self.shape)}, of which this rank has {tuple(self.local.shape)})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keywords: dict[str, Any] = kwargs or {}
        with without_tensor_classes():
            if func in _OF_ITSELF or getattr(func, "__name__", "") in ("__get__", "__set__"):
                return func(*args, **keywords) if func in _OF_ITSELF else _attribute(func, args, keywords)
            way = _WAYS.get(func)
            fits = way is not None and _takes(way, func, args, keywords)
            made = way(func, *args, **keywords) if way is not None and fits else NotImplemented
            return func(*wholes(args), **wholes(keywords)) if made is NotImplemented else made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*wholes(args), **wholes(kwargs or {}))


def wholes(held: Any) -> Any:
    """The same with whole tensors in place of split ones."""
    return with_items(held, lambda item: item.whole() if isinstance(item, SplitLogits) else item)


def _takes(way: Callable[..., Any], func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether a call is written in the way that is known."""
    try:
        _signature(way).bind(func, *args, **keywords)
    except TypeError:
        return False
    return isinstance(args[0] if args else None, SplitLogits) or way is _joined


_signature = functools.lru_cache(inspect.signature)
_SHAPES = {Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.requires_grad, Tensor.is_cuda, Tensor.layout}
_SHAPED = frozenset(getattr(held, "__get__", held) for held in cast("set[Any]", _SHAPES))
_OF_ITSELF: frozenset[Any] = frozenset(
    (Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.is_complex, torch.numel,
     torch.is_floating_point, Tensor.__hash__, Tensor.ndimension, Tensor.get_device)
)  # fmt: skip


def _attribute(func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """An attribute of the tensor: its geometry is there, all else is that of the whole."""
    return func(*(args if func in _SHAPED else wholes(args)), **keywords)


def _copied(func: Callable[..., Tensor], held: SplitLogits, *args: Any, **keywords: Any) -> Any:
    """An operation number by number, with numbers of Python at most."""
    if any(isinstance(item, Tensor) and item.dim() for item in (*args, *keywords.values())):
        return NotImplemented
    own = held.local
    made = func(own, *args, **keywords)
    shares = made is own or func is Tensor.detach
    return SplitLogits.of(made, held.part, (held, lambda whole: func(whole, *args, **keywords)) if shares else None)


def _taken(func: Callable[..., Tensor], held: SplitLogits, at: Any) -> Any:
    """Some rows, if all dims but the last are indexed, by numbers and slices."""
    places = cast("tuple[Any, ...]", at) if isinstance(at, tuple) else (at,)
    if not all(isinstance(place, (int, slice)) or place is None for place in places):
        return NotImplemented
    if sum(place is not None for place in places) >= held.dim():
        return NotImplemented
    return SplitLogits.of(func(held.local, at), held.part, (held, lambda whole: func(whole, at)))


def _joined(func: Callable[..., Tensor], *operands: Any) -> Any:
    """An operation number by number of split operands, and of others with one number for all classes."""
    split = [held for held in operands if isinstance(held, SplitLogits)]
    for other in operands:
        if isinstance(other, SplitLogits):
            if other.shape != split[0].shape:
                return NotImplemented
        elif (isinstance(other, Tensor) and other.dim() and other.shape[-1] != 1) or (
            isinstance(other, Tensor) and other.dim() > split[0].dim()
        ):
            return NotImplemented
    locals_ = (held.local if isinstance(held, SplitLogits) else held for held in operands)
    return SplitLogits.of(func(*locals_), split[0].part)


def _largest(func: Callable[..., Tensor], held: SplitLogits, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None or range(held.dim())[dim] != held.dim() - 1:
        return NotImplemented
    made = class_choices.argmax(held.local, held.part)
    return made[..., None] if keepdim else made


def _top(
    func: Callable[..., Any], held: SplitLogits, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    if not largest or range(held.dim())[dim] != held.dim() - 1:
        return NotImplemented
    return torch.return_types.topk(class_choices.top_k(held.local, int(k), held.part))  # pyright: ignore


def _softmax(
    func: Callable[..., Tensor], held: SplitLogits, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    if range(held.dim())[dim] != held.dim() - 1:
        return NotImplemented
    return SplitLogits.of(class_choices.softmax(held.local, held.part, dtype), held.part)


def _drawn(
    func: Callable[..., Tensor],
    held: SplitLogits,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Any:
    if num_samples != 1:
        return NotImplemented
    return class_choices.drawn(held.local, held.part, generator)


_ALONE = (
    Tensor.to, Tensor.float, Tensor.double, Tensor.clone, Tensor.detach, Tensor.contiguous, Tensor.neg, Tensor.__neg__,
    torch.clone, Tensor.bool, Tensor.type_as, Tensor.__invert__,
)  # fmt: skip
_BY_NUMBER = (
    Tensor.__truediv__, Tensor.div, torch.div, Tensor.__mul__, Tensor.mul, torch.mul, Tensor.__add__, Tensor.add,
    torch.add, Tensor.__sub__, Tensor.sub, torch.sub, Tensor.__lt__, Tensor.__le__, Tensor.__gt__, Tensor.__ge__,
    Tensor.lt, Tensor.le, Tensor.gt, Tensor.ge, torch.lt, torch.le, torch.gt, torch.ge, Tensor.masked_fill,
    torch.masked_fill, torch.where, Tensor.__and__, Tensor.__or__,
)  # fmt: skip
_WAYS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_ALONE, _copied),
    **dict.fromkeys(_BY_NUMBER, _joined),
    Tensor.__getitem__: _taken,
    **dict.fromkeys((torch.argmax, Tensor.argmax), _largest),
    **dict.fromkeys((torch.topk, Tensor.topk), _top),
    **dict.fromkeys((torch.softmax, Tensor.softmax, functional.softmax), _softmax),
    **dict.fromkeys((torch.multinomial, Tensor.multinomial), _drawn),
}

__all__ = ["SplitLogits", "wholes"]
