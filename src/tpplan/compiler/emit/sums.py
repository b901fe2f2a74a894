"""Residual norms: norms that read a sum which the body around them makes, so that one kernel can compute both.

in:  a body, a norm that it calls, and what was decided of both
out: which of the body's sums the norm reads; or why the two stay apart

    s = residual + self.self_attn(h)            the first sum of two tensors of one shape in the body
    h = self.post_attention_layernorm(s)        reads it as it is
"""

from __future__ import annotations

from tpplan.compat.schemas import schema_mutates
from tpplan.compiler.ir.region import CallNode, Instance, OperationNode, Region
from tpplan.compiler.ir.trace import Operation, Reference, Trace


def sum_before(instance: Instance, child: Instance, trace: Trace, recorded: frozenset[str]) -> int | str:
    """The number of the sum, among those of two tensors of one shape in the body of `instance`, that `child` reads.

    Args:
        instance: the body.
        child: a norm that it calls.
        trace: of both.
        recorded: the modules whose bodies run from records.

    Returns:
        The number, from 0; or why there is none, as the end of a sentence.
    """
    region = instance.region
    calls = [node for node in region.nodes if isinstance(node, CallNode)]
    node = next(node for node, inner in zip(calls, instance.children, strict=True) if inner is child)
    read = node.inputs[child.region.inputs.index(child.region.entries[0].source)]
    sums = [node.outputs[0] for node in region.nodes if isinstance(node, OperationNode) and _is_sum(node, region)]
    if read not in sums:
        return "what it normalizes isn't a sum in the body of the module that calls it"
    if instance.frame.module in recorded:
        return f"`{instance.frame.module}` runs from its record"
    if instance.values[read] in _written(trace):
        return "the sum is written to"
    return sums.index(read)


def _is_sum(node: OperationNode, region: Region) -> bool:
    if not node.is_a("plus") or node.keywords:
        return False
    shapes = [region.values[held.identifier].shape for held in node.arguments if isinstance(held, Reference)]
    return len(shapes) == 2 and shapes[0] == shapes[1]


def _written(trace: Trace) -> set[int]:
    found: set[int] = set()
    for frame in trace.root.walk():
        for node in frame.body:
            if isinstance(node, Operation):
                found.update(node.overwritten)
                found.update(
                    held.identifier
                    for place in schema_mutates(node.target)
                    if place < len(node.arguments) and isinstance(held := node.arguments[place], Reference)
                )
    return found


__all__ = ["sum_before"]
