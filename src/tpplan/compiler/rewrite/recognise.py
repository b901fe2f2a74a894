"""Recognise: which norm or activation a body computes, whatever way it is written.

in:  a region: a body without calls, from one tensor to one tensor; or from two, of which one gates
out: `Norm`, `Activation`, or None

    weight * (x * rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))        ->  Norm(rms, eps=1e-6)
    0.5 * x * (1 + tanh(0.79788 * (x + 0.044715 * x ** 3)))            ->  Activation("tanh")
    x * sigmoid(1.702 * x)                                             ->  None: that is no GeLU
    rms_norm(x * silu(gate))                                           ->  Norm(rms, eps=1e-6), gated before

A body is run, operation by operation, on random numbers in float64, and its results are held against the formulas.
That shows that the two are the same since no other operations may occur than those of `analytic`, with no other numbers
than the formula's: two functions of this kind that agree to ten digits, on several scales, are one. The closest that
must be told apart, the two forms of GeLU, differ in the fourth digit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from tpplan.compiler.ir.region import OperationNode, Region
from tpplan.compiler.ir.trace import Reference
from tpplan.compiler.rewrite.analytic import has_known_numbers, is_analytic, narrows, numbers_of, powers_are_plain

_AGREE = 1e-9
_LARGEST = 1 << 22
_ROWS = 4
_FAR = 1e6
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Gate:
    """A second tensor, whose silu the input, or the norm of it, is multiplied by.

    Attributes:
        entry: which of the region's entries it is.
        first: whether the input is gated before it is normalized; otherwise the result is.
    """

    entry: int
    first: bool


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over trailing dims.

    Attributes:
        centred: LayerNorm, which subtracts the mean; otherwise RMSNorm.
        dims: how many trailing dims it normalizes over.
        eps: added to the variance, or to the mean square.
        offset: added to the weight.
        weight, bias: local numbers of the parameters; None for what it doesn't have.
        cast: whether the normalized input is rounded to the input's dtype "before" it meets the weight, or "after".
        gate: what it is gated by; None for a plain norm.
        narrows: whether it takes its statistics in float32, of an input in float64.
    """

    centred: bool
    dims: int
    eps: float
    offset: float
    weight: int | None
    bias: int | None
    cast: Literal["before", "after"]
    gate: Gate | None = None
    narrows: bool = False


@dataclass(frozen=True, slots=True)
class Activation:
    """A pointwise function: "none" (GeLU by erf, as torch names it), "tanh" (GeLU by tanh) or "silu"."""

    kind: Literal["none", "tanh", "silu"]


def recognise(region: Region) -> Norm | Activation | None:
    """What `region` computes, if it is a norm or an activation that there is a kernel for."""
    return _recognise(region) if len(region.entries) == 1 else None


def recognise_gated(region: Region) -> Norm | None:
    """The norm of one tensor, gated by another, that `region` computes."""
    found = _recognise(region) if len(region.entries) == 2 else None
    return found if isinstance(found, Norm) else None


def _recognise(region: Region) -> Norm | Activation | None:
    nodes = [node for node in region.nodes if isinstance(node, OperationNode)]
    if len(nodes) != len(region.nodes) or len(region.exits) != 1 or not nodes:
        return None
    entry, made = region.values[region.entries[0].target], region.values[region.exits[0].source]
    if not entry.dtype.is_floating_point or entry.shape != made.shape or math.prod(entry.shape) > _LARGEST:
        return None
    if any(region.values[b.target].shape != entry.shape for b in region.entries) or not is_plain_call(region):
        return None
    inner = {*(b.target for b in region.entries), *(o for node in nodes for o in node.outputs if o is not None)}
    outside = {i for node in nodes for i in node.inputs} - inner
    parameters = [i for i in sorted(outside) if region.values[i].parameter is not None]
    if len(parameters) != len(outside) or len(parameters) > 2 or not entry.shape:
        return None
    find = _norm if _reduces(nodes) else _activation
    if not is_analytic(region, nodes, find is _norm) or not powers_are_plain(nodes):
        return None
    if find is _activation and len(region.entries) > 1:
        return None
    # A few rows tell as much as all, unless the body has the number of rows written into it.
    for shape in dict.fromkeys((tuple(min(n, _ROWS) for n in entry.shape[:-1]) + entry.shape[-1:], entry.shape)):
        try:
            return find(region, nodes, parameters, shape)
        except (RuntimeError, TypeError, NotImplementedError):  # also: an operator that float64 doesn't suit
            continue
    return None


def is_plain_call(region: Region) -> bool:
    """Whether it takes tensors as such, and leaves one, as such, to its caller."""
    (leaving,) = region.exits
    whole = not leaving.path and not leaving.aliases and region.outputs == (leaving.target,)
    return whole and all(len(b.path) == 1 and not b.aliases and b.source in region.inputs for b in region.entries)


def _reduces(nodes: list[OperationNode]) -> bool:
    return any(node.is_a("statistic", "sum") for node in nodes)


def _activation(
    region: Region, nodes: list[OperationNode], parameters: list[int], shape: tuple[int, ...]
) -> Activation | None:
    if parameters or not has_known_numbers(nodes, 0, None):
        return None
    generator = _generator()
    x = torch.empty(shape, dtype=torch.float64).uniform_(-9, 9, generator=generator)
    # Far out a clipped activation shows.
    x *= 10 ** torch.empty(shape, dtype=torch.float64).uniform_(-2, 3, generator=generator).clamp(min=0)
    found = _run(region, nodes, {region.entries[0].target: x})
    kinds: tuple[Literal["none", "tanh", "silu"], ...] = ("none", "tanh", "silu")
    for kind in kinds:
        expected = functional.silu(x) if kind == "silu" else functional.gelu(x, approximate=kind)
        if _agree(found, expected):
            return Activation(kind)
    return None


def _norm(region: Region, nodes: list[OperationNode], parameters: list[int], shape: tuple[int, ...]) -> Norm | None:
    shapes = {region.values[i].shape for i in parameters}
    whole = region.values[region.entries[0].target].shape
    dims = len(next(iter(shapes))) if shapes else 1
    if len(shapes) > 1 or any(held != whole[len(whole) - dims :] for held in shapes):
        return None
    shape = (*shape[: len(shape) - dims], *whole[len(whole) - dims :])
    features = math.prod(shape[len(shape) - dims :])
    for candidate in _norms(region, nodes, parameters, dims):
        scales = (1.0, math.sqrt(candidate.eps), _FAR)
        if has_known_numbers(nodes, features, candidate.eps) and all(
            _computes(region, nodes, shape, parameters, candidate, scale) for scale in scales
        ):
            return candidate
    return None


def _norms(region: Region, nodes: list[OperationNode], parameters: list[int], dims: int) -> Iterator[Norm]:
    numbers = {n for node in nodes for n in numbers_of(node)}
    order, narrow = [*parameters, None, None][:2], narrows(region, nodes)
    for eps in sorted(n for n in numbers if 0 < n < 0.1):
        for weight, bias in {(order[0], order[1]), (order[1], order[0])} if parameters else {(None, None)}:
            for centred, offset in ((True, 0.0), (False, 0.0), (False, 1.0)):
                for gate in _gates(region) if centred or bias is None else ():
                    yield Norm(centred, dims, eps, offset, weight, bias, _cast(region, nodes, weight), gate, narrow)


def _gates(region: Region) -> tuple[Gate | None, ...]:
    if len(region.entries) == 1:
        return (None,)
    return tuple(Gate(entry, first) for entry in (1, 0) for first in (True, False))


def _cast(region: Region, nodes: list[OperationNode], weight: int | None) -> Literal["before", "after"]:
    """Whether the weight meets an input that was rounded already: its partner then has the input's dtype."""
    coarse = region.values[region.entries[0].target].dtype
    derived = {weight}
    for node in nodes if coarse.itemsize < 4 or narrows(region, nodes) else ():
        others = [i for i in node.inputs if i not in derived]
        if len(others) < len(node.inputs):
            if others:
                return "before" if region.values[others[0]].dtype == coarse else "after"
            derived.update(node.outputs)
    return "after"


def _computes(
    region: Region,
    nodes: list[OperationNode],
    shape: tuple[int, ...],
    parameters: list[int],
    norm: Norm,
    scale: float,
) -> bool:
    generator = _generator()
    x = scale * (torch.randn(shape, generator=generator, dtype=torch.float64) + 0.5)
    held = {i: torch.randn(region.values[i].shape, generator=generator, dtype=torch.float64) for i in parameters}
    entries = [b.target for b in region.entries]
    given, gate = {entries[0]: x}, None
    if norm.gate is not None:
        gate = torch.randn(shape, generator=generator, dtype=torch.float64)
        given = {entries[norm.gate.entry]: gate, entries[1 - norm.gate.entry]: x}
    silu = 1.0 if gate is None else functional.silu(gate)
    before, after = (silu, 1.0) if norm.gate is None or norm.gate.first else (1.0, silu)
    x = x * before
    over = tuple(range(len(shape) - norm.dims, len(shape)))
    centred = x - x.mean(over, keepdim=True) if norm.centred else x
    expected = centred * torch.rsqrt(centred.square().mean(over, keepdim=True) + norm.eps)
    if norm.weight is not None:
        expected = expected * (held[norm.weight] + norm.offset)
    if norm.bias is not None:
        expected = expected + held[norm.bias]
    return _agree(_run(region, nodes, held | given), expected * after)


def _run(region: Region, nodes: list[OperationNode], held: dict[int, Tensor]) -> Tensor:
    """The region's result for these numbers, every floating operation in float64."""
    known: dict[int, Any] = dict(held)

    def fill(argument: Any) -> Any:
        if isinstance(argument, Reference):
            return known[argument.identifier]
        if isinstance(argument, tuple):
            return [fill(item) for item in argument]  # pyright: ignore[reportUnknownVariableType]
        if isinstance(argument, torch.dtype):
            return torch.float64 if argument.is_floating_point else argument
        return _HOST if isinstance(argument, torch.device) else argument

    for node in nodes:
        made: Any = node.target(*map(fill, node.arguments), **{name: fill(a) for name, a in node.keywords})
        results: list[Any] = [*made] if isinstance(made, (tuple, list)) else [made]
        known |= {o: result for o, result in zip(node.outputs, results, strict=True) if o is not None}
    return known[region.exits[0].source]


def _agree(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return bool(((found - expected).abs() <= _AGREE * expected.abs().clamp(min=1.0)).all())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


__all__ = ["Activation", "Gate", "Norm", "is_plain_call", "recognise", "recognise_gated"]
