"""Ambience: where a model runs for tpplan's own purposes, nothing of the caller's sees it or changes it.

    with FlopCounterMode() as counter, torch.inference_mode():
        parallelize(model, plan)                                  counts nothing, and proves calls that train

Captures, rehearsals and verifications run outside of the caller's function and dispatch modes (a default device is
one), hooks of all modules, hooks on saved tensors, inference mode, anomaly mode and profilers. Gradients are recorded.
What decides on what is computed stays: autocast, the default dtype, hooks of single modules. So do hooks of all modules
that are known to change something; see `runtime/around/onlookers.py` for how that is found.
"""

from __future__ import annotations

import dis
import functools
import inspect
import threading
from collections.abc import Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from types import CodeType, MethodType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from tpplan.compat.autograd import packs_saved_tensors, without_saved_tensor_hooks
from tpplan.compat.hooks import has_hooks_of_all, without_global_hooks
from tpplan.compat.modes import (
    DeviceContext,
    dispatch_modes,
    function_modes,
    has_dispatch_modes,
    has_modes,
    is_profiled,
    under_dispatch_modes,
    under_function_modes,
    without_dispatch_modes,
    without_profiler,
)
from tpplan.compat.modules import without_cached_weights

_FOREIGN = ("torch.", "tpplan.")
_NOTHING = nullcontext()
_threads = threading.local()


@contextmanager
def ambience(followed: Collection[object] = ()) -> Generator[None]:
    """A block with a state of its own; also usable as a decorator.

    Args:
        followed: hooks of all modules that are part of what is computed, beside those of backwards that may change a
            gradient. Inside of another such block, the hooks stay as they are there.
    """
    if getattr(_threads, "inside", False):
        with _alone():
            yield
        return

    _threads.inside = True
    try:
        with _alone(), _with_hooks(followed):
            yield
    finally:
        _threads.inside = False


def _with_hooks(followed: Collection[object]) -> AbstractContextManager[None]:
    def left_out(kind: str, hook: object) -> bool:
        hook = original(hook)
        return hook not in followed and not (kind.startswith("backward") and is_users(hook) and may_return(hook))

    return without_global_hooks(left_out)


@contextmanager
def _alone() -> Generator[None]:
    with (
        torch.inference_mode(False), without_dispatch_modes(), under_function_modes(), without_saved_tensor_hooks(),
        torch.autograd.set_detect_anomaly(False), without_profiler(), without_cached_weights(), _around(None),
    ):  # fmt: skip
        yield


# -- around a call of the user's ----------------------------------------------------------------------------------
class _Modes(NamedTuple):
    """The function and dispatch modes around a call."""

    functions: Sequence[Any]
    dispatches: Sequence[Any]


def behind_a_call() -> AbstractContextManager[None]:
    """A block for what a call needs besides its forward, which the caller's modes don't see; see `as_called`."""
    return _behind(_modes()) if has_modes() else _NOTHING


@contextmanager
def _behind(modes: _Modes) -> Generator[None]:
    with _around(modes), under_dispatch_modes(), under_function_modes():
        yield


def as_called() -> AbstractContextManager[None]:
    """A block inside of `behind_a_call` for the forward: under the caller's modes, and those that came since."""
    modes: _Modes | None = getattr(_threads, "modes", None)
    return _NOTHING if modes is None else _under(modes)


@contextmanager
def _under(modes: _Modes) -> Generator[None]:
    now = _modes()
    with (
        _around(None),
        under_dispatch_modes((*modes.dispatches, *now.dispatches)),
        under_function_modes((*modes.functions, *now.functions)),
    ):
        yield


@contextmanager
def unseen(followed: Collection[object]) -> Generator[None]:
    """A block for a call that will be run once more, so that its caller's tools see the second run alone.

    It computes what it would compute otherwise, but nothing that autograd saves is kept for a backward.
    """
    modes: _Modes | None = getattr(_threads, "modes", None)
    devices = [mode for mode in modes.functions if isinstance(mode, DeviceContext)] if modes is not None else []
    with (
        _around(_Modes(devices, ())), _with_hooks(followed), without_saved_tensor_hooks(),
        saved_tensors_hooks(_forget, _forget), without_profiler(),  # pyright: ignore
    ):  # fmt: skip
        yield


def is_seen() -> bool:
    """Whether something looks at a call: a mode, a hook of all modules or on saved tensors, a profiler."""
    modes: _Modes | None = getattr(_threads, "modes", None)
    held = () if modes is None else (*modes.functions, *modes.dispatches)
    if any(not isinstance(mode, DeviceContext) and not type(mode).__module__.startswith("tpplan.") for mode in held):
        return True
    return has_hooks_of_all() or packs_saved_tensors(True) is not None or is_profiled()


def _modes() -> _Modes:
    return _Modes(function_modes(), dispatch_modes() if has_dispatch_modes() else ())


@contextmanager
def _around(modes: _Modes | None) -> Generator[None]:
    before = getattr(_threads, "modes", None)
    _threads.modes = modes
    try:
        yield
    finally:
        _threads.modes = before


def _forget(_: object) -> None:
    return None


# -- tools --------------------------------------------------------------------------------------------------------
class Onlooker:
    """What stands in for a hook of all modules while a sharded model runs."""

    hook: Any


def original(hook: object) -> object:
    """The hook as it was registered."""
    return hook.hook if isinstance(hook, Onlooker) else hook


def is_users(tool: object) -> bool:
    """Whether a hook, or the class of a mode, is neither torch's nor ours."""
    while isinstance(tool, functools.partial):
        tool = tool.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if isinstance(tool, MethodType):
        tool = type(tool.__self__)
    elif not hasattr(tool, "__qualname__"):
        tool = type(tool)  # pyright: ignore[reportUnknownVariableType]
    return not f"{getattr(tool, '__module__', '')}.".startswith(_FOREIGN)


def may_return(hook: object) -> bool:
    """Whether a hook's code may return anything but None: a function without a `return` can't."""
    while isinstance(hook, functools.partial):
        hook = hook.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    code: object = getattr(hook, "__code__", None)
    if code is None and inspect.isfunction(called := vars(type(hook)).get("__call__")):
        code = called.__code__
    return not isinstance(code, CodeType) or _returns(code)


@functools.lru_cache(maxsize=256)
def _returns(code: CodeType) -> bool:
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return True
    for before, instruction in pairwise(dis.get_instructions(code)):
        if instruction.opname == "RETURN_CONST":
            if instruction.argval is not None:
                return True
        elif instruction.opname == "RETURN_VALUE":
            nothing = before.opname == "LOAD_CONST" and before.argval is None
            if instruction.is_jump_target or not nothing:
                return True
    return False


__all__ = [
    "Onlooker",
    "ambience",
    "as_called",
    "behind_a_call",
    "is_seen",
    "is_users",
    "may_return",
    "original",
    "unseen",
]
