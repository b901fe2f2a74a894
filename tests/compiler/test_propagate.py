"""What propagation promises of an operation holds in numbers, forward and backward, for each layout of its operands.

Each case runs on two pretended ranks: replicated operands are the same on both, sharded ones are cut, partial ones are
random summands. What the ranks make must be what the outcome says, and so must the gradients that arrive.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from tpplan.compat import propagator
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, REPLICATED_PARTIAL, Layout, sharded
from tpplan.compiler.ir.region import LocalValue, OperationNode
from tpplan.compiler.ir.trace import Reference
from tpplan.compiler.rules.propagate import Outcome, Propagator, Refusal
from tpplan.runtime.ranks.segments import in_packs, taken

RANKS = 2
aten = torch.ops.aten
X = (4, 6, 8)


@dataclass(frozen=True)
class Case:
    """An operator with operands of these shapes, which `arguments` refer to by number."""

    operator: Any
    arguments: tuple[Any, ...]
    operands: tuple[Any, ...]
    parameters: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        shapes = "-".join("x".join(map(str, held)) if isinstance(held, tuple) else "ids" for held in self.operands)
        return f"{self.operator}-{shapes}-{len(self.arguments)}{'p' if self.parameters else ''}"


def ref(*numbers: int) -> tuple[Reference, ...]:
    return tuple(Reference(n) for n in numbers)


A, B, C = ref(0, 1, 2)
IDS = torch.tensor([[1, 3, 0], [2, 2, 3]])
MASK = torch.arange(4 * 6 * 8).view(4, 6, 8) % 3 == 0

CASES = [
    Case(aten.mm.default, (A, B), ((4, 6), (6, 8))),
    Case(aten.bmm.default, (A, B), ((2, 4, 6), (2, 6, 8))),
    Case(aten.addmm.default, (C, A, B), ((4, 6), (6, 8), (8,))),
    Case(aten.addmm.default, (C, A, B), ((4, 6), (6, 8), (8,)), frozenset({2})),
    Case(aten.baddbmm.default, (C, A, B), ((2, 4, 6), (2, 6, 8), (2, 4, 8))),
    Case(aten.add.Tensor, (A, B), (X, X)),
    Case(aten.add.Tensor, (A, B), (X, (8,))),
    Case(aten.add.Tensor, (A, B), (X, (8,)), frozenset({1})),
    Case(aten.add.Tensor, (A, 1.5), (X,)),
    Case(aten.add.Scalar, (A, 1.5), (X,)),
    Case(aten.sub.Tensor, (A, B), (X, X)),
    Case(aten.rsub.Scalar, (A, 2.0), (X,)),
    Case(aten.mul.Tensor, (A, B), (X, X)),
    Case(aten.mul.Tensor, (A, B), (X, (8,)), frozenset({1})),
    Case(aten.mul.Tensor, (A, B), (X, (4, 6, 1))),
    Case(aten.mul.Tensor, (A, 3.0), (X,)),
    Case(aten.div.Tensor, (A, B), (X, X)),
    Case(aten.div.Tensor, (A, 3.0), (X,)),
    Case(aten.neg.default, (A,), (X,)),
    Case(aten.pow.Tensor_Scalar, (A, 2), (X,)),
    Case(aten.abs.default, (A,), (X,)),
    Case(aten.exp.default, (A,), (X,)),
    Case(aten.sin.default, (A,), (X,)),
    Case(aten.gelu.default, (A,), (X,)),
    Case(aten.silu.default, (A,), (X,)),
    Case(aten.relu.default, (A,), (X,)),
    Case(aten.tanh.default, (A,), (X,)),
    Case(aten.sigmoid.default, (A,), (X,)),
    Case(aten.clamp.default, (A, -0.5, 0.5), (X,)),
    Case(aten.maximum.default, (A, B), (X, X)),
    Case(aten.where.self, (MASK, A, B), (X, X)),
    Case(aten.masked_fill.Scalar, (A, MASK, 2.0), (X,)),
    Case(aten.masked_fill.Scalar, (A, MASK, 0), (X,)),
    Case(aten.addcmul.default, (A, B, C), (X, X, X)),
    Case(aten.lerp.Scalar, (A, B, 0.3), (X, X)),
    Case(aten.ones_like.default, (A,), (X,)),
    Case(aten.full_like.default, (A, 2.0), (X,)),
    Case(aten._softmax.default, (A, -1, False), (X,)),
    Case(aten._softmax.default, (A, 1, False), (X,)),
    Case(aten._log_softmax.default, (A, -1, False), (X,)),
    Case(aten._safe_softmax.default, (A, -1), (X,)),
    Case(aten.native_layer_norm.default, (A, (8,), B, C, 1e-5), (X, (8,), (8,)), frozenset({1, 2})),
    Case(aten.sum.dim_IntList, (A, (1,)), (X,)),
    Case(aten.sum.dim_IntList, (A, (-1,), True), (X,)),
    Case(aten.sum.default, (A,), (X,)),
    Case(aten.mean.dim, (A, (-1,), True), (X,)),
    Case(aten.mean.default, (A,), (X,)),
    Case(aten.amax.default, (A, (-1,)), (X,)),
    Case(aten.var.correction, (A, (-1,)), (X,)),
    Case(aten.logsumexp.default, (A, (-1,)), (X,)),
    Case(aten.linalg_vector_norm.default, (A,), (X,)),
    Case(aten.cumsum.default, (A, 1), (X,)),
    Case(aten.cat.default, (ref(0, 1), 1), (X, X)),
    Case(aten.cat.default, (ref(0, 1), -1), (X, X)),
    Case(aten.stack.default, (ref(0, 1), 0), (X, X)),
    Case(aten.split.Tensor, (A, 4, -1), (X,)),
    Case(aten.split_with_sizes.default, (A, (2, 6), -1), (X,)),
    Case(aten.unbind.int, (A, 0), (X,)),
    Case(aten.slice.Tensor, (A, 1, 0, 3), (X,)),
    Case(aten.slice.Tensor, (A, 2, 4, 8), (X,)),
    Case(aten.select.int, (A, 1, 0), (X,)),
    Case(aten.transpose.int, (A, 1, 2), (X,)),
    Case(aten.permute.default, (A, (2, 0, 1)), (X,)),
    Case(aten.unsqueeze.default, (A, 1), (X,)),
    Case(aten.squeeze.dim, (A, 1), ((4, 1, 8),)),
    Case(aten.t.default, (A,), ((4, 6),)),
    Case(aten.clone.default, (A,), (X,)),
    Case(aten._to_copy.default, (A,), (X,)),
    Case(aten.flip.default, (A, (1,)), (X,)),
    Case(aten.roll.default, (A, (1,), (1,)), (X,)),
    Case(aten.tril.default, (A,), (X,)),
    Case(aten.constant_pad_nd.default, (A, (1, 1), 0.0), (X,)),
    Case(aten.constant_pad_nd.default, (A, (1, 1), 2.0), (X,)),
    Case(aten.embedding.default, (A, IDS), ((4, 8),)),
    Case(aten.index_select.default, (A, 1, torch.tensor([0, 3])), (X,)),
    Case(aten.index.Tensor, (A, (None, torch.tensor([0, 3]))), (X,)),
    Case(aten.gather.default, (A, 2, torch.zeros(4, 6, 1, dtype=torch.long)), (X,)),
    Case(aten.mse_loss.default, (A, B), (X, X)),
    Case(aten.repeat.default, (A, (1, 2, 1)), (X,)),
    Case(aten.sort.default, (A, -1), (X,)),
    Case(aten.topk.default, (A, 2), (X,)),
]  # fmt: skip


def layouts_for(shape: tuple[int, ...], parameter: bool) -> list[Layout]:
    if parameter:
        return [REPLICATED]
    cuts = [sharded(dim) for dim, size in enumerate(shape) if size % RANKS == 0]
    return [REPLICATED, REPLICATED_PARTIAL, PARTIAL, *cuts]


def pieces(whole: Tensor, layout: Layout) -> list[Tensor]:
    """What each rank holds of a value."""
    if layout.is_sharded:
        assert layout.dim is not None
        held = (layout.intervals(whole.shape[layout.dim], RANKS, rank) for rank in range(RANKS))
        return [taken(whole, layout.dim, intervals).clone() for intervals in held]
    if layout.forward == "P":
        return summands(whole)
    return [whole.clone() for _ in range(RANKS)]


def summands(whole: Tensor) -> list[Tensor]:
    first = torch.randn_like(whole)
    return [first, whole - first]


def gradient_pieces(whole: Tensor, layout: Layout) -> list[Tensor]:
    """What each rank gets as gradient of a value."""
    if layout.is_sharded:
        return pieces(whole, layout)
    return summands(whole) if layout.gradient == "P" else [whole.clone() for _ in range(RANKS)]


def joined(parts: Sequence[Tensor], layout: Layout, partial: bool) -> Tensor:
    if layout.dim is not None:
        whole = torch.cat(list(parts), layout.dim)
        return in_packs(whole, layout.dim, layout.packs, RANKS) if layout.packs else whole
    if partial:
        return torch.stack(list(parts)).sum(0)
    torch.testing.assert_close(parts[1], parts[0], msg=lambda m: f"replicated, but the ranks differ: {m}")
    return parts[0]


def call(case: Case, tensors: Sequence[Tensor], constants: Callable[[Tensor], Tensor]) -> list[Tensor]:
    def fill(argument: Any) -> Any:
        if isinstance(argument, Reference):
            return tensors[argument.identifier]
        if isinstance(argument, Tensor):
            return constants(argument)
        if isinstance(argument, tuple):
            return [fill(item) for item in argument]
        return argument

    result = case.operator(*(fill(argument) for argument in case.arguments))
    return [r for r in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(r, Tensor)]


def node_of(case: Case, wholes: Sequence[Tensor], results: Sequence[Tensor]) -> tuple[OperationNode, list[LocalValue]]:
    values = [value_of(t, True, REPLICATED if i in case.parameters else None) for i, t in enumerate(wholes)]
    inputs: list[int] = []

    def refer(argument: Any) -> Any:
        if isinstance(argument, Reference):
            inputs.append(argument.identifier)
            return argument
        if isinstance(argument, Tensor):
            values.append(value_of(argument, False, None))
            inputs.append(len(values) - 1)
            return Reference(len(values) - 1)
        if isinstance(argument, tuple):
            return tuple(refer(item) for item in argument)
        return argument

    arguments = tuple(refer(argument) for argument in case.arguments)
    outputs: list[int] = []
    for result in results:
        values.append(value_of(result, result.requires_grad, None))
        outputs.append(len(values) - 1)
    node = OperationNode(case.operator, arguments, (), tuple(inputs), tuple(outputs), (), None)
    return node, values


def value_of(tensor: Tensor, differentiable: bool, parameter: Layout | None) -> LocalValue:
    return LocalValue(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, differentiable, parameter)


def promises(case: Case) -> Iterator[tuple[tuple[Layout, ...], Outcome, OperationNode]]:
    """Every accepted layout of the operands, with what's promised for it."""
    wholes = operands(case)
    node, values = node_of(case, wholes, call(case, wholes, lambda t: t))
    propagator = Propagator(RANKS, 4)
    choices = [layouts_for(shape, i in case.parameters) for i, shape in enumerate(case.operands)]
    for layouts in itertools.product(*choices):
        held = dict(enumerate(layouts))
        found = propagator.outcomes(node, values, lambda i, held=held: held.get(i, REPLICATED))
        if not isinstance(found, Refusal):
            for outcome in found:
                yield layouts, outcome, node


def operands(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(shape, dtype=torch.float64, generator=generator) + 0.1).requires_grad_() for shape in case.operands
    ]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_promised_of_an_operation_holds_in_numbers(case: Case) -> None:
    accepted = 0
    for layouts, outcome, node in promises(case):
        try:
            _hold(case, layouts, outcome, node)
        except AssertionError as error:
            shown = ", ".join(map(str, layouts))
            raise AssertionError(f"{node.name}({shown}) -> {', '.join(map(str, outcome.outputs))}: {error}") from error
        accepted += 1
    assert accepted, "not even replicated operands are accepted"


def _hold(case: Case, layouts: tuple[Layout, ...], outcome: Outcome, node: OperationNode) -> None:
    wholes = operands(case)
    results = call(case, wholes, lambda t: t)
    upstream = [torch.randn_like(r) if r.is_floating_point() else None for r in results]
    parts = [pieces(whole.detach(), layout) for whole, layout in zip(wholes, layouts, strict=True)]
    local_results: list[list[Tensor]] = []
    local_inputs: list[list[Tensor]] = []
    for rank in range(RANKS):
        inputs = [part[rank].requires_grad_() for part in parts]
        local_inputs.append(inputs)
        local_results.append(call(case, inputs, lambda t, rank=rank: t))
    for index, (whole, layout) in enumerate(zip(results, outcome.outputs, strict=True)):
        mine = [local[index].detach() for local in local_results]
        torch.testing.assert_close(joined(mine, layout, layout.forward == "P"), whole.detach())
    gradients = _gradients(results, wholes, upstream)
    shares = [
        None if pull is None else gradient_pieces(pull, layout)
        for pull, layout in zip(upstream, outcome.outputs, strict=True)
    ]
    local_gradients = [
        _gradients(local_results[rank], local_inputs[rank], [None if s is None else s[rank] for s in shares])
        for rank in range(RANKS)
    ]
    for index, (whole, layout) in enumerate(zip(gradients, layouts, strict=True)):
        partial = index in outcome.partial_parameters or (index not in case.parameters and layout.gradient == "P")
        mine = [held[index] for held in local_gradients]
        joint = joined(mine, layout, partial)
        torch.testing.assert_close(joint, whole, msg=lambda m, index=index: f"gradient of operand {index}: {m}")


def _gradients(results: Sequence[Tensor], inputs: Sequence[Tensor], pulls: Sequence[Tensor | None]) -> list[Tensor]:
    pairs = [(r, p) for r, p in zip(results, pulls, strict=True) if p is not None and r.requires_grad]
    if not pairs:
        return [torch.zeros_like(i) for i in inputs]
    found = torch.autograd.grad([r for r, _ in pairs], list(inputs), [p for _, p in pairs], allow_unused=True)
    return [torch.zeros_like(i) if g is None else g for g, i in zip(found, inputs, strict=True)]


def test_a_rule_that_is_registered_again_is_asked_again() -> None:
    library = torch.library.Library("tpplan_asked_again", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")  # pyright: ignore
    operator: Any = torch.ops.tpplan_asked_again.twice.default
    operand = propagator.OperatorMeta((4, 6), (6, 1), torch.float32, Shard(0))
    for placement in (Shard(0), Replicate(), Shard(0), Replicate()):
        # What may be chosen: for each result, and for each operand.
        propagator.register_sharding(operator, lambda _, placement=placement: [([placement], [Shard(0)])])
        assert propagator.propagate(operator, (operand,), {}, 2) == [placement]
