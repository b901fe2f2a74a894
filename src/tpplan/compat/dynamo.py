# pyright: reportPrivateUsage=false
"""torch.compile: who compiles, what is skipped, and code that runs as it was written."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch._ops import OpOverload

from tpplan.compat.modules import named_modules
from tpplan.compat.schemas import TORCH_NAMESPACES

# -- torch.compile ----------------------------------------------------------------------------------------------------
_eval_frame: Any = cast("Any", torch._C)._dynamo.eval_frame


COMPILED_CALL = "_compiled_call_impl"
"""The attribute in which `Module.compile` notes what runs in place of a call."""


is_traced: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""Whether Dynamo reads this code at the moment; where Python runs it, it is false."""


active_compiler: Callable[[], object] = _eval_frame.get_eval_frame_callback
"""What compiles the frames that this thread runs; None outside of `torch.compile`."""


set_compiler: Callable[[object], object] = _eval_frame.set_eval_frame
"""Let another compiler have the frames that this thread runs, or None; returns the one before."""


not_compiled = _disable_dynamo
"""As `torch.compiler.disable`, which imports Dynamo where it decorates; this one does at the first call."""


def skip_frame(function: Callable[..., Any], called: bool = False) -> None:
    """Have Dynamo run the frames of `function` as they are; it still compiles those that they call, unless `called`.

    For every torch.
    """
    action = _eval_frame._FrameAction
    strategy = _eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if called else action.DEFAULT)
    _eval_frame.set_code_exec_strategy(cast("Any", function).__code__, strategy)


def count_as_compiled() -> None:
    """Let a call with `fullgraph=True` pass that has run no compiled frame for a reason of ours.

    For torch since 2.13.
    """
    count: Callable[[int], int] | None = getattr(_eval_frame, "set_fullgraph_compiled_frame_count", None)
    if count is not None and count(-1) >= 0:  # somebody counts, and only a counter that is off can be set
        count(1)


class _Stance:
    """Whether what `torch.compile` has returned runs as it was before; threads share one stance, and are counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._as_written = self._compiled = 0
        self._before: Any = None

    @contextmanager
    def taken(self, as_written: bool) -> Generator[None]:
        """A block with nothing compiled, or inside of one with what is called there compiled."""
        before = set_compiler(None)  # a stance can't be taken where a caller is compiled
        self._count(as_written, 1)
        try:
            yield
        finally:
            self._count(as_written, -1)
            set_compiler(before)

    def _count(self, as_written: bool, step: int) -> None:
        from torch._dynamo import eval_frame  # it takes seconds

        with self._lock:
            was = self._as_written > 0 and not self._compiled
            self._as_written += step if as_written else 0
            self._compiled += 0 if as_written else step
            now = self._as_written > 0 and not self._compiled
            if now and not was:
                self._before = eval_frame._set_stance(eval_frame.DynamoStance("force_eager"))
            elif was and not now:
                eval_frame._set_stance(self._before)


_STANCE = _Stance()


@contextmanager
def nothing_compiled() -> Generator[None]:
    """A block in which what `torch.compile` has returned runs as it was before.

    That is asked for where somebody can have compiled something: it takes seconds to import what compiles.
    For every torch.
    """
    if {"torch._dynamo", "torch.nn.attention.flex_attention"}.isdisjoint(sys.modules) or is_traced():
        yield
        return
    with _STANCE.taken(True):
        yield


def graph_break(reason: str) -> None:
    """In code that Dynamo reads: run the call that leads here as it is. For every torch."""
    torch._dynamo.graph_break(msg=reason)  # pyright: ignore


def take_as_constant(function: Callable[..., Any]) -> None:
    """Have Dynamo call `function` as it is, and put its result into the graph; torch's decorator imports Dynamo.

    For every torch.
    """
    cast("Any", function)._dynamo_marked_constant = True


def uncompiled(model: Any) -> Any:
    """The module inside of what `torch.compile(model)` returns, if it is that; else `model` itself. For every torch."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # which takes a second to import
    return model._orig_mod if frames is not None and isinstance(model, frames.OptimizedModule) else model


def compiled_inside(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """The modules inside of a model that `torch.compile` has returned, with their owner and their name there.

    For every torch.
    """
    return [
        (owner, name, child)
        for _, owner in named_modules(model)
        for name, child in owner._modules.items()
        if child is not None and uncompiled(child) is not child
    ]


def compiles(model: nn.Module) -> bool:
    """Whether the caller, or modules of a model, are compiled, rather than functions that its bodies call.

    For every torch.
    """
    held = (module.__dict__.get(COMPILED_CALL) for _, module in named_modules(model))
    own = any(hasattr(call, "_torchdynamo_orig_callable") for call in held)
    return own or active_compiler() is not None or bool(compiled_inside(model))


def read_anew(compiled: Any) -> None:
    """Let a module that `torch.compile` has returned see that its module has become another one. For every torch."""
    compiled._initialize()


def runs_as_written(func: OpOverload) -> bool:
    """Whether an operator of another library has a kernel for any device, and no derivative: it is what that calls.

    So is an operator of torch's that torch itself takes apart, but not inside of such a kernel, or of what a class of
    tensors does. For every torch.
    """
    name = func.name()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if has(name, "CompositeImplicitAutograd"):
        return True
    others = ("Meta", "Autograd", "AutogradCPU", "AutogradCUDA")
    return (
        func.namespace not in TORCH_NAMESPACES
        and has(name, "CompositeExplicitAutograd")
        and not any(has(name, key) for key in others)
    )


def run_as_written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the kernel of an operator of which `runs_as_written` holds, so that modes see what it calls.

    For every torch.
    """
    implicit = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    keys = torch._C.DispatchKey
    return func._op_dk(keys.CompositeImplicitAutograd if implicit else keys.CompositeExplicitAutograd, *args, **kwargs)
