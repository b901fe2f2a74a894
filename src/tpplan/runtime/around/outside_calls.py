"""Outside calls: modules that are called outside of any forward of the root.

By the user, who has whole tensors and wants whole ones; or once more in a backward, by an activation checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from tpplan.compat.autograd import runs_backward
from tpplan.runtime.around.outside_forwards import whole_arguments
from tpplan.runtime.compiled.compiled_calls import runtime_of
from tpplan.runtime.modules.module_runtime import RUNTIME, ModuleRuntime
from tpplan.runtime.modules.writes import WRITES, Writes
from tpplan.runtime.parameters.handed_out import HandedOut


def call_alone(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stock: Callable[..., Any] | None = None,
) -> Any:
    """A module that is called outside of the root's forward: by itself, or once more by an activation checkpoint.

    Args:
        module: the module.
        forward: what runs it, of a class of ours, without what is wrapped around that, as transformers' checkpoints
            are; or by a compiler.
        args, kwargs: the arguments.
        stock: the stock forward of the module, where no compiler runs it. It is what runs if the program in place
            makes nothing of this module; those inside of it, which may hand on parts, are then called by themselves.
    """
    writes: Writes | None = module.__dict__.get(WRITES)
    if writes is None or runs_backward() or not writes.onlookers.are_there():
        return _called(module, forward, args, kwargs, stock)
    with writes.onlookers.around():
        return _called(module, forward, args, kwargs, stock)


def _called(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stock: Callable[..., Any] | None,
) -> Any:
    alone = _is_alone(module)
    runtime: ModuleRuntime = module.__dict__[RUNTIME]
    handed_out = runtime.handed_out
    if alone and runtime.alone is None:
        return _around(handed_out, stock or functools.partial(forward, module), args, kwargs)
    handed_out.within, recalled = True, handed_out.recalled
    if recalled is not None and runs_backward():
        handed_out.compiler = recalled.compiler
    try:
        if alone:
            args, kwargs = whole_arguments(args, kwargs)
        adapted = runtime.alone if alone else None
        if adapted is not None:
            args, kwargs = adapted.enter(args, kwargs)
        result = forward(module, *args, **kwargs)
        return result if adapted is None else adapted.leave(result)
    finally:
        handed_out.within, handed_out.compiler = False, None
        handed_out.note(alone)


def _is_alone(module: nn.Module) -> bool:
    """Whether a call outside of the root's forward is one by itself; puts in place what it has to run by."""
    handed_out = runtime_of(module).handed_out
    if runs_backward():
        return handed_out.recall()
    if handed_out.alone is not None:
        handed_out.alone()
    runtime_of(module).handed_out.begin()
    return True


def call_around(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `call_alone`, of a module that has sharded ones inside and isn't one itself."""
    alone = _is_alone(module)
    handed_out = runtime_of(module).handed_out
    if alone:
        return _around(handed_out, functools.partial(forward, module), args, kwargs)
    handed_out.within = True
    try:
        return forward(module, *args, **kwargs)
    finally:
        handed_out.within = False
        handed_out.note(False)


def _around(handed_out: HandedOut, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A module that works on whole tensors, as each of those inside is called by itself."""
    handed_out.apart = True
    try:
        args, kwargs = whole_arguments(args, kwargs)
        return forward(*args, **kwargs)
    finally:
        handed_out.apart = handed_out.within = False
        handed_out.note(True)


__all__ = ["call_alone", "call_around"]
