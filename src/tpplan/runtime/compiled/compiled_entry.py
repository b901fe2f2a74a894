"""Compiled entries: where torch.compile comes upon a module of a sharded model, and a region begins.

`compiled_calls.py` runs the region.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, cast

from torch import nn

from tpplan.compat.dynamo import active_compiler, is_traced, set_compiler, skip_frame
from tpplan.runtime.around.outside_calls import call_alone, call_around
from tpplan.runtime.around.standalone import starts_alone
from tpplan.runtime.compiled.compiled_calls import ENTRY, run_compiled, run_inside, runtime_of
from tpplan.runtime.modules.module_runtime import RUNTIME, ModuleRuntime
from tpplan.runtime.modules.writes import watched_class


def is_compiled_inside(runtime: ModuleRuntime) -> bool:
    """Whether a module begins a region, since a body calls it that isn't compiled itself."""
    if runtime.handed_out.compiler is None or runtime.classes is None:
        return False
    return not runtime.classes.makes_calls and not runtime.replays


def call_compiled(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that begins a compiled region."""
    compiler = set_compiler(None)
    try:
        guarded: Callable[..., Any] | None = getattr(type(module), "call_guarded", None)
        if guarded is not None:
            return guarded(module, args, kwargs, compiler)
        handed_out = runtime_of(module).handed_out
        handed_out.compiles = True
        if handed_out.shards is not None or not starts_alone(handed_out):
            return run_compiled(module, compiler, args, kwargs)

        def by_compiler(held: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return run_compiled(held, compiler, args, kwargs)

        return (call_alone if RUNTIME in module.__dict__ else call_around)(module, by_compiler, args, kwargs)
    finally:
        set_compiler(compiler)


@functools.cache
def carrying_class(stock: type[nn.Module]) -> type[nn.Module]:
    """A class like `stock`, for modules with sharded ones inside, which may be compiled with these."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Below a sharded class, the frame of a region that a graph break has ended comes here once more.
        if not is_traced() and active_compiler() is not None and runtime_of(self).handed_out.entered is not self:
            return call_compiled(self, args, kwargs)
        return stock.forward(self, *args, **kwargs)

    def on_shards(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return stock.forward(self, *args, **kwargs)

    skip_frame(forward)
    members = {"forward": as_called(forward, stock.forward), "_on_shards": on_shards}
    return with_entry(watched_class(stock, members), forward)


def with_entry(kind: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    """`kind`, with an entry for torch.compile if a base class has wrapped its `forward`, as transformers' layers do."""
    made: Any = kind.forward
    if made.__code__ is not cast("Any", forward).__code__:
        setattr(kind, ENTRY, as_called(_enter, made))
    return kind


def _enter(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not is_traced() and active_compiler() is not None:
        return call_compiled(self, args, kwargs)
    runtime: ModuleRuntime | None = self.__dict__.get(RUNTIME)
    if not is_traced() and runtime is not None and is_compiled_inside(runtime):
        return run_inside(self, args, kwargs)
    return type(self).forward(self, *args, **kwargs)


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Make `module` one of class `kind`.

    What compiles a module has to come before all that is wrapped around a class's `forward`, which may look for itself
    in the class: so it is an attribute of the module.
    """
    own: Any = module.__dict__.get("forward")
    if getattr(own, "__func__", None) is getattr(type(module), ENTRY, own):
        module.__dict__.pop("forward", None)
    object.__setattr__(module, "__class__", kind)  # modules tell what others set
    entry = getattr(kind, ENTRY, None)
    if entry is not None and "forward" not in module.__dict__:
        module.__dict__["forward"] = MethodType(entry, module)


def as_called(forward: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with the signature of the stock one, by which callers tell what it takes."""
    assert isinstance(forward, FunctionType)
    shown = FunctionType(forward.__code__, forward.__globals__, stock.__name__, None, forward.__closure__)
    shown.__signature__ = inspect.signature(stock)  # pyright: ignore[reportFunctionMemberAccess]
    shown.__doc__ = stock.__doc__
    return shown


for _function in (call_compiled, _enter):
    skip_frame(_function)

__all__ = ["as_called", "become", "call_compiled", "carrying_class", "is_compiled_inside", "with_entry"]
