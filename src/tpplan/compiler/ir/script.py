"""Scripts: a body as a list of operations on local tensors, and how it is played.

in:  a script, a module with its local parameters, the arguments of a call
out: the call's result
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tpplan.compat.modules import named_modules
from tpplan.compat.schemas import OpOverload, written_values
from tpplan.compiler.ir.pytree import children, rebuilt
from tpplan.compiler.ir.trace import Path, Reference
from tpplan.plan import TpplanError


class ReplayError(TpplanError):
    """A body can't be run from its record."""


@dataclass(frozen=True, slots=True)
class Run:
    """An operation with local sizes; `Reference`s in its arguments are values of the record.

    `gradless` says that it ran without gradients, although its operands have some.
    """

    target: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    outputs: tuple[int | None, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    on_device: bool
    gradless: bool = False


@dataclass(frozen=True, slots=True)
class OwnBackward:
    """What a function does in the backward, which torch didn't derive, with numbers of its own.

    Attributes:
        name: what it is, as messages show it.
        arriving: the gradients that it gets.
        saved: the values that it reads.
        constants: tensors that it made from Python numbers.
        steps: what it does.
        results: the gradients that it makes; None for one that it doesn't.
    """

    name: str
    arriving: tuple[int, ...]
    saved: tuple[int, ...]
    constants: tuple[tuple[int, Tensor], ...]
    steps: tuple[Run, ...]
    results: tuple[int | None, ...]

    def attach(self, made: Sequence[Tensor], saved: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        """What a function made with gradients off, of these inputs; gradients go back by this."""
        return _Attached.apply(self, [*made], [*saved], *inputs)  # pyright: ignore

    def gradients(self, arriving: Sequence[Tensor], saved: Sequence[Tensor]) -> list[Tensor | None]:
        """Those of the inputs."""
        device = arriving[0].device
        known: dict[int, Any] = {value: numbers.to(device) for value, numbers in self.constants}
        known |= dict(zip((*self.arriving, *self.saved), (*arriving, *saved), strict=True))
        for step in self.steps:
            _run(step, known, device, True)
        return [None if result is None else known[result] for result in self.results]


class _Attached(Function):
    """What was made before, with a backward."""

    @staticmethod
    def forward(ctx: Any, own: OwnBackward, made: list[Tensor], saved: list[Tensor], *inputs: Tensor) -> Any:  # pyright: ignore
        ctx.own = own
        ctx.save_for_backward(*saved)
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore
        return None, None, None, *ctx.own.gradients(gradients, ctx.saved_tensors)


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """A call of a module inside, with the places of its results."""

    module: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    results: tuple[tuple[Path, int], ...]


@dataclass(frozen=True, slots=True)
class Script:
    """A body for one geometry.

    Attributes:
        entries: the values that the arguments' tensors are, by path.
        held: parameters and buffers that it reads, by value: the path of attributes that leads to each.
        constants: tensors that it made from Python numbers.
        steps: what it does.
        result: its result, tensors replaced by `Reference`.
    """

    entries: tuple[tuple[Path, int], ...]
    held: tuple[tuple[int, str], ...]
    constants: tuple[tuple[int, Tensor], ...]
    steps: tuple[Run | ScriptCall, ...]
    result: Any


def play(
    script: Script,
    module: nn.Module,
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    first: bool,
) -> Any:
    """The result of a call.

    Args:
        script: the body for the geometry of this call.
        module: whose parameters and buffers it reads, and whose inner modules it calls.
        names: of the parameters of the module's forward.
        args, kwargs: the call's arguments, with local tensors.
        first: whether to look at the shapes of all results, once for a geometry.
    """
    known: dict[int, Any] = {value: _argument(path, names, args, kwargs) for path, value in script.entries}
    for value, path in script.held:
        known[value] = attribute_at(module, path)
    device = next((held.device for held in known.values() if isinstance(held, Tensor)), torch.device("cpu"))
    known |= {value: numbers.to(device) for value, numbers in script.constants}
    modules = dict(named_modules(module))

    for step in script.steps:
        if isinstance(step, ScriptCall):
            result = modules[step.module](*_fill(step.arguments, known), **_fill(step.keywords, known))
            known |= {value: _at(result, path) for path, value in step.results}
            continue
        _run(step, known, device, first)
    return _fill(script.result, known)


def _fill(held: Any, known: Mapping[int, Any]) -> Any:
    if isinstance(held, Reference):
        return known[held.identifier]
    if type(held) is tuple or type(held) is list:  # as nearly always; the general way takes longer
        return type(held)([_fill(item, known) for item in held])  # pyright: ignore
    items = children(held)
    return held if items is None else rebuilt(held, [_fill(item, known) for _, item in items])


def _run(step: Run, known: dict[int, Any], device: torch.device, first: bool) -> None:
    """Run a step on the values that are known, and add what it makes; look at its shapes, if it is the first time."""
    keywords = {name: _fill(held, known) for name, held in step.keywords.items()}
    if step.on_device:
        keywords["device"] = device
    arguments = [_listed(_fill(a, known)) for a in step.arguments]
    with torch.no_grad() if step.gradless else nullcontext():
        result: Any = step.target(*arguments, **keywords)
    made: list[Any] = [*result] if isinstance(result, (tuple, list)) else [result]
    if len(made) < len(step.outputs):  # it goes on with what the operator wrote to
        made += written_values(cast(OpOverload, step.target), arguments, keywords)
    for output, shape, held in zip(step.outputs, step.shapes, made, strict=True):
        if output is not None:
            if first and tuple(held.shape) != shape:
                raise ReplayError(f"{step.target} makes {list(held.shape)} on a rank instead of {list(shape or ())}")
            known[output] = held


def _listed(held: Any) -> Any:
    """Operators take lists."""
    return list(held) if isinstance(held, tuple) else held  # pyright: ignore


def _argument(path: Path, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name, *inner = path
    if isinstance(name, str) and name.startswith("*"):
        held = args[int(name[1:])]
    elif name in kwargs:
        held = kwargs[str(name)]
    else:
        held = args[names.index(str(name))]
    return _at(held, tuple(inner))


def _at(held: Any, path: Path) -> Any:
    for key in path:
        held = dict(children(held) or ())[key]
    return held


def attribute_at(module: nn.Module, path: str) -> Any:
    """What stands at a path of attributes."""
    held: Any = module
    for part in path.split("."):
        held = getattr(held, part)
    return held


__all__ = ["OwnBackward", "ReplayError", "Run", "Script", "ScriptCall", "attribute_at", "play"]
