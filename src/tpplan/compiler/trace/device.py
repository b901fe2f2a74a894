"""The device that a body sees: the one that the model will run on, not the capture's own.

in:  what torch is asked of a tensor's device during a capture, and devices that are passed to torch
out: the pretended device to code that isn't torch's; `meta` to torch

    x.device.type              ->   "cuda"
    zeros(8, device=x.device)  ->   zeros(8, device="meta")

On the CPU a body may make tensors of its own there (`torch.arange(8)`), which stay real; that a device was asked of a
tensor is known by the very object that was handed out.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpplan.compiler.ir.locations import INTERNAL, TORCH

_META = torch.device("meta")
_CHECKING = f"{TORCH}/nn/attention/"  # it refuses, and prepares for, the device that the model runs on
_FLAGS = {"is_cuda": "cuda", "is_cpu": "cpu", "is_meta": "meta", "is_xpu": "xpu", "is_mps": "mps"}
_FLAG_READS: dict[Any, str] = {getattr(Tensor, name).__get__: kind for name, kind in _FLAGS.items()}
_DEVICE_READ: Any = Tensor.device.__get__  # pyright: ignore
_MOVES: dict[Any, str] = {Tensor.cuda: "cuda", Tensor.cpu: "cpu"}
_INDEX_READ: Any = Tensor.get_device
NOTHING = object()


class DeviceView:
    """Answers in the place of torch where a device is asked for or given."""

    def __init__(self, device: torch.device) -> None:
        """Pretend that tensors on `meta` lie on `device`."""
        self.device = device
        self.answers: dict[Any, Callable[[Tensor, tuple[Any, ...]], Any]] = {
            _DEVICE_READ: lambda _, __: self.device,
            _INDEX_READ: lambda _, __: -1 if device.type == "cpu" else device.index or 0,
        }
        for read, kind in _FLAG_READS.items():
            self.answers[read] = _constantly(kind == device.type)
        for move, kind in _MOVES.items():
            if kind in (device.type, "cpu"):
                self.answers[move] = lambda tensor, _: tensor

    def answer(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What `func` says of a meta tensor, if it's about its device and the model's own code asks; else `NOTHING`."""
        found = self.answers.get(func)
        if found is None or not args[0].is_meta or _asked_by_torch():
            return NOTHING
        return found(args[0], args)

    def moved(
        self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with `meta` for the pretended device."""
        if func is Tensor.to:
            on_meta = args[0].is_meta
            args = tuple([_META if self._stands_for_meta(held, on_meta) else held for held in args])
        else:
            on_meta = False
        device = keywords.get("device")
        if device is not None and self._stands_for_meta(device, on_meta):
            keywords = {name: held for name, held in keywords.items() if name != "generator"} | {"device": _META}
        return args, keywords

    def _stands_for_meta(self, held: Any, on_meta: bool) -> bool:
        if held is self.device:
            return True
        if not isinstance(held, (torch.device, str)) or not (on_meta or self.device.type != "cpu"):
            return False
        try:
            kind = torch.device(held).type
        except RuntimeError:  # a text that names no device
            return False
        return kind == self.device.type or (on_meta and kind == "cpu")


def _constantly(value: bool) -> Callable[[Tensor, tuple[Any, ...]], bool]:
    """A constant answer."""
    return lambda _, __: value


def _asked_by_torch() -> bool:
    """Whether the code that reads the attribute is torch's or the compiler's, which has to see what is there."""
    frame = sys._getframe(3)  # pyright: ignore[reportPrivateUsage] -- this one, `answer` and the function mode stand between
    return _sees_all(frame.f_code.co_filename)


@functools.cache
def _sees_all(file: str) -> bool:
    return file.startswith(INTERNAL) and not file.startswith(_CHECKING)


def device_of(model: torch.nn.Module) -> torch.device:
    """Where a model's parameters lie; the CPU if they are on `meta` or it has none."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None or first.is_meta else first.device


__all__ = ["NOTHING", "DeviceView", "device_of"]
