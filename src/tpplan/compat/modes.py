# pyright: reportPrivateUsage=false
"""What is active around a call, modes and profilers among it, and blocks without some of that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import overrides
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DeviceContext",
    "RecordingMode",
    "TorchDispatchMode",
    "Unwatched",
    "enable_python_dispatcher",
    "has_function_mode",
    "innermost_mode",
    "is_jit_traced",
    "without_dispatch_modes",
    "without_function_modes",
]


class RecordingMode(TorchDispatchMode):
    """A dispatch mode without the guard that keeps torch.compile out of it.

    That guard takes longer than a dispatch, and nothing is compiled while a model is recorded. For every torch.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_MODE_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Python).add(torch._C.DispatchKey.PythonTLSSnapshot)


class Unwatched:
    """A block whose torch calls on plain tensors no dispatch mode and no function mode sees.

    A mode that lets a call pass costs twice what the call does, and a function mode sees even `.shape`.
    For every torch.
    """

    __slots__ = ("_dispatch", "_function")

    def __init__(self) -> None:
        """Make the two guards."""
        self._dispatch = torch._C._ExcludeDispatchKeyGuard(_MODE_KEYS)
        self._function = torch._C.DisableTorchFunction()

    def __enter__(self) -> None:
        """Leave the modes."""
        self._dispatch.__enter__()
        self._function.__enter__()

    def __exit__(self, *_: object) -> None:
        """Go back to them."""
        self._function.__exit__(None, None, None)
        self._dispatch.__exit__(None, None, None)


is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # pyright: ignore
"""Whether a profiler runs in this thread. For every torch."""


@contextmanager
def without_profiler() -> Generator[None]:
    """A block of which a profiler that runs in this thread notes nothing. For every torch."""
    if not is_profiled():
        yield
        return
    switch: Any = cast("Any", torch._C)._autograd._enable_record_function
    switch(False)
    try:
        yield
    finally:
        switch(True)


_blocks = [0]


_blocks_lock = threading.Lock()


@contextmanager
def without_inference_kernels() -> Generator[None]:
    """A block in which torch's encoder layers and attention compute in evaluation by what they compute in training.

    Their kernels for inference take whole weights, and `nn.TransformerEncoder` packs padded sequences for them. The
    setting is the process's: several threads may be in such blocks. For every torch.
    """
    with _blocks_lock:
        _blocks[0] += 1
        if _blocks[0] == 1:
            _blocks.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _blocks_lock:
            _blocks[0] -= 1
            if not _blocks[0]:
                torch.backends.mha.set_fastpath_enabled(bool(_blocks.pop()))


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """A block outside of all dispatch modes that are active. For every torch."""
    from torch.utils import _python_dispatch

    return cast("AbstractContextManager[Any]", _python_dispatch._disable_current_modes())


def function_modes() -> list[Any]:
    """The function modes that see a call, the innermost last. For every torch."""
    return overrides._get_current_function_mode_stack()


def dispatch_modes() -> list[Any]:
    """The dispatch modes that see an operation, the innermost last; without those that torch itself is built on.

    For every torch.
    """
    from torch.utils import _python_dispatch

    return [mode for mode in _python_dispatch._get_current_dispatch_mode_stack() if not _is_of_torch(mode)]


def _is_of_torch(mode: Any) -> bool:
    return getattr(mode, "_mode_key", None) is not None


@contextmanager
def under_function_modes(modes: Iterable[Any] = ()) -> Generator[None]:
    """A block under these function modes in place of those that are active. For every torch."""
    before = function_modes()
    _set_function_modes(modes)
    try:
        yield
    finally:
        _set_function_modes(before)


def _set_function_modes(modes: Iterable[Any]) -> None:
    while overrides._get_current_function_mode() is not None:
        overrides._pop_mode()
    for mode in modes:
        overrides._push_mode(mode)


@contextmanager
def under_dispatch_modes(modes: Iterable[Any] = ()) -> Generator[None]:
    """A block under these dispatch modes in place of those of `dispatch_modes`. For every torch."""
    before = dispatch_modes()
    _set_dispatch_modes(modes)
    try:
        yield
    finally:
        _set_dispatch_modes(before)


def _set_dispatch_modes(modes: Iterable[Any]) -> None:
    from torch.utils import _python_dispatch

    while (mode := innermost_mode()) is not None and not _is_of_torch(mode):
        _python_dispatch._pop_mode()
    for mode in modes:
        _python_dispatch._push_mode(mode)


def has_function_mode() -> bool:
    """Whether a mode looks at the functions of torch that are called. For every torch."""
    return overrides._get_current_function_mode() is not None  # pyright: ignore


without_function_modes: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunction  # pyright: ignore
"""A block whose calls no function mode sees. For every torch."""


def innermost_function_mode() -> Any:
    """The function mode that sees a call first; None if there is none. For every torch."""
    return overrides._get_current_function_mode()


def innermost_mode() -> TorchDispatchMode | None:
    """The dispatch mode that sees an operation first. For every torch."""
    from torch.utils import _python_dispatch

    return _python_dispatch._get_current_dispatch_mode()


has_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # pyright: ignore
"""How many dispatch modes see operations."""


def has_modes() -> bool:
    """Whether function or dispatch modes see what runs. For every torch."""
    return torch._C._is_torch_function_mode_enabled() or has_dispatch_modes() > 0  # pyright: ignore


def without_keeping_modes() -> AbstractContextManager[Any]:
    """A block that no mode sees which keeps what operations return, as a selective activation checkpoint's do.

    For every torch.
    """
    from torch.utils import _python_dispatch
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    kinds = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)
    if not any(isinstance(mode, kinds) for mode in _python_dispatch._get_current_dispatch_mode_stack()):
        return nullcontext()
    if isinstance(_python_dispatch._get_current_dispatch_mode(), kinds):
        return cast("AbstractContextManager[Any]", _python_dispatch._pop_mode_temporarily())
    return without_dispatch_modes()


def has_substituting_modes() -> bool:
    """Whether a dispatch mode returns something else than operations do: fake tensors, or what a checkpoint has kept.

    For every torch.
    """
    if not has_dispatch_modes():
        return False
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils import _python_dispatch
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    kinds = (FakeTensorMode, _CachedTorchDispatchMode, _CachingTorchDispatchMode)
    return any(isinstance(mode, kinds) for mode in _python_dispatch._get_current_dispatch_mode_stack())


is_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled  # pyright: ignore
"""Whether autocast is on, for any device. For every torch."""


def is_jit_traced() -> bool:
    """Whether `torch.jit.trace` records what runs. For every torch."""
    return cast("Any", torch._C)._get_tracing_state() is not None
