"""One observed forward and backward: outputs, gradients, and what every module returned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tpplan.compat.dtensors import local_of
from tpplan.parity.call import Call
from tpplan.parity.tree import modules_in, path_name, tensors_in

Cotangent = Callable[[str, Tensor], Tensor | None]


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """What one call of a module returned.

    Attributes:
        name: the module's qualified name; "" is the model.
        call: which of its calls, from 0.
        leaf: whether it has no modules inside.
        outputs: copies of the tensors that it returned, by path.
    """

    name: str
    call: int
    leaf: bool
    outputs: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Observation:
    """What one run of a model shows, on one rank or unsharded; all tensors are local and detached.

    Attributes:
        outputs: what the model returned, by path.
        gradients: of the parameters, by canonical name; one that got none is missing.
        input_gradients: of the inputs that want one, by name.
        calls: every module call, in the order in which they returned.
        buffers: what the run left in the buffers that it wrote to, by canonical name.
    """

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    input_gradients: dict[str, Tensor]
    calls: tuple[ModuleCall, ...]
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def observe(model: nn.Module, call: Call, cotangent: Cotangent) -> Observation:
    """Run `model` forward and backward.

    Args:
        model: stock or lowered; its parameters' gradients are overwritten, and its buffers by a forward that does so.
        call: the call; its tensors are copied first.
        cotangent: the gradient to send into an output, by the output's name; None for none.
    """
    own = call.clone()
    buffers = {name: local_of(buffer) for name, buffer in model.named_buffers()}
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    calls: list[ModuleCall] = []
    handles = _watch(model, calls)
    try:
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            result = model(*own.arguments, **own.keywords)
    finally:
        for handle in handles:
            handle.remove()
    outputs = {path_name(path): tensor for path, tensor in tensors_in(result)}
    _run_backward(outputs, cotangent)
    gradients = {name: _dense(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    inputs = {name: _dense(tensor.grad) for name, tensor in own.differentiable().items() if tensor.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    buffers = {name: local_of(buffer) for name, buffer in model.named_buffers()}
    written = {name: b.detach().clone() for name, b in buffers.items() if _is_new(b, before.get(name))}
    return Observation({name: t.detach() for name, t in outputs.items()}, gradients, inputs, tuple(calls), written)


def _is_new(buffer: Tensor, before: Tensor | None) -> bool:
    if before is None or before.shape != buffer.shape:
        return True
    if buffer.is_floating_point() and buffer.itemsize == 1:  # which torch doesn't compare everywhere
        buffer, before = buffer.view(torch.uint8), before.view(torch.uint8)
    return not bool(((buffer == before) | ((buffer != buffer) & (before != before))).all())


def _run_backward(outputs: dict[str, Tensor], cotangent: Cotangent) -> None:
    sent: list[tuple[Tensor, Tensor]] = []
    for name, tensor in outputs.items():
        if tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex()):
            gradient = cotangent(name, tensor)
            if gradient is not None:
                sent.append((tensor, gradient))
    if sent:
        torch.autograd.backward([tensor for tensor, _ in sent], [gradient for _, gradient in sent])


def _watch(model: nn.Module, calls: list[ModuleCall]) -> list[RemovableHandle]:
    counts: dict[str, int] = {}

    def watcher(name: str, leaf: bool) -> Callable[[nn.Module, object, object], None]:
        def record(module: nn.Module, arguments: object, result: object) -> None:
            number = counts.get(name, 0)
            counts[name] = number + 1
            # A later in-place operation must not reach back into the record.
            outputs = {path_name(path): tensor.detach().clone() for path, tensor in tensors_in(result)}
            calls.append(ModuleCall(name, number, leaf, outputs))

        return record

    return [
        module.register_forward_hook(watcher(name, next(module.children(), None) is None))
        for name, module in modules_in(model).items()
    ]


def _dense(gradient: Tensor) -> Tensor:
    local = local_of(gradient).detach()
    return local.to_dense() if local.is_sparse else local
