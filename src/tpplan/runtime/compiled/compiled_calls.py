"""Compiled: how the modules of a sharded model run where torch.compile compiles them.

    torch.compile(model), model.compile()               one graph of the whole body, behind the guard of the call
    layer.compile(fullgraph=True)                       one graph of a layer

Dynamo can't read the guard, nor the nodes that give parameters their gradients; neither needs to be in a graph. So the
outermost sharded module of what is compiled, a *region*, runs in two parts. First, as it always does: the call is held
against its proof, and every parameter that the region reads is put into its owner, as a plain tensor with a node of its
own outside of the graph. Then the body, which Dynamo reads to the end: modules inside find their tensors in place, and
only reshard, by collectives that Dynamo knows.

What needs Python at run time isn't compiled: bodies whose random numbers differ between ranks begin a region of their
own, calls whose path is watched run as without a compiler, and a body that calls a loss over split classes runs in
Python, where every module that it calls begins a region.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.compat.autograd import runs_backward
from tpplan.compat.dynamo import count_as_compiled, graph_break, set_compiler, skip_frame
from tpplan.compat.modes import innermost_mode
from tpplan.compat.modules import own_buffers, own_parameters
from tpplan.compiler.trace.preconditions import MARK
from tpplan.plan import Diagnostic, TpplanError
from tpplan.runtime.classes.class_scope import unseen
from tpplan.runtime.parameters.handed_out import HandedOut, Wanted
from tpplan.runtime.random.mixed_draws import CallersStream, MixedStreams
from tpplan.runtime.random.randomness import ReplicatedRandomness
from tpplan.runtime.ranks.reshard import trace_with

if TYPE_CHECKING:
    from tpplan.runtime.modules.module_runtime import ModuleRuntime

ENTRY = "_tpplan_entry"
"""The attribute of a class whose `forward` a base class has wrapped, as those of transformers' layers do."""


class CompiledCallError(TpplanError):
    """A sharded model can't be compiled in this way."""


def run_compiled(
    module: nn.Module,
    compiler: object,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    forward: Callable[..., Any] | None = None,
) -> Any:
    """Run a region whose outermost module is `module`, its body by `compiler`. Nothing else is compiled meanwhile.

    Args:
        module: the module.
        compiler: what compiles the frames of a thread.
        args, kwargs: the arguments of its call.
        forward: what runs it as without a compiler; `module.forward` unless told otherwise.
    """
    forward = module.forward if forward is None else forward
    runtime = runtime_of(module)
    handed_out = runtime.handed_out
    again = handed_out.entered is module  # its random context is open already
    drawn = runtime.random if module.training and MARK in module.__dict__ and not again else None
    if leave_uncompiled(module):
        return forward(*args, **kwargs)
    if _makes_class_calls(module):
        return _run_inner_compiled(module, compiler, lambda: forward(*args, **kwargs))
    places = _places(module, handed_out)
    lent = [(held, name, held[name]) for held, name, _, _ in places if name in held]
    before, handed_out.placed = handed_out.placed, True
    try:
        for held, name, read, table in places:
            parameter = _whole(table[name], module)
            held[name] = handed_out.told(read(parameter), parameter)
        with unseen(), nullcontext() if drawn is None else drawn:
            return _body(module, compiler, args, kwargs)
    finally:
        handed_out.placed = before
        for held, name, _, _ in places:
            held.pop(name, None)
        for held, name, tensor in lent:
            held[name] = tensor


def _makes_class_calls(module: nn.Module) -> bool:
    runtime: ModuleRuntime | None = module.__dict__.get(MARK)
    return runtime is not None and runtime.classes is not None and runtime.classes.makes_calls


def _run_inner_compiled(module: nn.Module, compiler: object, forward: Callable[[], Any]) -> Any:
    """Run a body in Python, by a function mode that Dynamo doesn't read; the modules that it calls are compiled."""
    handed_out = runtime_of(module).handed_out
    before, handed_out.compiler = handed_out.compiler, compiler
    handed_out.compiled_by = compiler
    count_as_compiled()
    try:
        return forward()
    finally:
        handed_out.compiler = before


def run_inside(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call of a module by a body that runs in Python, but whose modules are compiled."""
    handed_out = runtime_of(module).handed_out
    compiler, handed_out.compiler = handed_out.compiler, None
    try:
        return run_compiled(module, compiler, args, kwargs)
    finally:
        handed_out.compiler = compiler


def runtime_of(module: nn.Module) -> ModuleRuntime:
    """What a module needs at run time, or the first one inside of it that needs anything."""
    return next(inner.__dict__[MARK] for inner in module.modules() if MARK in inner.__dict__)


def leave_uncompiled(module: nn.Module) -> bool:
    """Whether a region has to run as without a compiler.

    Its call is watched, or was when it ran for the first time; its draws are told apart one by one; it runs from its
    record, or exchanges rows by their number; or it is under a dispatch mode, where Dynamo compiles nothing, nor ever
    again what it has met there.
    """
    runtime = runtime_of(module)
    recalled = runtime.handed_out.recalled if runs_backward() else None
    watched = runtime.handed_out.watched if recalled is None else recalled.watched
    draws = module.training and MARK in module.__dict__
    told_apart = draws and isinstance(runtime.random, (CallersStream, MixedStreams))
    if not watched and not told_apart and not _stays_in_python(module) and innermost_mode() is None:
        return False
    runtime.handed_out.uncompiled = runtime.handed_out.uncompiled or watched
    count_as_compiled()
    return True


def _stays_in_python(module: nn.Module) -> bool:
    runtime: ModuleRuntime | None = module.__dict__.get(MARK)
    return runtime is not None and (runtime.replays or runtime.dispatches)


def _body(module: nn.Module, compiler: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handed_out = runtime_of(module).handed_out
    before, handed_out.entered = handed_out.entered, module
    # A frame that Dynamo leaves, as at a graph break, comes back here from what is wrapped around `forward`.
    wrapped = ENTRY in type(module).__dict__ and before is not module
    body = _body_of(type(module), wrapped)
    trace_with(handed_out.context)
    set_compiler(compiler)
    try:
        return body(module, args, kwargs)
    except TpplanError:
        raise
    except Exception as error:
        set_compiler(None)
        reason = next((found for found in _BREAKS if found.message in str(error)), None)
        if reason is None or not type(error).__module__.startswith("torch._dynamo"):
            raise
        raise CompiledCallError([reason]) from None
    finally:
        set_compiler(None)
        handed_out.entered = before


@functools.cache
def _body_of(kind: type[nn.Module], wrapped: bool) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]:
    """What is compiled of the modules of a class: a function of its own, since Dynamo keeps a table for each."""
    name, body = f"{kind.__name__}_on_shards", _wrapped_on_shards if wrapped else _on_shards
    return FunctionType(body.__code__.replace(co_name=name, co_qualname=name), body.__globals__, name)


# Frames for Dynamo, which compiles none of torch's own.
def _on_shards(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module._on_shards(*args, **kwargs)


def _wrapped_on_shards(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return type(module).forward(module, *args, **kwargs)  # pyright: ignore


def trace_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call of a module inside of a region, as Dynamo reads it."""
    runtime: ModuleRuntime = module.__dict__[MARK]
    if not runtime.handed_out.placed or any([name not in owner.__dict__ for owner, name, _ in runtime.reads]):
        graph_break(_INLINED)
    if runtime.replays:
        graph_break(_REPLAYS)
    if runtime.dispatches:
        graph_break(_DISPATCHES)
    if runtime.classes is not None and runtime.classes.makes_calls:
        graph_break(_CLASSES)
    if module.training and runtime.random is not None:
        drawn = runtime.random
        if not isinstance(drawn, ReplicatedRandomness) or drawn.is_aside():
            graph_break(_RANDOM)
    if not runtime.handed_out.apart or runtime.handed_out.within or runtime.alone is None:
        return module._on_shards(*args, **kwargs)
    runtime.handed_out.within = True
    args, kwargs = runtime.alone.enter(args, kwargs)
    result = runtime.alone.leave(module._on_shards(*args, **kwargs))
    runtime.handed_out.within = False
    return result


def trace_root() -> None:
    """The call of the model itself in somebody's function that is compiled, as Dynamo reads it."""
    graph_break(_INLINED)


_BREAKS = (
    Diagnostic(
        "TP180",
        "a sharded model, or one of its modules, is called in a function that is compiled, and what tpplan does at the "
        "start of a call can't be part of a graph",
        help="compile the model or the module itself (`torch.compile(model)`, `layer.compile()`), or leave out "
        "`fullgraph=True`",
    ),
    Diagnostic(
        "TP181",
        "a module draws random numbers that differ between ranks, which seeds a generator and can't be part of a graph",
        help="leave out `fullgraph=True`, or set the dropout probability to 0",
    ),
    Diagnostic(
        "TP184",
        "the body of a module runs from its record, operation by operation, and isn't compiled",
        help="leave out `fullgraph=True`, or compile modules without such a body",
    ),
    Diagnostic(
        "TP184",
        "tokens go all-to-all to a module's experts, as many as their numbers say, which isn't compiled",
        help="leave out `fullgraph=True`, write `exchange: sums` for the experts, or compile other modules",
    ),
    Diagnostic(
        "TP185",
        "the body of a module inside of what is compiled calls a loss over split classes, and runs in Python",
        help="leave out `fullgraph=True`, compile the module itself, or compile modules without such a body, as the "
        "layers are",
    ),
)
# Dynamo shows a reason as the text of one line.
_INLINED, _RANDOM, _REPLAYS, _DISPATCHES, _CLASSES = (found.text.replace("\n ", ";") for found in _BREAKS)


def _places(module: nn.Module, handed_out: HandedOut) -> tuple[Wanted, ...]:
    """Every tensor that a region reads, once."""
    known = handed_out.regions.get(module)
    if known is not None:
        return known
    found: dict[tuple[int, str], Wanted] = {}
    for inner in module.modules():
        own: ModuleRuntime | None = inner.__dict__.get(MARK)
        if own is None:
            continue
        for owner, name, read in own.reads:
            found.setdefault((id(owner), name), (owner.__dict__, name, read, own_parameters(owner)))
        for owner, name, read in own.parts:
            found.setdefault((id(owner), name), (owner.__dict__, name, read, own_buffers(owner)))
    return handed_out.regions.setdefault(module, tuple(found.values()))


def _whole(tensor: Tensor, module: nn.Module) -> Tensor:
    """The tensor to read, if it isn't still split by FSDP."""
    if isinstance(tensor, DTensor) and len(tensor.placements) > 1:
        raise CompiledCallError.of(
            "TP182",
            f"FSDP gathers the parameters of modules inside of `{type(module).__name__}` one after the other, and a "
            "compiled body needs them at its start",
            help="compile the modules that `fully_shard` was called on, each by itself: `layer.compile()`",
        )
    return tensor


for _function in (run_compiled, _body):
    skip_frame(_function)


__all__ = ["CompiledCallError", "run_compiled", "run_inside", "trace_call", "trace_root"]
