"""Gradients that a forward takes itself, as models of energies do for their forces: one operation of the trace.

in:  `torch.autograd.grad(outputs, inputs, grad_outputs)`, and how these lie
out: how the gradients lie; the reason where what arrives isn't what the layouts of `outputs` promise

    e: R, x: R      ->   R: each module sums on its way back, as in any backward
    e: R, x: R·∂P   ->   P, a term of the sum on each rank
    x: S(1)         ->   S(1)

Nothing else of that backward is recorded: that a gradient arrives as its value's layout says is what layouts mean. Its
own gradient lies the other way round: for a value `P`, whose gradient is whole, the gradient is a replicated value
whose gradient is partial. So the second backward is right as well, where each reshard runs its forward once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, REPLICATED_PARTIAL, Layout
from tpplan.compiler.ir.region import LocalValue, OperationNode
from tpplan.compiler.ir.trace import Reference


def gradient_layouts(
    node: OperationNode, values: Sequence[LocalValue], layout: Callable[[int], Layout]
) -> tuple[Layout, ...] | str:
    """The layouts of the gradients, or why they can't be told."""
    outputs, inputs, seeds = node.arguments
    for place, output in enumerate(_numbers(outputs)):
        promised = _gradient(layout(output))
        arriving = REPLICATED if seeds is None else layout(_numbers(seeds)[place])
        if promised.forward != arriving.forward or promised.dim != arriving.dim or promised.packs != arriving.packs:
            return f"differentiates a value of layout {layout(output)} by a gradient of layout {arriving}"
    if any(values[i].parameter is not None for i in _numbers(inputs)):
        return "differentiates by a parameter, whose gradients are summed after the forward"
    made = zip(node.outputs, _numbers(inputs), strict=True)
    return tuple(
        REPLICATED if output is None else _of_value(layout(i), values[output].differentiable) for output, i in made
    )


def _numbers(references: Sequence[Reference]) -> list[int]:
    return [reference.identifier for reference in references]


def _gradient(held: Layout) -> Layout:
    if held.is_sharded:
        return held
    return PARTIAL if held == REPLICATED_PARTIAL else REPLICATED


def _of_value(held: Layout, differentiable: bool) -> Layout:
    """The layout of a value's gradient, with that of its own gradient."""
    return REPLICATED_PARTIAL if held == PARTIAL and differentiable else _gradient(held)


__all__ = ["gradient_layouts"]
