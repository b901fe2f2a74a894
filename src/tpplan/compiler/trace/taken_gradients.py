"""Inner gradients: `torch.autograd.grad` in a forward, recorded as one operation.

in:  the call, as the function mode of a run sees it
out: its results, and a `GRADIENT` operation in the frame that is open

A capture runs it, beside the record. A run on local shapes can't, as its reshards cut what autograd remembers: there
the gradients are made by the shapes of what they are for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tpplan.compat.modes import Unwatched
from tpplan.compiler.ir.inner_gradient import GRADIENT
from tpplan.compiler.ir.locations import location_now
from tpplan.compiler.ir.trace import Operation, Reference
from tpplan.compiler.trace.recorder import Recorder

_grad: Callable[..., tuple[Tensor | None, ...]] = torch.autograd.grad  # pyright: ignore
_SIGNATURE = inspect.signature(torch.autograd.grad)


def record_gradient(recorder: Recorder, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """Run `torch.autograd.grad`, and record it."""
    if recorder.beside is not None or not recorder.frames:
        return _grad(*args, **keywords)
    call = _SIGNATURE.bind(*args, **keywords)
    call.apply_defaults()
    if call.arguments["is_grads_batched"]:
        raise NotImplementedError("`is_grads_batched` in a forward that is captured")
    outputs, inputs = (_listed(call.arguments[name]) for name in ("outputs", "inputs"))
    seeds = call.arguments["grad_outputs"]
    given = None if seeds is None else _listed(seeds)
    if given is not None and any(seed is None for seed in given):
        raise NotImplementedError("`grad_outputs` with None in a forward that is captured")
    twice = bool(call.arguments["create_graph"])
    frame, gradients = recorder.frames[-1], recorder.gradients
    with Unwatched():
        held = [[recorder.value_of(tensor) for tensor in tensors] for tensors in (outputs, inputs, given or ())]
    unused = gradients.unused.get((*frame.key, _count(frame.body)))
    if unused is None and gradients.whole:
        with recorder.aside():
            results = _grad(*args, **keywords)
    else:
        with Unwatched():
            missing = unused or [False] * len(inputs)
            results = tuple(None if out else _like(x, twice) for out, x in zip(missing, inputs, strict=True))
    with Unwatched():
        made = tuple(None if r is None else recorder.new_value(r, r.requires_grad) for r in results)
    references = [tuple(map(Reference, values)) for values in held]
    arguments = (references[0], references[1], None if given is None else references[2])
    operands = tuple(value for values in held for value in values)
    recorder.add(Operation(GRADIENT, arguments, {}, operands, made, (), location_now()))
    gradients.taken_inside = True
    gradients.twice = gradients.twice or twice
    return results


def _listed(held: Any) -> Sequence[Any]:
    return (held,) if isinstance(held, Tensor) else tuple(held)


def _count(body: Sequence[object]) -> int:
    return sum(isinstance(node, Operation) and node.target is GRADIENT for node in body)


def _like(tensor: Tensor, differentiable: bool) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return made.requires_grad_().clone() if differentiable else made


__all__ = ["record_gradient"]
