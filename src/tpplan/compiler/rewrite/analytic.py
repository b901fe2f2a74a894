"""Analytic: whether a body is made of operations alone that can't hide anything between two random numbers.

in:  a region: a body without calls
out: whether agreement with a formula on random numbers, at several scales, means that the two are one function

    weight * (x * rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))      ->  yes
    (weight * …).clamp(-1e5, 1e5), torch.where(x > 1e6, …), x.round() ->  no: the same on all numbers that are tried
    weight * … + 1e-12 * x, x * sigmoid(1.702 * x)                   ->  no: a number that the formula doesn't have

Sums, products, powers and a few functions without a kink are what they seem to be on a few samples, unless a number in
them puts the difference out of sight. So each number must be one that the formulas have, or that can't: a small
integer, the number of features, eps once. Nothing may stand between the gradient and the input; a cast may not round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tpplan.compiler.ir.region import LocalValue, OperationNode, Region

_MOVES = ("reshape", "alias", "expand", "transposition", "unsqueeze", "squeeze", "copy", "cast")
_FORMULA = ("formula", "formula in place")
_POWERS = (-1, -0.5, 0.5, 1, 2, 3)
_SMALL = (0, 0.5, 1, 2, 3, 4)
_OF_GELU = (
    0.044715,
    math.sqrt(2),
    math.sqrt(0.5),
    math.sqrt(2 / math.pi),
    math.sqrt(8 / math.pi),
    math.sqrt(2 / math.pi) * 0.044715,
    math.sqrt(8 / math.pi) * 0.044715,
)
_SPELLED = 2e-9  # how exactly people write these out, relative


def is_analytic(region: Region, nodes: Sequence[OperationNode], reduces: bool) -> bool:
    """Whether a norm, if it `reduces`, or an activation is what it is on samples; its numbers aside."""
    known = (*_MOVES, *_FORMULA, "statistic" if reduces else "curve")
    entry = region.values[region.entries[0].target].dtype
    dtypes = {entry, torch.float32, torch.float64}
    for node in nodes:
        if (
            not node.is_a(*known)
            or node.overwritten
            or (node.is_a("formula in place") and not _writes_own(node, nodes))
        ):
            return False
        made = [region.values[o] for o in node.outputs if o is not None]
        if any(value.dtype not in dtypes or value.gradless for value in made):
            return False
        if any(region.values[i].differentiable for i in node.inputs) and not made[0].differentiable:
            return False
    coarse = any(value.dtype.itemsize < entry.itemsize for value in _made(region, nodes))
    rounds = coarse and not narrows(region, nodes)
    return region.values[region.exits[0].source].dtype == entry and not rounds


def narrows(region: Region, nodes: Sequence[OperationNode]) -> bool:
    """Whether a norm takes its statistics in float32, of an input in float64."""
    summed = [region.values[node.inputs[0]].dtype for node in nodes if node.is_a("statistic")]
    entry = region.values[region.entries[0].target].dtype
    return entry == torch.float64 and bool(summed) and all(dtype == torch.float32 for dtype in summed)


def _made(region: Region, nodes: Sequence[OperationNode]) -> Iterator[LocalValue]:
    return (region.values[o] for node in nodes for o in node.outputs if o is not None)


def _writes_own(node: OperationNode, nodes: Sequence[OperationNode]) -> bool:
    """Whether an operation writes to what another has made for it alone."""
    target = node.inputs[0]
    fresh = any(target in other.outputs and not other.is_a(*_MOVES, "formula in place") for other in nodes)
    return fresh and sum(other.inputs.count(target) for other in nodes) == 1


def numbers_of(node: OperationNode) -> Iterator[float]:
    """The numbers that an operation computes with: not those that name dims and sizes."""
    arguments: tuple[Any, ...] = (*node.arguments, *(held for _, held in node.keywords))
    if node.is_a(*_FORMULA):
        yield from (float(a) for a in arguments if isinstance(a, (int, float)) and not isinstance(a, bool))
    elif node.is_a("statistic"):
        yield from (a for a in arguments if isinstance(a, float))


def has_known_numbers(nodes: Sequence[OperationNode], features: int, eps: float | None) -> bool:
    """Whether all numbers are of the formula: for a norm over `features` with `eps` once, or for an activation."""
    left = [n for node in nodes for n in numbers_of(node) if not _is_power(node, n)]
    if eps is None:
        return all(_near(abs(n), (*_SMALL, *_OF_GELU)) for n in left)
    others = [n for n in left if n != eps]
    sizes = (features, 1 / features, math.sqrt(features), 1 / math.sqrt(features))
    exact = all(_near(abs(n), (*_SMALL, *sizes)) for n in others)
    return len(others) == len(left) - 1 and exact


def powers_are_plain(nodes: Sequence[OperationNode]) -> bool:
    """Whether exponents are those of roots, squares and cubes, and norms of vectors are Euclidean."""
    powers = [node.arguments[1] for node in nodes if node.is_a("power")]
    norms = [node.arguments[1] for node in nodes if node.is_a("vector norm") and node.arguments[1:]]
    return all(p in _POWERS for p in powers) and all(n == 2 for n in norms)


def _is_power(node: OperationNode, number: float) -> bool:
    return node.is_a("power", "vector norm") and number == node.arguments[1]


def _near(number: float, known: Sequence[float]) -> bool:
    return any(number == n or (n not in _SMALL and abs(number - n) <= _SPELLED * n) for n in known)


__all__ = ["has_known_numbers", "is_analytic", "narrows", "numbers_of", "powers_are_plain"]
