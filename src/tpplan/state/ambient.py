"""Ambient: the settings of torch that a model's code asks for, which no tensor and no module shows.

in:  a block in which bodies run
out: the names of the settings that they have asked for; what these are now

    2 if torch.is_inference_mode_enabled() else h.shape[-1]     ->   "is_inference_mode_enabled"
    torch.backends.cudnn.benchmark                              ->   "backends.cudnn.benchmark"

A proof runs in an ambience of its own. Bodies are told there what holds around the call that is proved.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch.backends import ContextProp
from torch.backends.cuda import cuBLASModule

RECORDING = "is_grad_enabled"
_GETTERS: tuple[str, ...] = (
    RECORDING, "is_inference_mode_enabled", "is_anomaly_enabled", "is_anomaly_check_nan_enabled",
    "is_warn_always_enabled", "is_autocast_cache_enabled", "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled", "get_deterministic_debug_mode", "get_float32_matmul_precision",
    "get_num_threads", "get_num_interop_threads", "get_default_device", "autograd.is_multithreading_enabled",
    "backends.cuda.flash_sdp_enabled", "backends.cuda.mem_efficient_sdp_enabled", "backends.cuda.math_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled",
)  # fmt: skip
_TOLD = _GETTERS[1:]  # whether autograd records is as a proof has it
_real: dict[str, Callable[[], Any]] = {name: attrgetter(name)(torch) for name in _GETTERS}
_names = {id(getter): name for name, getter in _real.items()}
_flag: Any = vars(ContextProp)["__get__"]
_matmul: Any = vars(cuBLASModule)["__getattr__"]
_lock = threading.Lock()
_blocks = 0
_taken: list[tuple[dict[str, Any], str, Any]] = []


class _Asking(threading.local):
    """What is noted in this thread, and what bodies are told."""

    asked: set[str] | None = None
    told: Mapping[str, object] = MappingProxyType({})


_asking = _Asking()


def settings_now(names: Iterable[str]) -> tuple[object, ...]:
    """What these settings are."""
    return tuple(_real[name]() if name in _real else attrgetter(name)(torch) for name in names)


@contextmanager
def told_of_call() -> Generator[None]:
    """A block, entered in the ambience of a call; bodies are told that one's settings in it."""
    before, told = _asking.told, zip(_TOLD, settings_now(_TOLD), strict=True)
    _asking.told = dict(told)
    try:
        yield
    finally:
        _asking.told = before


@contextmanager
def noting_settings(asked: set[str], files: Sequence[ModuleType]) -> Generator[None]:
    """A block; the settings that are asked for in it, but by torch itself, are added to `asked`.

    Args:
        asked: see above.
        files: modules of Python that may have imported torch's functions by name.
    """
    before, _asking.asked = _asking.asked, asked
    _open(files)
    try:
        yield
    finally:
        _asking.asked = before
        _close()


def _open(files: Sequence[ModuleType]) -> None:
    global _blocks
    with _lock:
        _blocks += 1
        if _blocks == 1:
            ContextProp.__get__ = _asked_flag  # pyright: ignore[reportAttributeAccessIssue]
            cuBLASModule.__getattr__ = _asked_matmul  # pyright: ignore[reportAttributeAccessIssue]
            for name in _GETTERS:
                space, _, leaf = name.rpartition(".")
                _take((attrgetter(space)(torch) if space else torch).__dict__, leaf, name)
        for held in (module.__dict__ for module in files):
            for leaf, name in [(leaf, _names[id(item)]) for leaf, item in held.items() if id(item) in _names]:
                _take(held, leaf, name)


def _take(space: dict[str, Any], leaf: str, name: str) -> None:
    _taken.append((space, leaf, space[leaf]))
    space[leaf] = _AskedSetting(name)


def _close() -> None:
    global _blocks
    with _lock:
        _blocks -= 1
        if not _blocks:
            ContextProp.__get__, cuBLASModule.__getattr__ = _flag, _matmul
            while _taken:
                space, leaf, held = _taken.pop()
                space[leaf] = held


def without_noting(held: Any) -> Any:
    """A function of torch's, where another thread notes that it is called."""
    return _real[held.name] if isinstance(held, _AskedSetting) else held


class _AskedSetting:
    """Stands for a function of torch's that tells a setting."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> Any:
        return _asking.told[self.name] if _note(self.name) and self.name in _asking.told else _real[self.name]()


def _asked_flag(flag: Any, module: Any, kind: type[Any]) -> Any:
    leaf = next((name for name, held in vars(kind).items() if held is flag), "")
    _note(f"{kind.__module__.removeprefix('torch.')}.{leaf}")
    return _flag(flag, module, kind)


def _asked_matmul(module: Any, name: str) -> Any:
    _note(f"backends.cuda.matmul.{name}")
    return _matmul(module, name)


def _note(name: str) -> bool:
    """Whether it is a model's code that asks."""
    asked = _asking.asked
    caller = sys._getframe(2).f_globals.get("__name__", "")  # pyright: ignore[reportPrivateUsage]
    if asked is None or caller.partition(".")[0] in ("torch", "tpplan"):
        return False
    asked.add(name)
    return True


__all__ = ["RECORDING", "noting_settings", "settings_now", "told_of_call", "without_noting"]
