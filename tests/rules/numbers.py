"""Whether what propagation promises of a call holds in numbers, forward and backward, on simulated ranks.

Replicated operands are the same on all ranks, sharded ones are cut, partial ones are random summands. What the ranks
make must be what the outcome says, and so must the gradients that arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.rules.calls import Call
from tpplan.compiler.ir.layout import Layout
from tpplan.compiler.ir.region import LocalValue, OperationNode
from tpplan.compiler.ir.trace import Operation, Reference
from tpplan.compiler.rewrite.local_steps import localised
from tpplan.compiler.rules.propagate import Outcome, Propagator, Refusal


class Wrong(AssertionError):
    """A promise that doesn't hold."""


@dataclass
class Subject:
    """A call with its whole results and gradients."""

    call: Call
    operands: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._references = self._refer((self.call.arguments, tuple(self.call.keywords.items())))
        self.in_place = self.call.operator._schema.is_mutable

    def _refer(self, held: Any) -> Any:
        if isinstance(held, Tensor):
            self.operands.append(held)
            return Reference(len(self.operands) - 1)
        return tuple(self._refer(item) for item in held) if isinstance(held, (list, tuple)) else held

    @cached_property
    def results(self) -> list[Tensor]:
        return self.run(self.leaves)

    @cached_property
    def leaves(self) -> list[Tensor]:
        """The operands, with gradients where the operator has them."""
        leaves = [_leaf(t, True) for t in self.operands]
        try:
            results = self.run(leaves)
            pairs = [(r, torch.zeros_like(r)) for r in results if r.requires_grad]
            if pairs:
                wanted = [leaf for leaf in leaves if leaf.requires_grad]
                torch.autograd.grad([r for r, _ in pairs], wanted, [z for _, z in pairs], allow_unused=True)
        except (RuntimeError, NotImplementedError):  # no derivative: no gradient will ask for one
            leaves = [_leaf(t, False) for t in self.operands]
        return leaves

    @cached_property
    def pulls(self) -> list[Tensor | None]:
        """A gradient for each result that has one."""
        generator = torch.Generator().manual_seed(1)
        return [_random(r, generator) if r.requires_grad else None for r in self.results]

    @cached_property
    def gradients(self) -> list[Tensor | None]:
        return _gradients(self.results, self.leaves, self.pulls)

    def run(self, tensors: Sequence[Tensor], arguments: Any = None) -> list[Tensor]:
        if self.in_place:
            tensors = [t.clone() for t in tensors]

        def fill(held: Any) -> Any:
            if isinstance(held, Reference):
                return tensors[held.identifier]
            return [fill(item) for item in held] if isinstance(held, (list, tuple)) else held

        args, keywords = self._references if arguments is None else arguments
        made = self.call.operator(*map(fill, args), **{name: fill(item) for name, item in keywords})
        return [t for t in (made if isinstance(made, (list, tuple)) else [made]) if isinstance(t, Tensor)]

    @cached_property
    def node(self) -> tuple[OperationNode, list[LocalValue]]:
        tensors = [*self.leaves, *self.results]
        values = [LocalValue(tuple(t.shape), tuple(t.stride()), t.dtype, t.requires_grad, None) for t in tensors]
        count = len(self.operands)
        args, keywords = self._references
        outputs = tuple(range(count, len(tensors)))
        return OperationNode(self.call.operator, args, keywords, tuple(range(count)), outputs, (), None), values

    def outcomes(self, propagator: Propagator, layouts: Sequence[Layout]) -> list[Outcome] | Refusal:
        node, values = self.node
        return propagator.outcomes(node, values, lambda i: layouts[i])

    def hold(self, layouts: Sequence[Layout], outcome: Outcome, ranks: int) -> None:
        """Raise `Wrong` unless what each rank makes, forward and backward, is what the outcome promises."""
        node, values = self.node
        count = len(self.operands)
        results = self.results
        parts = [pieces(t.detach(), held, ranks) for t, held in zip(self.leaves, layouts, strict=True)]
        known = dict(enumerate((*layouts, *outcome.outputs)))
        operation = Operation(node.target, node.arguments, dict(node.keywords), node.inputs, node.outputs, (), None)
        inputs: list[list[Tensor]] = []
        made: list[list[Tensor]] = []
        for rank in range(ranks):
            run = localised(operation, SimpleNamespace(values=values), known, ranks, rank)  # type: ignore
            own = [_leaf(part[rank], leaf.requires_grad) for part, leaf in zip(parts, self.leaves, strict=True)]
            inputs.append(own)
            try:
                made.append(self.run(own, (run.arguments, tuple(run.keywords.items()))))
            except (RuntimeError, IndexError, ValueError) as error:
                # The check that runs on local shapes refuses what torch itself refuses.
                raise _Fails(str(error).splitlines()[0]) from error
        if self.call.is_random and any(held.forward == "P" for held in known.values()):
            raise Wrong("random numbers are drawn for a sum's terms")
        for index, (whole, held) in enumerate(zip(results, outcome.outputs, strict=True)):
            for rank in range(ranks):
                if tuple(made[rank][index].shape) != held.local_shape(tuple(whole.shape), ranks, rank):
                    raise _Fails("another shape than promised")
            if self.call.without_numbers:
                continue
            _same([m[index].detach() for m in made], whole.detach(), held, held.forward == "P", f"result {index}")
        if self.call.without_numbers or not any(p is not None for p in self.pulls):
            return
        shares = [
            None if pull is None else gradient_pieces(pull, held, ranks)
            for pull, held in zip(self.pulls, outcome.outputs, strict=True)
        ]
        arrived = [
            _gradients(made[rank], inputs[rank], [None if s is None else s[rank] for s in shares])
            for rank in range(ranks)
        ]
        for index in range(count):
            whole = self.gradients[index]
            if whole is None:
                continue
            held = layouts[index]
            mine = [arrived[rank][index] for rank in range(ranks)]
            full = [torch.zeros_like(part[rank]) if g is None else g for rank, (g, part) in
                    enumerate(zip(mine, [parts[index]] * ranks, strict=True))]  # fmt: skip
            _same(full, whole, held, held.forward == "R" and held.gradient == "P", f"gradient of operand {index}", True)


class _Fails(Exception):
    """The call can't be run on local shapes: the check of the whole program finds that."""


Fails = _Fails


def _leaf(tensor: Tensor, wanted: bool) -> Tensor:
    leaf = tensor.detach().clone()
    return leaf.requires_grad_() if wanted and (leaf.is_floating_point() or leaf.is_complex()) else leaf


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    if like.dtype is torch.bool:
        return torch.randint(0, 2, like.shape, generator=generator).bool()
    if like.is_floating_point() or like.is_complex():
        return torch.randn(like.shape, dtype=like.dtype, generator=generator)
    return torch.randint(-3, 4, like.shape, generator=generator).to(like.dtype)


def _places(shape: tuple[int, ...], layout: Layout, ranks: int, rank: int) -> list[int]:
    """The entries of the sharded dim that a rank has, in its order."""
    assert layout.dim is not None
    count = shape[layout.dim]
    if layout.interleave != 1:
        return torch.arange(count).view(layout.interleave, ranks, -1)[:, rank].reshape(-1).tolist()
    return [start + i for start, length in layout.intervals(count, ranks, rank) for i in range(length)]


def pieces(whole: Tensor, layout: Layout, ranks: int) -> list[Tensor]:
    """What each rank has of a value."""
    if layout.dim is not None:
        each = (_places(tuple(whole.shape), layout, ranks, rank) for rank in range(ranks))
        return [whole.index_select(layout.dim, torch.tensor(places, dtype=torch.long)) for places in each]
    return _summands(whole, ranks) if layout.forward == "P" else [whole.clone() for _ in range(ranks)]


def _summands(whole: Tensor, ranks: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    others = [_random(whole, generator) for _ in range(ranks - 1)]
    return [whole - sum(others), *others] if others else [whole]


def gradient_pieces(whole: Tensor, layout: Layout, ranks: int) -> list[Tensor]:
    """What each rank gets as gradient of a value."""
    if layout.dim is not None:
        parts = pieces(whole, layout, ranks)
        if not layout.has_replicas:
            return parts
        replicas = max(p.replicas for p in layout.packs)
        weights = [0.25] * (replicas - 1)
        weights.append(1 - sum(weights))
        return [part * weights[rank % replicas] for rank, part in enumerate(parts)]
    return _summands(whole, ranks) if layout.gradient == "P" else [whole.clone() for _ in range(ranks)]


def _same(
    parts: Sequence[Tensor], whole: Tensor, layout: Layout, partial: bool, what: str, gradient: bool = False
) -> None:
    """Raise `Wrong` unless the ranks' parts are those of the whole."""
    if layout.dim is not None:
        joined = torch.zeros_like(whole)
        if gradient:
            for rank, part in enumerate(parts):
                places = torch.tensor(_places(tuple(whole.shape), layout, len(parts), rank), dtype=torch.long)
                joined.index_add_(layout.dim, places, part)
            _close(joined, whole, what)
            return
        for rank, part in enumerate(pieces(whole, layout, len(parts))):
            _close(parts[rank], part, f"{what} on rank {rank}")
    elif partial:
        joined = torch.stack(list(parts)).sum(0)
        # A sum of truths is a number: partial truths stay partial in whatever is made of them.
        _close(
            *((joined, whole.to(joined.dtype)) if whole.dtype is torch.bool else (joined.to(whole.dtype), whole)), what
        )
    else:
        for rank, part in enumerate(parts):
            _close(part, whole, f"{what} on rank {rank}")


def _close(ours: Tensor, whole: Tensor, what: str) -> None:
    try:
        torch.testing.assert_close(ours, whole, equal_nan=True, check_stride=False)
    except AssertionError as error:
        raise Wrong(f"{what}: {str(error).splitlines()[0]}") from None


def _gradients(
    results: Sequence[Tensor], inputs: Sequence[Tensor], pulls: Sequence[Tensor | None]
) -> list[Tensor | None]:
    pairs = [(r, p) for r, p in zip(results, pulls, strict=True) if p is not None and r.requires_grad]
    wanted = [i for i in inputs if i.requires_grad]
    if not pairs or not wanted:
        return [torch.zeros_like(i) if i.requires_grad else None for i in inputs]
    made = torch.autograd.grad([r for r, _ in pairs], wanted, [p for _, p in pairs], allow_unused=True)
    each = iter(made)
    found = [next(each) if i.requires_grad else None for i in inputs]
    return [torch.zeros_like(i) if g is None and i.requires_grad else g for g, i in zip(found, inputs, strict=True)]
