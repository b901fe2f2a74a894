"""What Python sees of the tensors of a recorded construction: the stock model's device, and numbers where it asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tpplan.compat.modes import without_dispatch_modes, without_function_modes
from tpplan.compiler.ir.locations import location_now
from tpplan.initialize.construction_recorder import ConstructionRecorder
from tpplan.initialize.findings import UNKNOWN, problem

_META = torch.device("meta")
_FLAGS: dict[Any, str] = {getattr(Tensor, f"is_{kind}").__get__: kind for kind in ("cuda", "cpu", "meta", "xpu", "mps")}
_DEVICE: Any = Tensor.device.__get__  # pyright: ignore
_READS: frozenset[Any] = frozenset((Tensor.tolist, Tensor.numpy, Tensor.__array__))  # pyright: ignore
_FACTORIES: frozenset[Any] = frozenset(
    getattr(torch, name)
    for name in ("empty", "eye", "zeros", "ones", "full", "arange", "linspace", "logspace", "rand", "randn", "randint",
                 "randperm", "normal")
)  # fmt: skip
_INDEXING: frozenset[Any] = frozenset((Tensor.__getitem__, Tensor.__setitem__))
_MOVES: dict[Any, str] = {Tensor.cpu: "cpu", Tensor.cuda: "cuda"}


class Answers(TorchFunctionMode):
    """Answers in the place of torch where a constructor asks for a device or for numbers.

    `torch.nn.init` asks as well: it leaves tensors on `meta` as they are.
    """

    def __init__(self, recorder: ConstructionRecorder) -> None:
        """Answer what `recorder` knows."""
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer, or call `func`."""
        keywords: dict[str, Any] = kwargs or {}
        if keywords.get("device") is not None and torch.device(keywords["device"]).type == "meta":
            place = location_now()
            raise problem(
                UNKNOWN,
                f"the stock model's constructor makes tensors on `meta`{'' if place is None else f' at {place}'}",
                "let it make them where it does by itself, without `torch.device('meta')`: tpplan puts them on `meta`",
            )
        if func in _READS:
            with without_dispatch_modes(), without_function_modes():
                value = self._recorder.value(args[0])
                own = value if value is args[0] else value.detach().clone()
                return func(own, *args[1:], **keywords)
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if func == _DEVICE:
                return self._recorder.device_of(args[0])
            if func in _FLAGS:
                return _FLAGS[func] == self._recorder.device_of(args[0]).type
            if func is Tensor.get_device:
                device = self._recorder.device_of(args[0])
                return -1 if device.type == "cpu" else device.index or 0
            if func in _MOVES and _MOVES[func] == self._recorder.device_of(args[0]).type:
                return args[0]
            if func is Tensor.new_tensor:
                return self._new(args[0], *args[1:], **keywords)
            if func in _INDEXING:
                args = (args[0], _index_of(args[1]), *args[2:])
            if func is Tensor.to:
                device = self._recorder.device_of(args[0])
                args = (args[0], *[_here(held, device) for held in args[1:]])
                keywords = {name: _here(held, device) for name, held in keywords.items()}
        out = keywords.get("out")
        if isinstance(out, Tensor) and out.is_meta and func in _FACTORIES:
            keywords = keywords | {"device": _META}  # as `nn.init.eye_`; a device context would add its own
        return func(*args, **keywords)

    def _new(self, of: Tensor, data: Any, dtype: torch.dtype | None = None, **keywords: Any) -> Tensor:
        """As `of.new_tensor(data)`, which would be without numbers on `meta`."""
        device = keywords.pop("device", None) or self._recorder.device_of(of)
        return torch.tensor(data, dtype=dtype or of.dtype, device=device, **keywords)


def _index_of(index: Any) -> Any:
    """An index with tensors for lists and arrays of numbers, of which torch makes tensors without numbers itself."""
    return tuple(map(_row, index)) if type(index) is tuple else _row(index)  # pyright: ignore


def _row(item: Any) -> Any:
    if (isinstance(item, list) and _is_plain(item)) or type(item).__name__ == "ndarray":  # pyright: ignore
        return torch.tensor(item)
    return item  # pyright: ignore[reportUnknownVariableType]


def _is_plain(item: Any) -> bool:
    """Whether it is a number, or nested lists of numbers."""
    return all(map(_is_plain, item)) if isinstance(item, list) else isinstance(item, (int, bool))  # pyright: ignore


def _here(held: Any, device: torch.device) -> Any:
    """`meta` for the device on which a tensor pretends to be, so that nothing is moved."""
    if not isinstance(held, (torch.device, str)):
        return held
    named = torch.device(held)
    numbers: set[int | None] = {named.index, device.index}
    same = named.type == device.type and (len(numbers) == 1 or None in numbers)
    return _META if same else held


__all__ = ["Answers"]
