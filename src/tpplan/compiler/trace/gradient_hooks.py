"""Hooks: on tensors, registered in a forward, and of modules; noted as functions of the gradients that they get.

in:  a hook as torch is given it
out: a `NotedHook`, which is recorded after the forward

    h.register_hook(lambda g: 2 * g)   ->   of h's gradient, h's gradient
    up.register_full_backward_hook(f)  ->   of the gradients of `up`'s results and arguments, the same
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from tpplan.compat.hooks import ModuleHooks, backward_hooks
from tpplan.compat.modes import Unwatched
from tpplan.compiler.trace.noted import NotedHook, UnrecordedError
from tpplan.compiler.trace.recorder import Recorder


def note_tensor_hook(recorder: Recorder, tensor: Tensor, hook: Callable[[Tensor], Any], accumulated: bool) -> None:
    """Note a hook that a forward registers on a tensor; one that runs when its gradient is `accumulated` can't be."""
    value = recorder.value_of(tensor)
    frame = recorder.frames[-1]

    def run(gradients: Sequence[Tensor | None]) -> Sequence[Any]:
        (gradient,) = gradients
        result = hook(gradient)  # pyright: ignore[reportArgumentType]
        return (gradient if result is None else result,)

    name = f"the hook `{_name_of(hook)}` on a tensor"
    place = (frame.module, frame.call)
    reason = "in a sharded model, the parameters that a forward sees don't accumulate gradients" if accumulated else ""
    recorder.hooks.append(NotedHook(name, recorder.location(), place, run, (value,), (value,), reason))


def note_module_hooks(recorder: Recorder, module: nn.Module, name: str, args: tuple[Any, ...], result: Any) -> None:
    """Note the hooks of a module's backward after a call of it, if it has any."""
    hooks = backward_hooks(module)
    if hooks is None:
        return
    results: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)  # pyright: ignore
    with Unwatched():
        made = [_differentiable(recorder, item) for item in results]  # pyright: ignore[reportUnknownVariableType]
        taken = [_differentiable(recorder, item) for item in args]
    if not any(value is not None for value in made):
        return
    frame = recorder.frames[-1]
    shown = f"the backward hooks of `{name}`" if name else "the backward hooks of the model"
    run = _module_hooks(module, hooks, len(made), any(value is not None for value in taken))
    values = (*made, *taken)
    recorder.hooks.append(NotedHook(shown, None, (frame.module, frame.call), run, values, values))


def _differentiable(recorder: Recorder, item: object) -> int | None:
    return recorder.value_of(item) if isinstance(item, Tensor) and item.requires_grad else None


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


__all__ = ["note_module_hooks", "note_tensor_hook"]
