"""What is promised of packed, replicated and joined layouts, held against numbers on every rank.

An operation is right forward and backward if what each rank computes from its parts is its part of the whole result:
the backward is then the adjoint, summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d

from tpplan.compiler.ir.layout import PARTIAL, REPLICATED_PARTIAL, Layout, Pack, packed, sharded
from tpplan.compiler.ir.region import LocalValue, OperationNode
from tpplan.compiler.ir.trace import Reference
from tpplan.compiler.rules import packed as rules
from tpplan.compiler.rules.propagate import Outcome, Propagator, Refusal
from tpplan.compiler.rules.views import viewed
from tpplan.runtime.ranks.segments import in_packs, in_ranks, taken

RANKS, BATCH = 4, 3
aten = torch.ops.aten
QKV = packed(2, [Pack(32), Pack(16), Pack(16)])
GQA = packed(2, [Pack(32), Pack(16, 2), Pack(16, 2)])
SPREAD = packed(1, [Pack(2, 2)], [Pack(4)])
RUNS = packed(2, [Pack(n, replicas, first, 2) for first in (0, 2) for n, replicas in ((16, 1), (4, 2), (4, 2))])
GROUPS = packed(2, [Pack(2, 2)], [Pack(4), Pack(1, 2), Pack(1, 2)])
FEATURES = packed(2, [Pack(2, 2)], [Pack(16), Pack(4, 2), Pack(4, 2)])


def part(whole: Tensor, layout: Layout, rank: int) -> Tensor:
    """What `rank` holds."""
    if layout.dim is None:
        return whole
    if layout.interleave != 1:
        return whole.unflatten(0, (layout.interleave, -1)).chunk(RANKS, 1)[rank].flatten(0, 1)
    mine = taken(whole, layout.dim, layout.intervals(whole.shape[layout.dim], RANKS, rank))
    if not layout.within:
        return mine
    packs, holders, place = layout.shares(layout.dim + 1, RANKS, rank)
    return taken(mine, layout.dim + 1, Layout("S", "S", 0, packs=packs).intervals(0, holders, place))


@dataclass(frozen=True)
class Case:
    """An operation on whole tensors, the same on a rank's parts, and the layouts of operands and results."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[Layout, ...]
    operator: object
    arguments: tuple[object, ...]
    local: Callable[..., object]
    results: tuple[Layout, ...]


x, y, z = map(Reference, range(3))
CASES = [
    Case("split", ((3, 5, 64),), (QKV,), aten.split_with_sizes.default, (x, (32, 16, 16), -1),
         lambda a: a.split([8, 4, 4], -1), (sharded(2),) * 3),
    Case("split of replicas", ((3, 5, 64),), (GQA,), aten.split_with_sizes.default, (x, (32, 16, 16), -1),
         lambda a: a.split([8, 8, 8], -1), (sharded(2), packed(2, [Pack(16, 2)]), packed(2, [Pack(16, 2)]))),
    Case("split of one head", ((3, 5, 48),), (packed(2, [Pack(32), Pack(16, 4)]),), aten.split_with_sizes.default,
         (x, (32, 16), 2), lambda a: a.split([8, 16], -1), (sharded(2), REPLICATED_PARTIAL)),
    Case("slice", ((3, 5, 64),), (QKV,), aten.slice.Tensor, (x, 2, 32, 64), lambda a: a[..., 8:],
         (packed(2, [Pack(16), Pack(16)]),)),
    Case("negative slice", ((3, 5, 64),), (QKV,), aten.slice.Tensor, (x, 2, -16), lambda a: a[..., -4:], (sharded(2),)),
    Case("view as packs", ((3, 5, 48),), (packed(2, [Pack(16)] * 3),), aten.view.default, (x, (3, 5, 3, 4, 4)),
         lambda a: a.view(3, 5, 3, 1, 4), (sharded(3),)),
    Case("view as heads", ((3, 5, 64),), (QKV,), aten.view.default, (x, (3, 5, 16, 4)),
         lambda a: a.view(3, 5, 4, 4), (packed(2, [Pack(8), Pack(4), Pack(4)]),)),
    Case("view as uneven packs", ((3, 5, 26),), (packed(2, [Pack(13)] * 2),), aten.view.default, (x, (3, 5, 2, 13)),
         lambda a: a.view(3, 5, 2, -1), (sharded(3),)),
    Case("join uneven packs", ((3, 5, 2, 13),), (sharded(3),), aten.view.default, (x, (3, 5, 26)),
         lambda a: a.reshape(3, 5, -1), (packed(2, [Pack(13)] * 2),)),
    Case("flatten the batch of uneven features", ((3, 5, 13),), (sharded(2),), aten.view.default, (x, (15, 13)),
         lambda a: a.view(15, -1), (sharded(1),)),
    Case("view of replicas", ((3, 5, 32),), (packed(2, [Pack(32, 2)]),), aten.view.default, (x, (3, 5, 2, 16)),
         lambda a: a.view(3, 5, 1, 16), (packed(2, [Pack(2, 2)]),)),
    Case("flatten the batch", ((3, 5, 64),), (QKV,), aten.view.default, (x, (15, 64)), lambda a: a.view(15, 16),
         (packed(1, QKV.packs),)),
    Case("pairs of replicas as complex numbers", ((3, 2, 5, 2),), (packed(1, [Pack(2, 2)]),),
         aten.view_as_complex.default, (x,), torch.view_as_complex, (packed(1, [Pack(2, 2)]),)),
    Case("heads in packs with the batch", ((3, 16, 5),), (packed(1, [Pack(12), Pack(4)]),), aten.view.default,
         (x, (48, 5)), lambda a: a.reshape(12, 5), (packed(0, [Pack(12), Pack(4)] * 3),)),
    Case("heads in packs without the batch", ((48, 5),), (packed(0, [Pack(12), Pack(4)] * 3),), aten.view.default,
         (x, (3, 16, 5)), lambda a: a.view(3, 4, 5), (packed(1, [Pack(12), Pack(4)]),)),
    Case("repeat heads", ((3, 2, 1, 5, 4),), (packed(1, [Pack(2, 2)]),), aten.expand.default, (x, (3, 2, 4, 5, 4)),
         lambda a: a.expand(3, 1, 2, 5, 4), (SPREAD,)),
    Case("join repeats", ((3, 2, 4, 5, 4),), (SPREAD,), aten.view.default, (x, (3, 8, 5, 4)),
         lambda a: a.reshape(3, 2, 5, 4), (sharded(1),)),
    Case("join repeats and batch", ((3, 2, 4, 5, 4),), (SPREAD,), aten.view.default, (x, (24, 5, 4)),
         lambda a: a.reshape(6, 5, 4), (sharded(0, interleave=3),)),
    Case("group queries", ((3, 8, 5, 4),), (sharded(1),), aten.view.default, (x, (3, 2, 4, 5, 4)),
         lambda a: a.view(3, 1, 2, 5, 4), (SPREAD,)),
    Case("view as groups", ((3, 5, 48),), (RUNS,), aten.view.default, (x, (3, 5, 2, 6, 4)),
         lambda a: a.view(3, 5, 1, 4, 4), (GROUPS,)),
    Case("view as groups of features", ((3, 5, 48),), (RUNS,), aten.view.default, (x, (3, 5, 2, 24)),
         lambda a: a.view(3, 5, 1, 16), (FEATURES,)),
    Case("join groups", ((3, 5, 2, 6, 4),), (GROUPS,), aten.view.default, (x, (3, 5, 48)),
         lambda a: a.reshape(3, 5, 16), (RUNS,)),
    Case("flatten the batch of groups", ((3, 5, 48),), (RUNS,), aten.view.default, (x, (15, 48)),
         lambda a: a.view(15, 16), (packed(1, RUNS.packs),)),
    Case("the queries of groups", ((3, 5, 2, 6, 4),), (GROUPS,), aten.slice.Tensor, (x, 3, 0, -2),
         lambda a: a[..., :-2, :], (packed(2, [Pack(2, 2)], [Pack(4)]),)),
    Case("the keys of groups", ((3, 5, 2, 6, 4),), (GROUPS,), aten.select.int, (x, 3, -2),
         lambda a: a[..., -2, :], (packed(2, [Pack(2, 2)]),)),
    Case("groups in parts", ((3, 5, 2, 24),), (FEATURES,), aten.split_with_sizes.default, (x, (16, 4, 4), 3),
         lambda a: a.split([8, 4, 4], 3), (packed(2, [Pack(2, 2)], [Pack(16)]), *(packed(2, [Pack(2, 2)]),) * 2)),
    Case("one group's heads after the other's", ((3, 5, 2, 4, 4),), (packed(2, [Pack(2, 2)], [Pack(4)]),),
         aten.view.default, (x, (3, 5, 8, 4)), lambda a: a.reshape(3, 5, 2, 4), (sharded(2),)),
    Case("groups of several for a rank", ((3, 5, 96),),
         (packed(2, [Pack(n, r, f, 2) for f in (0, 2) for n, r in ((32, 1), (8, 2), (8, 2))]),),
         aten.view.default, (x, (3, 5, 2, 6, 8)), lambda a: a.view(3, 5, 1, 4, 8), (GROUPS,)),
    Case("join features", ((3, 5, 8), (3, 5, 16)), (sharded(2), sharded(2)), aten.cat.default, ((x, y), -1),
         lambda a, b: torch.cat([a, b], -1), (packed(2, [Pack(8), Pack(16)]),)),
    Case("join channels", ((3, 8, 5, 5), (3, 16, 5, 5)), (sharded(1), sharded(1)), aten.cat.default, ((x, y), 1),
         lambda a, b: torch.cat([a, b], 1), (packed(1, [Pack(8), Pack(16)]),)),
    Case("transpose", ((3, 16, 5, 4),), (packed(1, [Pack(8), Pack(8, 2)]),), aten.transpose.int, (x, 1, 2),
         lambda a: a.transpose(1, 2), (packed(2, [Pack(8), Pack(8, 2)]),)),
    Case("transpose of repeats", ((3, 2, 4, 5, 4),), (SPREAD,), aten.transpose.int, (x, 3, 4),
         lambda a: a.transpose(3, 4), (SPREAD,)),
    Case("repeat rows", ((8, 5, 4),), (sharded(0),), aten.repeat.default, (x, (2, 1, 1)),
         lambda a: a.repeat(2, 1, 1), (packed(0, [Pack(8)] * 2),)),
    Case("repeat rows for the batch", ((8, 5, 4),), (sharded(0),), aten.repeat.default, (x, (3, 1, 1)),
         lambda a: a.repeat(3, 1, 1), (sharded(0, interleave=3),)),
    Case("every second feature", ((3, 5, 32),), (sharded(2),), aten.slice.Tensor, (x, 2, 1, 32, 2),
         lambda a: a[..., 1::2], (sharded(2),)),
    Case("add", ((3, 5, 64), (3, 5, 64)), (QKV, QKV), aten.add.Tensor, (x, y), lambda a, b: a + b, (QKV,)),
    Case("convolve channels", ((3, 8, 7), (8, 1, 4), (8,)), (sharded(1), sharded(0), sharded(0)),
         aten.convolution.default, (x, y, z, (1,), (3,), (1,), False, (0,), 8),
         lambda a, w, b: conv1d(a, w, b, padding=3, groups=2), (sharded(1),)),
    Case("convolve uneven channels", ((3, 10, 7), (10, 1, 4)), (sharded(1), sharded(0)),
         aten.convolution.default, (x, y, None, (1,), (3,), (1,), False, (0,), 10),
         lambda a, w: conv1d(a, w, padding=3, groups=a.shape[1]), (sharded(1),)),
    Case("convolve groups", ((3, 16, 7), (24, 2, 3), (24,)), (sharded(1), sharded(0), sharded(0)),
         aten.convolution.default, (x, y, z, (2,), (0,), (1,), False, (0,), 8),
         lambda a, w, b: conv1d(a, w, b, stride=2, groups=2), (sharded(1),)),
    Case("convolve packs, a group of which all have", ((3, 44, 7), (44, 1, 4)),
         (packed(1, [Pack(32), Pack(6, 4), Pack(6, 4)]), packed(0, [Pack(32), Pack(6, 4), Pack(6, 4)])),
         aten.convolution.default, (x, y, None, (1,), (3,), (1,), False, (0,), 44),
         lambda a, w: conv1d(a, w, padding=3, groups=20), (packed(1, [Pack(32), Pack(6, 4), Pack(6, 4)]),)),
    Case("multiply by columns", ((3, 64), (8, 64)), (packed(1, QKV.packs),) * 2, aten.mul.Tensor, (x, x),
         lambda a, b: a * a, (packed(1, QKV.packs),)),
]  # fmt: skip

GLU = torch.nn.functional.glu
GATED = [
    Case("halves", ((3, 5, 48),), (packed(2, [Pack(24)] * 2),), aten.glu.default, (x, -1), GLU, (sharded(2),)),
    Case("halves of packs", ((3, 48, 5),), (packed(1, [Pack(16), Pack(8)] * 2),), aten.glu.default, (x, 1),
         lambda a: GLU(a, 1), (packed(1, [Pack(16), Pack(8)]),)),
    Case("beside packs", ((3, 48, 6),), (packed(1, [Pack(16), Pack(32)]),), aten.glu.default, (x,), GLU,
         (packed(1, [Pack(16), Pack(32)]),)),
]  # fmt: skip


def node_of(case: Case, wholes: list[Tensor], results: list[Tensor]) -> tuple[OperationNode, list[LocalValue]]:
    values = [LocalValue(tuple(t.shape), t.stride(), t.dtype, True) for t in (*wholes, *results)]
    outputs = tuple(range(len(wholes), len(values)))
    used = tuple(i for i in range(len(wholes)) if Reference(i) in (*case.arguments, *_inner(case.arguments[0])))
    node = OperationNode(case.operator, case.arguments, (), used, outputs, (), None)  # pyright: ignore
    return node, values


def _inner(argument: object) -> tuple[object, ...]:
    return argument if isinstance(argument, tuple) else ()


def call(case: Case, tensors: list[Tensor]) -> list[Tensor]:
    def fill(argument: object) -> object:
        if isinstance(argument, Reference):
            return tensors[argument.identifier]
        return [fill(a) for a in argument] if isinstance(argument, tuple) else argument

    made = case.operator(*map(fill, case.arguments))  # pyright: ignore
    return list(made) if isinstance(made, (tuple, list)) else [made]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rank_computes_its_part_of_the_result(case: Case) -> None:
    compare(case, 0)


@pytest.mark.parametrize("case", GATED, ids=lambda case: case.name)
def test_halves_that_lie_alike_gate_each_other(case: Case) -> None:
    compare(case, 1e-15)  # a sigmoid rounds otherwise at another place of a vector


def compare(case: Case, tolerance: float) -> None:
    wholes = [torch.randn(shape, dtype=torch.float64) for shape in case.shapes]
    results = call(case, wholes)
    node, values = node_of(case, wholes, results)
    outcomes = Propagator(RANKS, BATCH).outcomes(node, values, lambda i: case.layouts[i])
    assert not isinstance(outcomes, Refusal), outcomes.reason
    assert outcomes == [Outcome(case.results)]
    for rank in range(RANKS):
        parts = [part(whole, layout, rank) for whole, layout in zip(wholes, case.layouts, strict=True)]
        made = case.local(*parts)
        mine = made if isinstance(made, (tuple, list)) else [made]
        for whole, layout, local in zip(results, case.results, mine, strict=True):
            torch.testing.assert_close(local, part(whole, layout, rank), rtol=0, atol=tolerance)


REFUSED = [
    ("a split across packs", ((3, 5, 64),), (QKV,), aten.split_with_sizes.default, (x, (24, 24, 16), -1)),
    ("a slice across packs", ((3, 5, 64),), (QKV,), aten.slice.Tensor, (x, 2, 16, 48)),
    ("every other entry", ((3, 5, 64),), (QKV,), aten.slice.Tensor, (x, 2, 0, 64, 2)),
    ("gated halves in one stretch", ((3, 5, 64),), (sharded(2),), aten.glu.default, (x, 2)),
    ("gated halves that lie otherwise", ((3, 5, 64),), (QKV,), aten.glu.default, (x,)),
    ("packs and no packs", ((3, 5, 64), (3, 5, 64)), (QKV, sharded(2)), aten.add.Tensor, (x, y)),
    ("heads that cut packs", ((3, 5, 64),), (QKV,), aten.view.default, (x, (3, 5, 2, 32))),
    ("uneven rows laid end to end", ((13, 5),), (sharded(0),), aten.view.default, (x, (65,))),
    ("uneven features as heads", ((3, 5, 14),), (sharded(2),), aten.view.default, (x, (3, 5, 7, 2))),
    ("a mirror image", ((3, 5, 64),), (QKV,), aten.flip.default, (x, (2,))),
    ("a group that some ranks hold", ((3, 5, 48),), (RUNS,), aten.slice.Tensor, (x, 2, 0, 24)),
    ("a group of groups", ((3, 5, 2, 6, 4),), (GROUPS,), aten.select.int, (x, 2, 0)),
    ("queries without the last", ((3, 5, 2, 6, 4),), (GROUPS,), aten.slice.Tensor, (x, 3, 0, 3)),
    ("a query of groups", ((3, 5, 2, 6, 4),), (GROUPS,), aten.select.int, (x, 3, 1)),
    ("a sum over queries and keys", ((3, 5, 2, 6, 4),), (GROUPS,), aten.sum.dim_IntList, (x, (3,))),
    ("groups the other way round", ((3, 5, 2, 6, 4),), (GROUPS,), aten.flip.default, (x, (3,))),
    (
        "groups next to repeats",
        ((3, 5, 2, 6, 4),) * 2,
        (GROUPS, packed(2, [Pack(2, 2)], [Pack(6)])),
        aten.add.Tensor,
        (x, y),
    ),
    ("a sum over repeats", ((3, 2, 4, 5),), (SPREAD,), aten.sum.dim_IntList, (x, (2,))),
    (
        "a sequence convolved",
        ((3, 8, 8), (8, 1, 4)),
        (sharded(2), sharded(0)),
        aten.convolution.default,
        (x, y, None, (1,), (3,), (1,), False, (0,), 8),
    ),
    (
        "a whole weight for split channels",
        ((3, 8, 7), (8, 1, 4)),
        (sharded(1), REPLICATED_PARTIAL),
        aten.convolution.default,
        (x, y, None, (1,), (3,), (1,), False, (0,), 8),
    ),
    (
        "a whole bias for split channels",
        ((3, 8, 7), (8, 1, 4), (8,)),
        (sharded(1), sharded(0), REPLICATED_PARTIAL),
        aten.convolution.default,
        (x, y, z, (1,), (3,), (1,), False, (0,), 8),
    ),
    (
        "channels that all are mixed",
        ((3, 8, 7), (8, 8, 4)),
        (sharded(1), sharded(0)),
        aten.convolution.default,
        (x, y, None, (1,), (3,), (1,), False, (0,), 1),
    ),
    (
        "groups that several ranks hold",
        ((3, 8, 7), (8, 4, 4)),
        (sharded(1), sharded(0)),
        aten.convolution.default,
        (x, y, None, (1,), (3,), (1,), False, (0,), 2),
    ),
    (
        "a transposed convolution",
        ((3, 8, 7), (8, 1, 4)),
        (sharded(1), sharded(0)),
        aten.convolution.default,
        (x, y, None, (1,), (3,), (1,), True, (0,), 8),
    ),
    (
        "partial channels and a bias",
        ((3, 8, 7), (8, 1, 4), (8,)),
        (PARTIAL, REPLICATED_PARTIAL, REPLICATED_PARTIAL),
        aten.convolution.default,
        (x, y, z, (1,), (3,), (1,), False, (0,), 8),
    ),
    ("a sequence made longer", ((3, 8, 5), (3, 8, 5)), (sharded(1), sharded(1)), aten.cat.default, ((x, y), 1)),
]


@pytest.mark.parametrize("what", REFUSED, ids=lambda what: what[0])
def test_what_would_cut_across_parts_is_refused(what: tuple[object, ...]) -> None:
    name, shapes, layouts, operator, arguments = what
    case = Case(str(name), shapes, layouts, operator, arguments, lambda a: a, ())  # pyright: ignore
    wholes = [torch.randn(shape, dtype=torch.float64) for shape in case.shapes]
    node, values = node_of(case, wholes, call(case, wholes))
    assert isinstance(Propagator(RANKS, BATCH).outcomes(node, values, lambda i: case.layouts[i]), Refusal)


def test_a_view_of_a_plain_shard_is_what_dtensor_says() -> None:
    assert viewed((3, 8, 5), (3, 2, 4, 5), sharded(1), 2, BATCH) == sharded(1)
    assert viewed((3, 6, 5), (3, 2, 3, 5), sharded(1), 3, BATCH) is None


def test_packs_are_put_into_the_ranks_order_and_back() -> None:
    whole = torch.arange(64).reshape(1, 64)
    turned = in_ranks(whole, 1, QKV.packs, RANKS)
    assert turned[0, :16].tolist() == [*range(8), *range(32, 36), *range(48, 52)]
    assert torch.equal(in_packs(turned, 1, QKV.packs, RANKS), whole)


def test_rules_concern_nothing_plain() -> None:
    node = OperationNode(aten.add.Tensor, (x, y), (), (0, 1), (2,), (), None)
    assert not rules.concerns(node, {0: sharded(1), 1: sharded(1)})
