"""Each operator of the compiler's table does, forward and backward, what its rule says, on samples of torch's database.

The default suite tries a few samples and some choices of layouts; `-m sweep` tries more of both, on four ranks too,
with packs, and asks that no operator of the table goes without.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.compiler.test_propagate import CASES
from tests.marking import slow_but
from tests.rules.calls import FOURIER, OPERATORS, SHAPED, Call, resolve
from tests.rules.numbers import Subject, Wrong
from tests.rules.sweep import ENTRYWISE, sweep
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, REPLICATED_PARTIAL, Layout, Pack, packed, sharded
from tpplan.compiler.rules import propagate
from tpplan.compiler.rules.propagate import Outcome, Propagator, Refusal
from tpplan.ops import dim_map
from tpplan.ops.registry import TABLE, lookup

aten = torch.ops.aten
X = torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
# What the default suite tries of the database: entries that come down to operators that aren't entry by entry.
QUICK = (
    "addmm", "all", "amax", "amin", "any", "argmax", "baddbmm", "bmm", "cat", "constant_pad_nd", "cummax", "cumprod",
    "cumsum", "diagonal", "dot", "einsum", "expand", "flip", "gather", "index_add", "index_copy", "index_put",
    "index_select",
    "kthvalue", "linalg.vector_norm", "log_softmax", "logcumsumexp", "logsumexp", "masked_fill",
    "max.reduction_with_dim",
    "mean", "mm", "mode", "mul", "mv", "nn.functional.adaptive_avg_pool2d", "nn.functional.avg_pool2d",
    "nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv_transpose1d", "nn.functional.max_pool2d",
    "nn.functional.prelu", "nn.functional.embedding",
    "nn.functional.glu", "nn.functional.kl_div", "nn.functional.layer_norm", "nn.functional.linear",
    "nn.functional.mse_loss", "nn.functional.scaled_dot_product_attention", "permute", "prod", "repeat", "reshape",
    "roll",
    "scatter", "scatter_add", "select", "softmax", "sort", "split", "squeeze", "stack", "std", "sum", "topk",
    "transpose",
    "tril", "unbind", "unfold", "unsqueeze", "var", "view", "where",
)  # fmt: skip
# Arguments of integers that aren't dims, by name.
_NUMBERS = frozenset(
    ("k", "size", "split_size", "split_sizes", "shifts", "repeats", "start", "end", "step", "index", "pad", "offset",
     "diagonal", "decimals", "ignore_index", "reduction", "normalized_shape", "stride", "padding", "dilation",
     "output_padding", "groups", "padding_idx", "mode", "normalization", "last_dim_size", "shape", "low", "high",
     "out_dtype", "dtype", "layout", "memory_format", "N", "C", "HxW", "group", "kernel_size", "divisor_override",
     "output_size", "upscale_factor", "downscale_factor", "interpolation_mode", "padding_mode",
     "input_dtype", "recipe_a", "recipe_b", "swizzle_a", "swizzle_b")
)  # fmt: skip
_REFUSED = {"contraction_dim"}  # dims of an operator that is refused where they are given


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.one_in(3)
def test_what_a_rule_says_holds_in_numbers(name: str) -> None:
    for operator, tally in sweep([name], samples=2, ranks=2, limit=12, most=3).items():
        assert not tally.wrong, f"{operator}: {tally.wrong[0]}"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FOURIER)
def test_a_fourier_transform_keeps_what_is_split_along_another_dim(name: str, ranks: int) -> None:
    (tally,) = sweep([name], samples=5, ranks=ranks, limit=40, most=5).values()
    assert tally.counts.total() > 10 and not tally.wrong, tally


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SHAPED)
def test_what_the_database_has_no_samples_of_holds_in_numbers(name: str, ranks: int) -> None:
    (tally,) = sweep([name], samples=1, ranks=ranks, limit=60, packs=True, most=16).values()
    assert tally.counts["right"] > 2 and not tally.wrong, tally


GROUPS = [ENTRYWISE[i::12] for i in range(12)]


@pytest.mark.parametrize("group", slow_but(range(3), range(len(GROUPS))))
def test_operators_that_work_entry_by_entry_do(group: int) -> None:
    names = GROUPS[group]
    tallies = sweep(names, samples=1, ranks=2, limit=6, most=2)
    assert {name for name, tally in tallies.items() if tally.wrong} == set()
    missed = {name for name in names if not tallies[name].counts["calls"]}
    assert missed == set()


@pytest.mark.sweep
@pytest.mark.parametrize(("ranks", "packs"), [(2, False), (2, True), (4, True)])
@pytest.mark.parametrize("name", (*OPERATORS, *ENTRYWISE))
def test_what_a_rule_says_holds_for_every_choice_of_layouts(name: str, ranks: int, packs: bool) -> None:
    for operator, tally in sweep([name], samples=12, ranks=ranks, limit=100, packs=packs, most=16).items():
        assert not tally.wrong, f"{operator}: {tally.wrong[0]}"


@pytest.mark.sweep
def test_no_operator_of_the_table_goes_without() -> None:
    """All are met with operands that aren't replicated; some by the calls of tests/compiler/test_propagate.py."""
    tallies = sweep((*OPERATORS, *ENTRYWISE, *SHAPED), samples=8, ranks=2, limit=40, most=10)
    tried = {name for name, tally in tallies.items() if tally.counts["accepted"] + tally.counts["refused"]}
    elsewhere = {str(case.operator) for case in CASES}
    assert set(TABLE) - tried - elsewhere == set()


# -- dims -------------------------------------------------------------------------------------------------------------
ALONG: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (aten.cumsum.default, ()), (aten.cumprod.default, ()), (aten.logcumsumexp.default, ()), (aten.cummax.default, ()),
    (aten.cummin.default, ()), (aten.sort.default, ()), (aten.sort.stable, ()), (aten._softmax.default, (False,)),
    (aten._log_softmax.default, (False,)), (aten.topk.default, ()), (aten.kthvalue.default, ()),
    (aten.mode.default, ()),
)  # fmt: skip


def _along(operator: Any, dim: int, rest: tuple[Any, ...]) -> Call:
    if operator is aten.sort.stable:
        return Call(operator, (X,), {"stable": True, "dim": dim})
    counts = (2,) if operator in (aten.topk.default, aten.kthvalue.default) else ()
    return Call(operator, (X, *counts, dim, *rest), {})


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
@pytest.mark.parametrize(("operator", "rest"), ALONG, ids=str)
def test_what_reads_a_dim_is_refused_along_it_however_it_is_spelled(
    operator: Any, rest: tuple[Any, ...], dim: int
) -> None:
    subject = Subject(_along(operator, dim, rest))
    propagator = Propagator(2, 4)
    assert isinstance(subject.outcomes(propagator, (sharded(dim % 2),)), Refusal)
    across = subject.outcomes(propagator, (sharded(1 - dim % 2),))
    assert not isinstance(across, Refusal)
    subject.hold((sharded(1 - dim % 2),), across[0], 2)


@pytest.mark.parametrize("operator", [aten.topk.default, aten.sort.default, aten.kthvalue.default, aten.mode.default])
def test_a_dim_that_is_left_out_is_the_last(operator: Any) -> None:
    counts = (2,) if operator in (aten.topk.default, aten.kthvalue.default) else ()
    subject = Subject(Call(operator, (X, *counts), {}))
    assert isinstance(subject.outcomes(Propagator(2, 4), (sharded(1),)), Refusal)
    assert not isinstance(subject.outcomes(Propagator(2, 4), (sharded(0),)), Refusal)


def test_every_integer_of_an_audited_operator_is_a_dim_or_known_not_to_be() -> None:
    for name in TABLE:
        for argument in resolve(name)._schema.arguments:
            if "int" in str(argument.type).lower() and "point" not in str(argument.type).lower():
                assert argument.name in dim_map.DIMS | _NUMBERS | _REFUSED, f"{name}: {argument.name}"


# -- the gate ---------------------------------------------------------------------------------------------------------
def test_an_operator_outside_of_the_table_runs_on_replicated_operands_alone() -> None:
    subject = Subject(Call(aten.special_bessel_j0.default, (X,), {}))
    assert lookup(subject.call.name) is None
    refused = subject.outcomes(Propagator(2, 4), (sharded(0),))
    assert isinstance(refused, Refusal) and refused.kind == "unaudited"
    assert not isinstance(subject.outcomes(Propagator(2, 4), (REPLICATED_PARTIAL,)), Refusal)


@pytest.mark.parametrize(("dtype", "refused"), [(torch.float8_e4m3fn, True), (torch.bfloat16, False)])
def test_terms_of_a_sum_arent_rounded_to_a_byte(dtype: torch.dtype, refused: bool) -> None:
    subject = Subject(Call(aten._to_copy.default, (X,), {"dtype": dtype}))
    assert isinstance(subject.outcomes(Propagator(2, 4), (PARTIAL,)), Refusal) == refused


# -- what the audit sees ----------------------------------------------------------------------------------------------
S0, S1 = sharded(0), sharded(1)
CLAIMS: tuple[tuple[str, Call, tuple[Layout, ...], Layout], ...] = (
    ("mul is linear in both", Call(aten.mul.Tensor, (X, X + 1), {}), (PARTIAL, PARTIAL), PARTIAL),
    ("a maximum is linear", Call(aten.amax.default, (X, [1]), {}), (PARTIAL,), PARTIAL),
    ("a sum along the split dim is whole", Call(aten.sum.dim_IntList, (X, [1]), {}), (S1,), REPLICATED),
    ("cumsum is local", Call(aten.cumsum.default, (X, -1), {}), (S1,), S1),
    ("a rounded sum is a sum", Call(aten._to_copy.default, (X,), {"dtype": torch.int64}), (PARTIAL,), PARTIAL),
    ("any is a sum", Call(aten.any.dim, (X > 0.5, 1), {}), (S1,), PARTIAL),
    ("a constant is added once", Call(aten.add.Scalar, (X, 1.0), {}), (PARTIAL,), PARTIAL),
    ("the gradient of what stands beside a part is whole", Call(aten.mul.Tensor, (X, X + 1), {}), (PARTIAL, REPLICATED),
     PARTIAL),
    ("the gradient of a bias is whole", Call(aten.add.Tensor, (X, X[0]), {}), (S0, REPLICATED), S0),
    ("the gradient of a part that is added to a sum is partial", Call(aten.mm.default, (X, X.t()), {}), (S1, S0),
     REPLICATED_PARTIAL),
)  # fmt: skip


@pytest.mark.parametrize(("call", "layouts", "result"), [claim[1:] for claim in CLAIMS], ids=[c[0] for c in CLAIMS])
def test_a_wrong_claim_is_seen(call: Call, layouts: tuple[Layout, ...], result: Layout) -> None:
    subject = Subject(call)
    with pytest.raises(Wrong):
        subject.hold(layouts, Outcome(tuple(result for _ in subject.results)), 2)


TURNS, COLUMNS = sharded(0, interleave=2), packed(1, [Pack(32)] * 2)
R = REPLICATED
SCALED: tuple[
    tuple[tuple[Layout, ...], Layout | None], ...
] = (  # both matrices, the scales of rows and columns, a bias
    ((S0, R, S0, R, R), S0),
    ((TURNS, R, TURNS, R, R), TURNS),
    ((R, S1, R, S1, S0), S1),
    ((R, COLUMNS, R, COLUMNS, packed(0, [Pack(32)] * 2)), COLUMNS),
    ((S1, S0, R, R, PARTIAL), PARTIAL),
    ((S1, S0, R, R, R), None),
    ((S0, R, R, R, R), None),
    ((S0, R, S0, R, PARTIAL), None),
    ((R, S1, R, R, S0), None),
    ((R, S1, R, S1, R), None),
    ((S1, S0, R, S1, PARTIAL), None),
    ((R, R, R, PARTIAL, R), None),
    ((PARTIAL, R, R, R, R), None),
)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(("layouts", "result"), SCALED)
def test_scales_and_the_bias_of_a_scaled_product_lie_as_its_matrices(
    layouts: tuple[Layout, ...], result: Layout | None, listed: bool
) -> None:
    numbers = [torch.rand(shape, generator=torch.Generator().manual_seed(0)) for shape in ((32, 64), (64, 64))]
    codes, weight = (held.to(torch.float8_e4m3fn) for held in numbers)
    given = (codes, weight.t(), torch.rand(32, 1), torch.rand(1, 64), torch.rand(64))
    call = Call(aten._scaled_mm.default, given, {"out_dtype": torch.float32})
    if listed:
        one, other, scales, others, bias = given
        by_rows = (one, other, [scales], [1], [], [others], [1], [], bias, torch.float32)
        call = Call(aten._scaled_mm_v2.default, by_rows, {})
    subject = Subject(call)
    found = subject.outcomes(Propagator(2, 2), layouts)
    assert (None if isinstance(found, Refusal) else found[0].outputs[0]) == result
    if not isinstance(found, Refusal):
        subject.hold(layouts, found[0], 2)


def test_without_dims_from_the_front_the_audit_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        propagate, "with_dims_from_the_front", lambda target, arguments, keywords, rank: (arguments, keywords)
    )
    tallies = sweep(["cumsum"], samples=4, ranks=2)
    assert tallies["aten.cumsum.default"].wrong
