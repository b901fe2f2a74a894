"""Constants: the numbers of small tensors that a model makes out of Python numbers on its own device.

On the meta device such a tensor has no entries, and torch issues no operation for it, so that a division by
`torch.tensor(x.shape[1])` would look the same on whole and on local shapes. Their numbers are kept aside, for the check
to compare. Nor has what torch makes of the list in `x[:, [-2]]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpplan.compat.flex_attention import FLEX_ATTENTION
from tpplan.compat.tensors import READ_VERSION
from tpplan.compiler.ir.class_functions import ClassCall
from tpplan.compiler.ir.class_reductions import EXTREMES, class_call, stock_function
from tpplan.compiler.ir.look_ups import LOOK_UPS
from tpplan.compiler.ir.steps import side_of, step_of
from tpplan.compiler.ir.trace import Cut
from tpplan.compiler.trace.counts import SPLITS, with_counted
from tpplan.compiler.trace.decomposed import decomposed
from tpplan.compiler.trace.device import NOTHING, DeviceView
from tpplan.compiler.trace.flex_calls import record_flex_attention
from tpplan.compiler.trace.gradient_hooks import note_tensor_hook
from tpplan.compiler.trace.noted import UnfollowedError
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.taken_gradients import record_gradient
from tpplan.state.ambient import RECORDING

_SET_DATA: Any = Tensor.data.__set__  # pyright: ignore
_GRADIENT_FUNCTION: Any = Tensor.grad_fn.__get__  # pyright: ignore
_REQUIRES_GRAD: Any = Tensor.requires_grad.__get__  # pyright: ignore
# Of a tensor on the way to its gradient, and of its memory: what a rank's part says of these is no use to a body.
_AUTOGRADS_OWN: dict[Any, str] = {Tensor.grad.__get__: "grad", Tensor.is_leaf.__get__: "is_leaf"}  # pyright: ignore
_MEMORYS_OWN: dict[Any, str] = {
    READ_VERSION: "_version",
    Tensor.storage_offset: "storage_offset()",
}
_STRIDES = frozenset((Tensor.is_contiguous, Tensor.stride))
_POSITION_OF_DATA = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, Tensor.new_tensor: 1}
_HOOKS: dict[Callable[..., Any], bool] = {
    Tensor.register_hook: False,
    Tensor.register_post_accumulate_grad_hook: True,
}
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


def _stops(index: Any, dims: int) -> Iterator[tuple[int, int]]:
    """The dims of a tensor that an index slices from the first entry up to some number, and these numbers."""
    items: tuple[Any, ...] = index if type(index) is tuple else (index,)  # pyright: ignore[reportUnknownVariableType]
    taken = [_dims_of(item) for item in items]
    dim = 0
    for item, count in zip(items, taken, strict=True):
        if item is Ellipsis:
            dim += dims - sum(taken)
        elif isinstance(item, slice) and _takes_first(item):
            yield dim, item.stop
        dim += count


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


class ConstantWatcher(TorchFunctionMode):
    """Notes the numbers that meta tensors are made of, and hooks on tensors."""

    def __init__(self, recorder: Recorder) -> None:
        """Tell `recorder`."""
        super().__init__()
        self._recorder = recorder
        self._device = DeviceView(torch.device("cpu") if recorder.device is None else recorder.device)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, and keep its numbers if it makes a tensor of Python's."""
        keywords: dict[str, Any] = kwargs or {}
        self._recorder.meet()
        if func is Tensor.tolist and args[0].is_meta and (counts := self._recorder.counts_of(args[0])) is not None:
            return counts
        if func is Tensor.__format__ and args[0].is_meta and args[0].is_floating_point() and args[1]:
            text = format(math.nan, args[1])  # for people to read: it is the name of nothing
            self._note_step(func, text, args)
            return text
        if func in SPLITS and (counted := with_counted(args, keywords)) is not None:
            self._recorder.note_found()
            args, keywords = counted
        if func in _VALUE_READS and args[0].is_meta:
            args = (self._recorder.read(args[0]).to("cpu", copy=True), *args[1:])
        elif func in _VALUE_READS and (id(args[0]) in self._recorder.picked or self._recorder.is_redrawn(args[0])):
            raise self._recorder.refuse_value()
        if func in self._device.answers:
            found = self._device.answer(func, args)
            if found is not NOTHING:
                self._note_step(func, found, args)
                return found
        elif func in _INDEXING:
            args = (args[0], _index_of(args[1]), *args[2:])
            self._note_cuts(args[0], args[1])
        if func is FLEX_ATTENTION:
            return record_flex_attention(self._recorder, self, args, keywords)
        if func is torch.autograd.grad:
            return record_gradient(self._recorder, args, keywords)
        if func == _SET_DATA and isinstance(args[0], nn.Parameter) and step_of(func):
            raise UnfollowedError(
                "it assigns to a parameter's `.data`", "write to the parameter under `torch.no_grad()` instead"
            )
        if func is Tensor.is_inference and step_of(func):
            raise UnfollowedError(
                "it reads `is_inference()` of a tensor, of which a proof knows nothing",
                "ask for `torch.is_inference_mode_enabled()` instead",
            )
        if func in _AUTOGRADS_OWN or func in _MEMORYS_OWN:
            self._refuse_state(func, args[0])
        elif func in _STRIDES:
            self._recorder.asked_memory.add(func.__name__)
        elif func == _REQUIRES_GRAD and isinstance(args[0], nn.Parameter):
            self._recorder.asked_flags.add(self._recorder.value_of(args[0]))
        elif func == _REQUIRES_GRAD and step_of(func):
            self._recorder.asked_settings.add(RECORDING)
        if func in _HOOKS:
            note_tensor_hook(self._recorder, *args, **keywords, accumulated=_HOOKS[func])
        if func is Tensor.to or (keywords and keywords.get("device") is not None):
            args, keywords = self._device.moved(func, args, keywords)
        position = _POSITION_OF_DATA.get(func)
        data = None if position is None else _data(position, args, keywords)
        classes = class_call(func, args, keywords, self._recorder.reduces, self._recorder.looks_up)
        result: Any
        if _holds_meta(data):
            result, data = _assembled(func, args, keywords, data), None
        elif classes is None:
            self._recorder.indexing = type(args[1]) if func in _INDEXING else None
            try:
                result = decomposed(func)(*args, **keywords)
                if func is Tensor.__getitem__:
                    result = self._recorder.indexed(args[0], result)
            finally:
                self._recorder.indexing = None
        else:
            result = self._over_classes(classes, lambda: func(*args, **keywords))
        if func == _GRADIENT_FUNCTION and result is not None and step_of(func):
            raise UnfollowedError(
                "it reads `grad_fn`, which is another one on a rank's part", "ask for `requires_grad` instead"
            )
        self._note_step(func, result, args)
        if args and isinstance(args[0], Tensor) and not args[0].is_meta and self._recorder.frames:
            side = side_of(func, result, args)
            if side is not None:
                self._recorder.note_test(side)
        if data is not None and isinstance(result, Tensor) and result.is_meta and not isinstance(data, Tensor):
            numbers = torch.tensor(data, dtype=result.dtype, device="cpu")
            self._recorder.new_value(result, result.requires_grad, numbers=numbers)
        return result

    def _note_step(self, func: Callable[..., Any], result: Any, args: tuple[Any, ...]) -> None:
        if self._recorder.listening and func.__name__ != "__get__":
            step = step_of(func, side_of(func, result, args), depth=1, names=self._recorder.modules)
            if step is not None and self._recorder.frames:
                self._recorder.frames[-1].steps.append(step)

    def _over_classes(self, call: ClassCall, run: Callable[[], Any]) -> Any:
        """Record a function over classes; a run on local shapes has a part of these or none, and the weights of all."""
        stock, whole = stock_function(call.operation), self._recorder.whole
        if not whole and call.operation in LOOK_UPS:  # a row that has no gradient may be another rank's

            def on_some() -> Any:
                some = call.input.new_empty([count or 1 for count in call.input.shape])
                return stock(*replace(call, input=some, padding=None).arguments)

            return self._recorder.record_whole(call.operation, call.arguments, on_some)
        if not whole and call.weight is not None:
            return self._recorder.record_whole(
                call.operation, call.arguments, lambda: stock(*replace(call, weight=None).arguments)
            )
        if call.operation in EXTREMES and not call.input.shape[call.dim]:

            def on_one() -> Any:
                some = call.input.new_empty([count or 1 for count in call.input.shape])
                return stock(*replace(call, input=some).arguments)

            return self._recorder.record_whole(call.operation, call.arguments, on_one)
        return self._recorder.record_whole(call.operation, call.arguments, run)

    def _note_cuts(self, tensor: Tensor, index: Any) -> None:
        """Note slices that take so many of the first entries as there are, or more: torch does nothing for these."""
        value = self._recorder.held_value(tensor) if self._recorder.frames else None
        if value is not None:
            for dim, stop in _stops(index, tensor.dim()):
                if stop >= tensor.shape[dim]:
                    self._recorder.frames[-1].cuts.append(Cut(value, dim, stop - tensor.shape[dim]))

    def _refuse_state(self, func: Any, tensor: Tensor) -> None:
        """Refuse what the model's own code asks of autograd or of memory."""
        name = _MEMORYS_OWN.get(func) or (_AUTOGRADS_OWN[func] if tensor.requires_grad else "")
        if name and step_of(func, depth=1) is not None:
            raise UnfollowedError(
                f"it reads `{name}`, which is another one on a rank's part",
                "let the caller tell what it needs to know",
            )
