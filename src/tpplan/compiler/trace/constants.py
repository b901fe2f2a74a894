"""Constants: the numbers of small tensors that a model makes out of Python numbers on its own device.

On the meta device such a tensor has no entries, and torch issues no operation for it, so that a division by
`torch.tensor(x.shape[1])` would look the same on whole and on local shapes. Their numbers are kept aside, for the check
to compare. Nor has what torch makes of the list in `x[:, [-2]]`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tpplan.compat.flex_attention import FLEX_ATTENTION
from tpplan.compat.subclasses import class_to_ask
from tpplan.compiler.ir.class_functions import ClassCall
from tpplan.compiler.ir.class_reductions import EXTREMES, class_call, stock_function
from tpplan.compiler.ir.look_ups import LOOK_UPS
from tpplan.compiler.ir.steps import side_of
from tpplan.compiler.ir.trace import Cut
from tpplan.compiler.trace.counts import SPLITS, RowCount, with_counted, with_counted_rows
from tpplan.compiler.trace.decomposed import decomposed
from tpplan.compiler.trace.device import NOTHING, DeviceView
from tpplan.compiler.trace.flex_calls import record_flex_attention
from tpplan.compiler.trace.gradient_flow import HOOKS
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.taken_gradients import record_gradient

_POSITION_OF_DATA = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, Tensor.new_tensor: 1}
_VALUE_READS: frozenset[Any] = frozenset((Tensor.tolist, Tensor.numpy, Tensor.__array__))  # pyright: ignore
_INDEXING = frozenset((Tensor.__getitem__, Tensor.__setitem__))


def _index_of(index: Any) -> Any:
    """An index with tensors for what torch would turn into ones without entries: lists of numbers or of scalars."""
    if type(index) is tuple:
        return tuple(_row(item) for item in index)  # pyright: ignore[reportUnknownVariableType]
    return _row(index)


def _row(item: Any) -> Any:
    if type(item) is list and item and all(type(n) is int for n in item):  # pyright: ignore
        return torch.tensor(item)
    scalars: list[Any] = [*item] if type(item) in (list, tuple) else []  # pyright: ignore[reportUnknownArgumentType]
    if scalars and all(isinstance(n, Tensor) and not n.dim() for n in scalars):
        return torch.stack([n if n.dtype in (torch.bool, torch.uint8) else n.long() for n in scalars])
    return item  # pyright: ignore[reportUnknownVariableType]


def _slices(index: Any, dims: int) -> Iterator[tuple[int, int, slice]]:
    """The slices in an index: the number of the item, the dim of the tensor that it slices, and the slice."""
    items: tuple[Any, ...] = index if type(index) is tuple else (index,)  # pyright: ignore[reportUnknownVariableType]
    taken = [_dims_of(item) for item in items]
    dim = 0
    for number, (item, count) in enumerate(zip(items, taken, strict=True)):
        if item is Ellipsis:
            dim += dims - sum(taken)
        elif isinstance(item, slice):
            yield number, dim, item
        dim += count


def _with_counted_rows(tensor: Tensor, index: Any) -> Any:
    """An index with numbers for the counts by which it slices; None if it slices by none."""
    items: list[Any] = list(index) if type(index) is tuple else [index]  # pyright: ignore
    counted = False
    for number, dim, item in _slices(index, tensor.dim()):
        if isinstance(item.start, RowCount) or isinstance(item.stop, RowCount):
            items[number], counted = with_counted_rows(item, tensor.shape[dim]), True
    return (tuple(items) if type(index) is tuple else items[0]) if counted else None  # pyright: ignore


def _takes_first(item: Any) -> bool:
    return type(item.stop) is int and item.stop > 0 and not item.start and item.step in (None, 1)


def _dims_of(item: Any) -> int:
    """How many dims of a tensor an item of an index is for."""
    if item is None or item is Ellipsis or type(item) is bool:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


def _data(position: int, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """What a tensor is made of."""
    return args[position] if position < len(args) else keywords.get("data", keywords.get("obj"))


def _holds_meta(data: Any) -> bool:
    """Whether a list has tensors without numbers among its items."""
    if isinstance(data, (list, tuple)):
        return any(map(_holds_meta, data))  # pyright: ignore[reportUnknownArgumentType]
    return False if type(data) in (int, float, bool) else isinstance(data, Tensor) and data.is_meta


def _assembled(func: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any], data: Any) -> Tensor:
    """A tensor of a list of numbers and of tensors, whose numbers torch would read one by one."""

    def sample(item: Any) -> object:
        if isinstance(item, (list, tuple)):
            return [*map(sample, item)]  # pyright: ignore[reportUnknownArgumentType]
        return torch.zeros(item.shape, dtype=item.dtype).tolist() if isinstance(item, Tensor) else item  # pyright: ignore

    def stacked(item: Any) -> Tensor:
        if isinstance(item, (list, tuple)):
            return torch.stack([*map(stacked, item)])  # pyright: ignore[reportUnknownArgumentType]
        if isinstance(item, Tensor):
            return item.detach().to(like.dtype)
        return torch.full((), item, dtype=like.dtype, device="meta")

    sampled = sample(data)
    given = tuple(sampled if item is data else item for item in args)
    like = func(*given, **{name: sampled if item is data else item for name, item in keywords.items()})
    return stacked(data).requires_grad_(like.requires_grad)


def _with_some(call: ClassCall, **others: Any) -> dict[str, Any]:
    """What is changed of a call of which a rank may have nothing, so that its input has entries in each dim."""
    return {"input": call.input.new_empty([count or 1 for count in call.input.shape]), **others}


class ConstantWatcher(TorchFunctionMode):
    """Notes the numbers that meta tensors are made of, and hooks on tensors."""

    def __init__(self, recorder: Recorder) -> None:
        """Tell `recorder`."""
        super().__init__()
        self._recorder = recorder
        self._device = DeviceView(recorder.settings.device)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, and keep its numbers if it makes a tensor of Python's."""
        keywords: dict[str, Any] = kwargs or {}
        recorder = self._recorder
        recorder.meet()
        if func in _VALUE_READS and args[0].is_meta and (counts := recorder.numbers.counts_of(args[0])) is not None:
            found = counts if func is Tensor.tolist else numpy.array(counts, dtype=object)
            recorder.steps.called(func, found, args)
            return found
        if func is Tensor.__format__ and args[0].is_meta and args[0].is_floating_point() and args[1]:
            text = format(math.nan, args[1])  # for people to read: it is the name of nothing
            recorder.steps.called(func, text, args)
            return text
        if func in SPLITS and (counted := with_counted(args, keywords)) is not None:
            recorder.numbers.choose()
            args, keywords = counted
        if func in _VALUE_READS and args[0].is_meta:
            args = (recorder.numbers.read(args[0]).to("cpu", copy=True), *args[1:])
        elif func in _VALUE_READS and (id(args[0]) in recorder.real.picked or recorder.real.is_redrawn(args[0])):
            raise recorder.numbers.refuse()
        if func in self._device.answers:
            found = self._device.answer(func, args)
            if found is not NOTHING:
                recorder.steps.called(func, found, args)
                return found
        elif func in _INDEXING:
            if (counted := _with_counted_rows(args[0], args[1])) is not None:
                recorder.numbers.choose()
                args = (args[0], counted, *args[2:])
            args = (args[0], _index_of(args[1]), *args[2:])
            self._note_cuts(args[0], args[1])
        kind = class_to_ask(types)
        if kind is not None:
            with self:  # what the class calls, and asks of a device, is seen as what a body does
                return kind.__torch_function__(func, types, args, keywords)
        if func is FLEX_ATTENTION:
            return record_flex_attention(recorder, self, args, keywords)
        if func is torch.autograd.grad:
            return record_gradient(recorder, args, keywords)
        recorder.asked.calling(func, args)
        if func in HOOKS:
            recorder.gradients.note_tensor_hook(*args, **keywords, accumulated=HOOKS[func])
        if func is Tensor.to or (keywords and keywords.get("device") is not None):
            args, keywords = self._device.moved(func, args, keywords)
        position = _POSITION_OF_DATA.get(func)
        data = None if position is None else _data(position, args, keywords)
        settings = recorder.settings
        reduces, looks_up = recorder.is_within(settings.reducing), recorder.is_within(settings.looking)
        classes = class_call(func, args, keywords, reduces, looks_up)
        result: Any
        if _holds_meta(data):
            result, data = _assembled(func, args, keywords, data), None
        elif classes is None:
            recorder.indexing = type(args[1]) if func in _INDEXING else None
            try:
                result = decomposed(func)(*args, **keywords)
                if func is Tensor.__getitem__:
                    result = recorder.indexed(args[0], result)
            finally:
                recorder.indexing = None
        else:
            result = self._over_classes(classes, lambda: func(*args, **keywords))
        recorder.asked.told(func, result)
        recorder.steps.called(func, result, args, keywords)
        if args and isinstance(args[0], Tensor) and not args[0].is_meta and recorder.frames:
            side = side_of(func, result, args)
            if side is not None:
                recorder.sides.meet(side)
        if data is not None and isinstance(result, Tensor) and result.is_meta and not isinstance(data, Tensor):
            numbers = torch.tensor(data, dtype=result.dtype, device="cpu")
            recorder.new_value(result, result.requires_grad, numbers=numbers)
        return result

    def _over_classes(self, call: ClassCall, run: Callable[[], Any]) -> Any:
        """Record a function over classes; a run on local shapes has a part of these or none, and the weights of all."""
        stock, whole = stock_function(call.operation), self._recorder.gradients.whole
        changed: Callable[[], dict[str, Any]] | None = None
        if not whole and call.operation in LOOK_UPS:  # a row that has no gradient may be another rank's
            changed = functools.partial(_with_some, call, padding=None)
        elif not whole and call.weight is not None:
            changed = functools.partial(dict[str, Any], weight=None)
        elif call.operation in EXTREMES and not call.input.shape[call.dim]:
            changed = functools.partial(_with_some, call)
        instead = run if changed is None else lambda: stock(*replace(call, **changed()).arguments)
        return self._recorder.record_whole(call.operation, call.arguments, instead)

    def _note_cuts(self, tensor: Tensor, index: Any) -> None:
        """Note slices that take so many of the first entries as there are, or more: torch does nothing for these."""
        value = self._recorder.held_value(tensor) if self._recorder.frames else None
        if value is not None:
            for _, dim, item in _slices(index, tensor.dim()):
                if _takes_first(item) and item.stop >= tensor.shape[dim]:
                    self._recorder.frames[-1].cuts.append(Cut(value, dim, item.stop - tensor.shape[dim]))
