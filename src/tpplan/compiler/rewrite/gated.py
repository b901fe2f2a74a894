"""Gated: bodies that are an activation times a gate between linear layers, and nothing else.

in:  an instance
out: `Gated`: the modules to call and the activation; None for any other body

    down_proj(act_fn(gate_proj(x)) * up_proj(x))                     ->  gate_proj, up_proj, then down_proj
    gate, up = gate_up_proj(x).chunk(2, -1); down_proj(up * silu(gate))   ->  gate_up_proj in halves, then down_proj
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tpplan.compiler.ir.region import CallNode, Instance, OperationNode, Region
from tpplan.compiler.rewrite.recognise import Activation, Norm, is_plain_call
from tpplan.ops.dim_map import dim_of

Term = tuple[Any, ...]
BodyOf = Callable[[Region], "Norm | Activation | None"]


@dataclass(frozen=True, slots=True)
class Gated:
    """A gated body.

    Attributes:
        kind: the activation, as in `Activation`.
        parts: names of the modules to call, relative to the body's: the gate and the other factor, or the one that
            makes both; then those that take the product, one after the other.
        halves: where one module makes both, which half is the gate: 0 or 1. None where two modules make them.
    """

    kind: Literal["none", "tanh", "silu"]
    parts: tuple[str, ...]
    halves: int | None


def gated_body(instance: Instance, body_of: BodyOf) -> Gated | None:
    """What `instance` is, if all that it does is to call modules and to gate."""
    region = instance.region
    if len(region.entries) != 1 or len(region.exits) != 1 or not instance.children or not is_plain_call(region):
        return None
    terms = _terms(instance, body_of)
    result = terms.get(region.exits[0].source) if terms is not None else None
    after: list[str] = []
    while result is not None and result[0] == "call" and _is_inner(result[2]):
        after.append(str(result[1]))
        result = result[2]
    if result is None or result[0] != "product":
        return None
    called = [child.frame.module for child in instance.children]
    return _of_product(result[1:], after[::-1]) if len(set(called)) == len(called) else None


def _is_inner(term: Any) -> bool:
    return term != ("x",)


def _terms(instance: Instance, body_of: BodyOf) -> dict[int, Term] | None:
    region = instance.region
    terms: dict[int, Term] = {region.entries[0].target: ("x",)}
    children = iter(instance.children)
    prefix = f"{instance.frame.module}." if instance.frame.module else ""
    for node in region.nodes:
        if isinstance(node, CallNode):
            child = next(children)
            made = _called(node, region, child, child.frame.module.removeprefix(prefix), terms, body_of)
        else:
            made = _computed(node, region, terms)
        if made is None:
            return None
        terms |= made
    return terms


def _called(
    node: CallNode, region: Region, child: Instance, leaf: str, terms: dict[int, Term], body_of: BodyOf
) -> dict[int, Term] | None:
    if len(node.inputs) != 1 or len(node.outputs) != 1 or node.inputs[0] not in terms:
        return None
    if region.values[node.outputs[0]].gradless:
        return None
    body = body_of(child.region)
    if isinstance(body, Activation):
        return {node.outputs[0]: ("act", body.kind, terms[node.inputs[0]])}
    return {node.outputs[0]: ("call", leaf, terms[node.inputs[0]])}


def _computed(node: OperationNode, region: Region, terms: dict[int, Term]) -> dict[int, Term] | None:
    operands = [terms.get(i) for i in node.inputs]
    outputs = [o for o in node.outputs if o is not None]
    if not operands or any(term is None for term in operands) or node.overwritten:
        return None
    differentiable = any(region.values[i].differentiable for i in node.inputs)
    if any(region.values[o].gradless or region.values[o].differentiable != differentiable for o in outputs):
        return None  # it stands between its operands and their gradient
    if node.is_a("silu", "gelu"):
        kind = "silu" if node.is_a("silu") else dict(node.keywords).get("approximate", "none")
        return {outputs[0]: ("act", kind, operands[0])}
    if node.is_a("times") and len(operands) == 2:
        return {outputs[0]: ("product", *operands)}
    last = len(region.values[node.inputs[0]].shape) - 1
    halves = len({region.values[o].shape for o in outputs}) == 1
    parts = node.is_a("equal split") and len(outputs) == 2 and halves
    if parts and dim_of(node.target, node.arguments, last + 1) == last:
        return {output: ("half", i, operands[0]) for i, output in enumerate(outputs)}
    return None


def _of_product(factors: Sequence[Any], after: list[str]) -> Gated | None:
    for gate, other in (factors, factors[::-1]):
        if gate[0] != "act":
            continue
        kind, inner = gate[1], gate[2]
        if _is_call(inner) and _is_call(other):
            return Gated(kind, (inner[1], other[1], *after), None)
        if _is_half(inner) and _is_half(other) and inner[2] == other[2] and inner[1] != other[1]:
            return Gated(kind, (inner[2][1], *after), inner[1])
    return None


def _is_call(term: Any) -> bool:
    return term[0] == "call" and term[2] == ("x",)


def _is_half(term: Any) -> bool:
    return term[0] == "half" and _is_call(term[2])


__all__ = ["Gated", "gated_body"]
