"""Bodies that ask where they run, and code that hides the capture's own errors."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _python_dispatch

from tests.battery.case import ATTENTION, MLP, Attention, D, Mlp, call, case, t

CALLS = (call(), call(lambda: (t(2, 3, D),)), call(train=False))


def wide(h: Tensor) -> Tensor:
    return h - h.mean(-1, keepdim=True)


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class DeviceType(Mlp):
    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if h.device.type == "cpu" else h.relu()


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class IsCpu(Mlp):
    def middle(self, h: Tensor) -> Tensor:
        return h.softmax(-1) if h.is_cpu else h.relu()


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class IsMeta(Mlp):
    def middle(self, h: Tensor) -> Tensor:
        return h.relu() if h.is_meta else wide(h)


@case("devices", MLP, *CALLS)
class IsCuda(Mlp):
    """A fast path on a GPU, the plain one elsewhere."""

    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if h.is_cuda else h.relu()


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class ParameterDevice(Mlp):
    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if self.up.weight.device == torch.device("cpu") else h.relu()


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class DeviceString(Mlp):
    """The device's name."""

    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if "cpu" in str(h.device) else h.relu()


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class DeviceIndex(Mlp):
    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if h.get_device() < 0 and h.device.type not in ("meta", "cuda") else h.relu()


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class TensorClass(Mlp):
    """The tensor's class and its storage."""

    def middle(self, h: Tensor) -> Tensor:
        return h.relu() if type(h) is not Tensor else wide(h)


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class DataPointer(Mlp):
    def middle(self, h: Tensor) -> Tensor:
        try:
            return wide(h) if h.data_ptr() else h.relu()
        except Exception:
            return h.relu()


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class LegacyType(Mlp):
    def middle(self, h: Tensor) -> Tensor:
        return wide(h) if h.type() == "torch.DoubleTensor" else h.relu()


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class TriesItem(Mlp):
    """A value that is read inside of `try`."""

    def middle(self, h: Tensor) -> Tensor:
        try:
            return h * 2 if h.sum().item() > -1e9 else h
        except Exception:
            return h.relu()


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class TriesItemOfInput(Mlp):
    """The same of what comes in, with a path that isn't local."""

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        try:
            large = bool(x.abs().max() > 0)
        except Exception:
            large = False
        return self.down(wide(h) if large else h)


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class TriesBare(Mlp):
    """A bare `except`."""

    def middle(self, h: Tensor) -> Tensor:
        try:
            scale = float(h.detach().abs().mean())
        except:  # noqa: E722
            scale = 1.0
        return h * scale


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class TriesNumpy(Mlp):
    """numpy, and torch if that fails."""

    def forward(self, x: Tensor) -> Any:
        try:
            scale = float(x.detach().numpy().max())
        except Exception:
            scale = 1.0
        return super().forward(x) * scale


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class SuppressesErrors(Mlp):
    """`finally` with a return."""

    def middle(self, h: Tensor) -> Tensor:
        result = h.relu()
        try:
            if h.max() > -1e9:
                result = h * 2
        finally:
            return result  # noqa: B012


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class LooksAtRank(Mlp):
    """Each rank does something else."""

    def middle(self, h: Tensor) -> Tensor:
        return h * (1 + (dist.get_rank() if dist.is_initialized() else 0))


@case("devices", MLP, *CALLS)
class LooksAtTracing(Mlp):
    """What a tracer is asked for."""

    def middle(self, h: Tensor) -> Tensor:
        traced = torch.compiler.is_compiling() or torch.compiler.is_exporting()
        return wide(h) if traced else h.relu()


def _environment(value: str) -> Any:
    return lambda model: os.environ.__setitem__("BATTERY", value)


@case("devices", MLP, call(before=_environment("")), call(before=_environment("1")), expect="equal_or_refused")
class Environment(Mlp):
    """An environment variable, of which the architecture says that it is assumed not to change."""

    def middle(self, h: Tensor) -> Tensor:
        return h * 2 if os.environ.get("BATTERY") else h.relu()


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class DispatchModes(Mlp):
    """Whether a dispatch mode is on."""

    def middle(self, h: Tensor) -> Tensor:
        watched = _python_dispatch._get_current_dispatch_mode() is not None
        return h.relu() if watched else wide(h)


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class LooksAtFrames(Mlp):
    """Who calls."""

    def middle(self, h: Tensor) -> Tensor:
        frame, names = sys._getframe(), []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        return h.relu() if "compile_call" in names else wide(h)


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class DefaultDevice(Mlp):
    """Tensors of no device, made in a body."""

    def middle(self, h: Tensor) -> Tensor:
        ramp = torch.arange(6, dtype=h.dtype)
        return h * (1 + ramp[: h.shape[1], None]) if ramp.device.type == "cpu" else wide(h)


@case("devices", ATTENTION, *CALLS)
class BackendSettings(Attention):
    """A setting of a backend."""

    def score(self, scores: Tensor) -> Tensor:
        return scores if torch.backends.cuda.flash_sdp_enabled() else scores * 2


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class IsContiguous(Mlp):
    """Memory layout decides."""

    def middle(self, h: Tensor) -> Tensor:
        part = h.unflatten(-1, (-1, 4))[:, :, 0]
        return h * part.sum(-1, keepdim=True) if part.is_contiguous() else h.relu()


@case("devices", MLP, *CALLS, expect="equal_or_refused")
class RequiresGradOfSplit(Mlp):
    """Whether what a sharded layer gives has a gradient function of a certain name."""

    def middle(self, h: Tensor) -> Tensor:
        name = "" if h.grad_fn is None else h.grad_fn.name()
        return h.relu() if "Add" in name or "View" in name else wide(h)
