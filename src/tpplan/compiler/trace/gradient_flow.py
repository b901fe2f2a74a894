"""Gradient flow: through functions with a backward of their own, which torch runs with gradients off.

in:  the calls, the values, and those that turned out to want a gradient although no operation gave them one
out: the values, where everything between such a value and what its function was called with wants a gradient too

    y = Square.apply(x)   ->   mul(x, x) was recorded without a gradient, yet y has one: so do all values in between

This holds for every `torch.autograd.Function`, reentrant activation checkpointing among them. And where a gradient
ends, as in straight-through estimators:

    w + (q - w).detach()    ->   q has no gradient, though it is made of w

Hooks, on tensors and of modules, are noted as functions of the gradients that they get:

    h.register_hook(lambda g: 2 * g)   ->   of h's gradient, h's gradient
    up.register_full_backward_hook(f)  ->   of the gradients of `up`'s results and arguments, the same
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.compat.autograd import PythonNode
from tpplan.compat.hooks import ModuleHooks, backward_hooks
from tpplan.compat.modes import Unwatched
from tpplan.compiler.ir.locations import Location, location_now
from tpplan.compiler.ir.observations import Gradients
from tpplan.compiler.ir.trace import Crossing, Frame, Operation, Trace, Value
from tpplan.compiler.trace.tape import Observer, RunTape

_Step = tuple[tuple[int, ...], tuple[int, ...]]
HOOKS: dict[Callable[..., Any], bool] = {
    Tensor.register_hook: False,
    Tensor.register_post_accumulate_grad_hook: True,
}
"""What registers a hook on a tensor, and whether it runs when the gradient is accumulated."""


@dataclass(frozen=True, slots=True)
class NotedFunction:
    """A function with a backward in Python: autograd's node, the line where it was met, its results by position."""

    node: Any
    location: Location | None
    outputs: dict[int, int]


@dataclass(frozen=True, slots=True)
class NotedHook:
    """A hook in the backward.

    Attributes:
        name: what it is, as messages show it.
        location: where it was registered.
        frame: the call under way, as (module, call).
        run: takes a gradient, or None, for each of `outputs`; returns one, or None, for each of `inputs`.
        outputs, inputs: values whose gradients it gets, and makes; None for what isn't a tensor with a gradient.
        impossible: why it can't run in a sharded model at all; empty if it can.
    """

    name: str
    location: Location | None
    frame: tuple[str, int]
    run: Callable[[Sequence[Tensor | None]], Sequence[Any]]
    outputs: tuple[int | None, ...]
    inputs: tuple[int | None, ...]
    impossible: str = ""


class UnrecordedError(Exception):
    """Why there is no record of a backward."""


class GradientObserver(Observer):
    """What is special about the gradients of a run.

    Attributes:
        functions: those whose backward is written in Python, by the id of autograd's node.
        hooks: what is called in the backward.
        taken_inside: whether the forward takes gradients itself.
        twice: whether one of these is differentiated again.
        whole: whether autograd's record reaches across modules, as no reshard cuts it.
        unused: of the gradients that a forward takes, which are None, by call and number.
        surprising: values with a gradient that no operation gave them.
    """

    def __init__(self, tape: RunTape) -> None:
        """Nothing is special yet."""
        self.functions: dict[int, NotedFunction] = {}
        self.hooks: list[NotedHook] = []
        self.taken_inside = self.twice = False
        self.whole = True
        self.unused: dict[tuple[str, int, int], list[bool]] = {}
        self.surprising: set[int] = set()
        self._tape = tape
        self._gradless: set[int] = set()
        self._passed: set[int] = set()  # to modules, with gradients off

    def met(self, tensor: Tensor, value: int) -> None:
        """Note a function with a backward in Python, and a gradient that no operation gave."""
        tape, node = self._tape, tensor.grad_fn
        if isinstance(node, PythonNode) and tape.frames:
            noted = self.functions.setdefault(id(node), NotedFunction(node, location_now(), {}))
            noted.outputs.setdefault(tensor.output_nr, value)
        if not tape.values[value].differentiable:
            self.surprising.add(value)
            tape.values[value] = replace(tape.values[value], differentiable=True)

    def added(self, operation: Operation, called: bool) -> None:
        """Note what is made with gradients off."""
        if called and self._are_off():
            self._gradless.update(output for output in operation.outputs if output is not None)

    def left(self, entries: Sequence[Crossing], exits: Sequence[Crossing]) -> None:
        """A call is over; these tensors were passed in and out."""
        if self._are_off():
            self._gradless.update(crossing.target for crossing in exits)
            self._passed.update(crossing.target for crossing in entries)

    def note_tensor_hook(self, tensor: Tensor, hook: Callable[[Tensor], Any], accumulated: bool) -> None:
        """Note a hook that a forward registers on a tensor; one for when its gradient is `accumulated` can't run."""
        value = self._tape.value_of(tensor)

        def run(gradients: Sequence[Tensor | None]) -> Sequence[Any]:
            (gradient,) = gradients
            result = hook(gradient)  # pyright: ignore[reportArgumentType]
            return (gradient if result is None else result,)

        name = f"the hook `{_name_of(hook)}` on a tensor"
        reason = "in a sharded model, the parameters that a forward sees don't accumulate gradients"
        frame, reason = self._tape.frames[-1].key, reason if accumulated else ""
        self.hooks.append(NotedHook(name, location_now(), frame, run, (value,), (value,), reason))

    def note_module_hooks(self, module: nn.Module, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Note the hooks of a module's backward after a call of it, if it has any."""
        hooks = backward_hooks(module)
        if hooks is None:
            return
        results: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)  # pyright: ignore
        with Unwatched():
            made, taken = ([*map(self._differentiable, held)] for held in (results, args))
        if not any(value is not None for value in made):
            return
        shown = f"the backward hooks of `{name}`" if name else "the backward hooks of the model"
        run = _module_hooks(module, hooks, len(made), any(value is not None for value in taken))
        values = (*made, *taken)
        self.hooks.append(NotedHook(shown, None, self._tape.frames[-1].key, run, values, values))

    def _differentiable(self, item: object) -> int | None:
        return self._tape.value_of(item) if isinstance(item, Tensor) and item.requires_grad else None

    def _are_off(self) -> bool:
        """Whether gradients are off, and weren't when the call that runs began."""
        return self._tape.frames[-1].differentiates and not torch.is_grad_enabled()

    def result(self, root: Frame, values: Sequence[Value]) -> Gradients:
        """What is special about them; `values` are complete."""
        return Gradients(self.taken_inside, frozenset(self._gradless), _unanswered(root, values, self._passed))


def complete_gradients(root: Frame, values: Sequence[Value], surprising: Collection[int]) -> tuple[Value, ...]:
    """Mark the values inside of functions as differentiable.

    Args:
        root: the recorded calls.
        values: by identifier.
        surprising: values that were recorded without a gradient, and had one when they were read.
    """
    if not surprising:
        return tuple(values)
    steps = list(_steps(root))
    reached = {value.identifier for value in values if value.differentiable}
    for inputs, outputs in steps:
        if not reached.isdisjoint(inputs):
            reached.update(outputs)
    wanted = set(surprising)
    for inputs, outputs in reversed(steps):
        if not wanted.isdisjoint(outputs):
            wanted.update(i for i in inputs if i in reached and not values[i].differentiable)
    return tuple(
        replace(value, differentiable=True)
        if value.identifier in wanted and (value.dtype.is_floating_point or value.dtype.is_complex)
        else value
        for value in values
    )


def _unanswered(root: Frame, values: Sequence[Value], passed: Collection[int]) -> frozenset[int]:
    """Of the values that modules were called with under `no_grad`, those to which no gradient comes back.

    A function with a backward of its own turns gradients off as well, and what is made inside of it may have one.

    Args:
        root: the recorded calls.
        values: by identifier, with their gradients completed.
        passed: values that modules were called with while gradients were off.
    """
    if not passed:
        return frozenset()
    answered: set[int] = set()
    for inputs, outputs in reversed([*_steps(root)]):
        if any(o in answered or (o not in passed and values[o].differentiable) for o in outputs):
            answered.update(inputs)
    return frozenset(passed) - answered


def answered(trace: Trace) -> frozenset[int]:
    """The values to which a gradient comes back from what a call returns or keeps: past a `detach` none does."""
    found = {*(c.target for c in trace.root.exits), *trace.effects.leaving}
    found = {value for value in found if trace.values[value].differentiable}
    for inputs, outputs in reversed([*_steps(trace.root)]):
        if not found.isdisjoint(outputs):
            found.update(i for i in inputs if trace.values[i].differentiable)
    return frozenset(found)


def _steps(root: Frame) -> Iterator[_Step]:
    """What is made from what, in order of execution."""
    for _, node in root.in_order():
        if isinstance(node, Operation):
            yield node.inputs, tuple(output for output in node.outputs if output is not None)
        else:
            yield (node.source,), (node.target,)


def _module_hooks(
    module: nn.Module, hooks: ModuleHooks, results: int, has_inputs: bool
) -> Callable[[Sequence[Tensor | None]], Sequence[Any]]:
    """What torch does with a module's hooks, for gradients of its results and then of its arguments."""

    def run(gradients: Sequence[Tensor | None]) -> Sequence[Any]:
        if hooks.legacy:
            raise UnrecordedError("`register_backward_hook` sees the module's last operation alone")
        arrived: Any = tuple(gradients[:results])
        for hook in hooks.before:
            changed = hook(module, arrived)
            arrived = arrived if changed is None else changed
        passed: Any = tuple(gradients[results:])
        for hook in hooks.after:
            changed = hook(module, passed, arrived)
            passed = passed if changed is None or not has_inputs else changed
        return (*arrived, *passed)

    return run


def _name_of(hook: object) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__)).replace("<locals>.", "")
