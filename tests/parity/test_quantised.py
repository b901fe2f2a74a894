"""Quantised layers: what they store are parts of their weights, cut with the features that these stand for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import tpplan
from tests.marking import in_turns, slow_but
from tests.models.quantised import (
    EXACT,
    W8A8,
    WITH_MAXIMA,
    Float8,
    Gptq,
    Int4,
    Int8,
    Layer,
    Mlp,
    Nf4,
    Quantised,
    Scaled8,
    bytes_of,
    int8,
)
from tests.runtime.world import Member, world
from tpplan.plan import CompileError

PLAN = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
WIDTH = 32


@pytest.fixture(autouse=True)
def _as_buffers() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    Quantised.PARAMETERS = False


def calls(**options: Any) -> tuple[Tensor]:
    return (torch.randn(2, 5, WIDTH, **options),)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("kind", "tp", "parameters"),
    [
        (pytest.param(kind, *held, marks=case.marks) if hasattr(case, "marks") else (kind, *held))
        for case in in_turns([*EXACT, *WITH_MAXIMA], [(2, False), (4, True)], quick=12)
        for kind, held in [case.values if hasattr(case, "values") else case]
    ],
)
def test_outputs_are_equal(kind: str, tp: int, parameters: bool) -> None:
    Quantised.PARAMETERS = parameters
    model, inputs = Mlp((EXACT | WITH_MAXIMA)[kind]), calls()
    report = tpplan.verify(model, PLAN, tp, inputs)
    assert report.ok, report.problems
    program = tpplan.compile_plan(model, PLAN, tp, inputs)
    maxima = {"all-gather": 1} if kind in WITH_MAXIMA else {}
    assert program.count_collectives(backward=False) == {"all-reduce": 1, **maxima}
    codes = [p for p in program.parameters if p.name.rpartition(".")[2] in ("codes", "blocks", "qweight")]
    assert len(codes) == 2 and all(p.local_bytes * tp == p.bytes for p in codes)


def test_a_product_of_integers_is_split_as_any_product() -> None:
    """Cheap enough for each run; the table above has it in turns."""
    model = Mlp(partial(W8A8, kernel=True))
    program = tpplan.compile_plan(model, PLAN, 2, calls())
    assert program.count_collectives(backward=False) == {"all-reduce": 1, "all-gather": 1} and not program.freedoms
    assert tpplan.verify(model, PLAN, 2, calls()).ok


class Signed(Quantised):
    """A plain weight, and a sign of one byte for each output."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.randn(outputs, inputs))
        self.store(codes=1 - 2 * (bytes_of(outputs, 1).to(torch.int8) & 1))

    def weight(self, dtype: torch.dtype) -> Tensor:
        return self.plain.to(dtype) * self.codes


def test_small_codes_beside_a_plain_weight_are_not_what_is_split() -> None:
    model = Mlp(Signed)
    program = tpplan.compile_plan(model, PLAN, 2, calls())
    cut = {p.name: str(p.layout) for p in program.parameters}
    assert (cut["up.plain"], cut["down.plain"]) == ("S(0)", "S(1)")
    assert (cut["up.codes"], cut.get("down.codes", "R")) == ("S(0)", "R")
    assert tpplan.verify(model, PLAN, 2, calls()).ok


class Picked(Quantised):
    """A scale for each output and group; which group an input is of, in any order, says a number of its own."""

    def __init__(self, inputs: int, outputs: int, indexed: bool) -> None:
        super().__init__()
        self.indexed = indexed
        self.store(codes=int8(outputs, inputs), scales=torch.rand(outputs, 4) / 10, g_idx=torch.randperm(inputs) % 4)

    def weight(self, dtype: torch.dtype) -> Tensor:
        scales = self.scales[:, self.g_idx] if self.indexed else self.scales.index_select(1, self.g_idx)
        return self.codes.to(dtype) * scales


@pytest.mark.parametrize("indexed", [True, False])
def test_numbers_that_pick_along_another_dim_are_cut_with_that(indexed: bool) -> None:
    model = Mlp(partial(Picked, indexed=indexed))
    program = tpplan.compile_plan(model, PLAN, 2, calls())
    cut = {p.name: str(p.layout) for p in program.parameters}
    assert (cut["up.codes"], cut["up.scales"], cut.get("up.g_idx", "R")) == ("S(0)", "S(0)", "R")
    assert (cut["down.codes"], cut.get("down.scales", "R"), cut["down.g_idx"]) == ("S(1)", "R", "S(0)")
    assert tpplan.verify(model, PLAN, 2, calls()).ok


@pytest.mark.parametrize("kind", slow_but(["int4 in groups, two to a byte"], [*EXACT]))
def test_gradients_pass_through_frozen_layers(kind: str) -> None:
    report = tpplan.verify(Mlp(EXACT[kind]), PLAN, 2, calls(requires_grad=True))
    assert report.ok, report.problems


def test_the_largest_entries_are_one_number_a_token() -> None:
    program = tpplan.compile_plan(Mlp(W8A8), PLAN, 2, calls())
    (moved,) = next(module.inner for module in program.modules if module.name == "down")
    assert (moved.forward, moved.shape) == ("all-gather", (10, 1))


def test_a_rank_of_four_has_a_fifteenth_of_whole_half_precision() -> None:
    with torch.device("meta"):
        layer = partial(Int4, group=128, zeros=False)
        model = Mlp(layer, 1024, 4096).half()
        inputs = (torch.empty(1, 4, 1024, dtype=torch.float16),)
    program = tpplan.compile_plan(model, PLAN, 4, inputs)
    local, whole = sum(p.local_bytes for p in program.parameters), 2 * 2 * 1024 * 4096
    assert local == (1024 * 4096 // 2 + 1024 * 4096 // 128 * 2) * 2 // 4
    assert 15 < whole / local < 16


# -- what can't be cut ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("layer", "code", "text"),
    [
        (partial(Int4, group=32), "TP102", "groups of 32 inputs; 16 a rank"),
        (partial(Float8, by="e8m0", size=32), "TP102", "groups of 32 inputs; 16 a rank"),
        (partial(Float8, by="blocks", size=32), "TP102", "groups of 32 outputs; 16 a rank"),
        (Nf4, "TP112", "make `down` `colwise`"),
    ],
)
def test_a_cut_inside_of_a_group_is_refused_by_its_size(layer: Layer, code: str, text: str) -> None:
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(Mlp(layer), PLAN, 4, calls())
    assert {found.code for found in caught.value.diagnostics} == {code}
    assert text in str(caught.value)


class Halves(Quantised):
    """The first half of the inputs in the lower bits; or written to every second place."""

    def __init__(self, inputs: int, outputs: int, written: bool) -> None:
        super().__init__()
        self.written = written
        self.store(codes=bytes_of(outputs, inputs // 2), scales=torch.rand(outputs, 1))

    def weight(self, dtype: torch.dtype) -> Tensor:
        low, high = self.codes & 15, self.codes >> 4
        codes = torch.cat((low, high), 1)
        if self.written:
            codes = torch.empty(codes.shape, dtype=codes.dtype, device=codes.device)
            codes[:, ::2], codes[:, 1::2] = low, high
        return codes.to(dtype) * self.scales


class Tables(Quantised):
    """A table for each output; or a kernel that takes codes and scales."""

    def __init__(self, inputs: int, outputs: int, kernel: bool) -> None:
        super().__init__()
        self.kernel = kernel
        self.store(codes=int8(outputs, inputs) & 15, table=torch.rand(outputs, 16), scales=torch.rand(outputs))

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel:
            made = torch.ops.aten._weight_int8pack_mm.default(x.flatten(0, 1), self.codes, self.scales)
            return made.view(*x.shape[:2], -1)
        return functional.linear(x, self.table.gather(1, self.codes.long()))


class Wider(Quantised):
    """Integers of two bytes, stored as bytes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.store(codes=bytes_of(outputs, 2 * inputs), scales=torch.rand(outputs, 1) / 2**16)

    def weight(self, dtype: torch.dtype) -> Tensor:
        return self.codes.view(torch.int16).to(dtype) * self.scales


class Inside(Scaled8):
    """Adds a bias in the kernel, and may round its result to float8 there."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype | None) -> None:
        super().__init__(inputs, outputs, "static")
        self.bias, self.dtype = nn.Parameter(torch.randn(outputs), requires_grad=False), dtype  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        scale = self.input_scale
        codes = (x.flatten(0, -2) / scale).to(self.codes.dtype)
        made = torch.ops.aten._scaled_mm.default(
            codes, self.codes.t(), scale, self.scales, self.bias, out_dtype=self.dtype
        )
        return made.to(x.dtype).unflatten(0, x.shape[:-1])


def test_the_bias_of_a_scaled_product_is_added_once_and_terms_are_not_rounded_to_a_byte() -> None:
    report = tpplan.verify(Mlp(partial(Inside, dtype=torch.float32)), PLAN, 4, calls())
    assert report.ok, report.problems
    with pytest.raises(CompileError, match=r"TP107.*rounds each rank's term of a sum to one byte"):
        tpplan.compile_plan(Mlp(partial(Inside, dtype=None)), PLAN, 2, calls())


@pytest.mark.parametrize(
    ("layer", "style", "code"),
    [
        (partial(Halves, written=False), "rowwise", "TP112"),
        (partial(Halves, written=True), "colwise", "TP112"),
        (partial(Tables, kernel=False), "colwise", "TP107"),
        (partial(Tables, kernel=True), "colwise", "TP101"),
        (Wider, "colwise", "TP112"),
        (Wider, "rowwise", "TP112"),
    ],
)
def test_what_cant_be_followed_is_an_error(layer: Layer, style: str, code: str) -> None:
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(Mlp(layer), {"version": 1, "modules": {"up": style}}, 2, calls())
    assert {found.code for found in caught.value.diagnostics} == {code}


class Unlike(Quantised):
    """Multiplies in another way than by one weight."""

    def __init__(self, inputs: int, outputs: int, how: str) -> None:
        super().__init__()
        self.how, groups = how, how == "groups"
        self.store(codes=int8(outputs, inputs), scales=torch.rand(outputs, inputs // 8 if groups else 1))
        if how == "rotated":
            self.register_buffer("rotation", torch.randn(8, 8))
        if how == "kept":
            self.kept = self.codes.float() * self.scales

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "groups":
            codes = self.codes.to(x.dtype).unflatten(1, (-1, 8))
            made = torch.einsum("bsgk,ogk->bsgo", x.unflatten(-1, (-1, 8)), codes)
            return torch.einsum("bsgo,og->bso", made, self.scales)
        weight = self.codes.to(x.dtype) * self.scales
        if self.how == "picked":
            large = (x.abs() > 2).flatten(0, 1).any(0).nonzero().flatten()
            return x[..., large] @ weight[:, large].t()
        if self.how == "rotated":
            x = (x.unflatten(-1, (-1, 8)) @ self.rotation).flatten(-2)  # pyright: ignore
        if self.how == "experts":
            both = torch.cat((weight, weight))
            return functional.linear(x, both).unflatten(-1, (2, -1)).sum(-2)
        return functional.linear(x, self.kept if self.how == "kept" else weight)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("groups", "a product for each group or head(.|\n)*repeat_interleave"),
        ("picked", "both factors of a product follow from its input(.|\n)*torch.where"),
        ("rotated", "several matrices, 8 by 8, 64 by 32(.|\n)*a layer of its own"),
        ("experts", "hasn't the features that its product makes, 128 by 32(.|\n)*bmm"),
        ("kept", "doesn't make of its parameters and buffers(.|\n)*register_buffer"),
    ],
)
def test_what_keeps_a_body_from_being_a_layers_is_told(how: str, told: str) -> None:
    plan = {"version": 1, "modules": {"up": "colwise"}}
    with pytest.raises(CompileError, match=f"TP101.*`up` is an `Unlike`: .*{told}"):
        tpplan.compile_plan(Mlp(partial(Unlike, how=how)), plan, 2, calls())


def test_flat_numbers_are_split_by_rows() -> None:
    plan = {"version": 1, "modules": {"up": "colwise"}}
    report = tpplan.verify(Mlp(Nf4), plan, 4, calls())
    assert report.ok, report.problems
    program = tpplan.compile_plan(Mlp(Nf4), plan, 4, calls())
    assert [p.name for p in program.parameters if p.layout.is_sharded] == ["up.codes", "up.absmax"]


def test_parts_may_be_uneven() -> None:
    report = tpplan.verify(Mlp(Int8, inner=48), PLAN, 5, calls())
    assert report.ok, report.problems


class Attention(nn.Module):
    """Two key heads for four ranks, packed with their queries or apart."""

    def __init__(self, layer: Layer, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        if packed:
            self.qkv = layer(WIDTH, WIDTH + 32)
        else:
            self.q, self.k, self.v = layer(WIDTH, WIDTH), layer(WIDTH, 16), layer(WIDTH, 16)
        self.o = layer(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split((WIDTH, 16, 16), -1) if self.packed else (self.q(x), self.k(x), self.v(x))
        q, k, v = (t.view(*x.shape[:2], -1, 8).transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
        return self.o((scores @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("layer", slow_but([Int4], [Int4, Float8, Gptq]))
@pytest.mark.parametrize("packed", [False, True])
def test_parts_of_heads_are_cut_in_their_own_entries(layer: Layer, packed: bool) -> None:
    heads = {"0.qkv": {"style": "colwise", "packed": ["q", "k", "v"]}} if packed else {"0.{q,k,v}": "colwise"}
    plan, model = {"version": 1, "modules": {**heads, "0.o": "rowwise"}}, nn.Sequential(Attention(layer, packed))
    report = tpplan.verify(model, plan, 4, calls())
    assert report.ok, report.problems


class Flat(Int8):
    """Multiplies rows, and scales them, before their dims are what the input's are."""

    def forward(self, x: Tensor) -> Tensor:
        product = torch.mm(x.flatten(0, -2), self.codes.t().to(x.dtype)) * self.scales.flatten()
        return product.reshape(*x.shape[:-1], len(self.codes)) + self.bias


@pytest.mark.parametrize("rows", [(1, 1), (1, 3)])
def test_a_single_row_isnt_a_head(rows: tuple[int, int]) -> None:
    plan, inputs = {"version": 1, "modules": {"0.{q,k,v}": "colwise", "0.o": "rowwise"}}, torch.randn(*rows, WIDTH)
    model = nn.Sequential(Attention(Flat, False))
    report = tpplan.verify(model, plan, 2, inputs)
    assert report.ok, report.problems
    placed = {held.name: held for held in tpplan.compile_plan(model, plan, 2, inputs).parameters}
    assert all(str(placed[f"0.k.{leaf}"].layout) == "S(0)" for leaf in ("codes", "scales"))


# -- what several layers share ----------------------------------------------------------------------------------------
class Shared(nn.Module):
    """Two pairs; of the second one `up` is the first one's, or its codes are, or its scales."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.a, self.b = Mlp(Int8), Mlp(Int8)
        if which:
            setattr(self.b.up, which, getattr(self.a.up, which))
        else:
            self.b.up = self.a.up

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) / 16)


@pytest.mark.parametrize("which", ["", "codes", "scales"])
def test_what_several_layers_share_is_cut_once(which: str) -> None:
    model, plan = Shared(which), {"version": 1, "modules": {"b.up": "colwise", "*.down": "rowwise"}}
    if which:
        with pytest.raises(CompileError, match="TP107"):  # `a.up`, without a rule, needs it whole
            tpplan.compile_plan(model, plan, 2, *calls())
        plan["modules"] |= {"a.up": "colwise"}  # pyright: ignore
    report = tpplan.verify(model, plan, 2, calls())
    assert report.ok, report.problems
    shared = [
        p for p in tpplan.compile_plan(model, plan, 2, *calls()).parameters if f"b.up.{which}" in "".join(p.names)
    ]
    assert all(p.layout.is_sharded for p in shared) and any(len(p.names) == 2 for p in shared)


def test_a_layer_with_two_names_has_one_style() -> None:
    plan = {"version": 1, "modules": {"a.up": "colwise", "b.up": "rowwise"}}
    with pytest.raises(CompileError, match=r"TP109.*`a.up` and `b.up` are one module"):
        tpplan.compile_plan(Shared(""), plan, 2, *calls())


# -- on processes -----------------------------------------------------------------------------------------------------
KINDS: dict[str, Layer] = {**EXACT, **WITH_MAXIMA}
ONE_OF_EACH = (
    "int8, a scale by output",
    "int8, transposed, with a bias",
    "int4 in groups, two to a byte",
    "MXFP8 (e8m0 scales)",
    "GPTQ",
    "W8A8, by token",
)


def _run(member: Member, kinds: tuple[str, ...], folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in kinds:
        torch.manual_seed(1)
        model, (x,) = Mlp(KINDS[kind]).eval(), calls()
        if member.rank:  # everybody takes the first rank's numbers
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.detach().zero_()
        if member.size > 1:
            model = tpplan.parallelize(model, PLAN, member.mesh(), (x,))
        state = model.state_dict()
        found |= {f"{kind} {name}": _whole(tensor) for name, tensor in state.items()}
        with torch.no_grad():
            found[f"{kind} result"] = model(x)
            if member.size > 1:
                _saved_and_loaded(model, kind, f"{folder}/{kinds.index(kind)}")
                found[f"{kind} loaded"] = model(x)
            else:
                found[f"{kind} loaded"] = found[f"{kind} result"]
    return found


def _saved_and_loaded(model: nn.Module, kind: str, folder: str) -> None:
    """Saved whole, zeroed, and loaded by parts; then the same by a state dict of whole tensors."""
    whole = {name: _whole(tensor).clone() for name, tensor in model.state_dict().items()}
    codes = [t for name, t in model.state_dict().items() if name.endswith(("codes", "blocks", "qweight"))]
    assert len(codes) == 2 and all(isinstance(t, DTensor) and t.to_local().numel() < t.numel() for t in codes)
    tpplan.save_weights(model, folder)
    for load in (lambda: tpplan.load_weights(model, folder), lambda: model.load_state_dict(whole)):
        for tensor in model.state_dict().values():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.detach().zero_()
        load()
        for name, tensor in model.state_dict().items():
            assert _alike(_whole(tensor), whole[name]), f"{kind}: {name}"


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (one, other)))


def _averaged(member: Member) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    mesh, layers = member.mesh(2, 2, names=("dp", "tp")), Mlp(partial(Float8, by="blocks"))
    model, (x,) = nn.Sequential(nn.Linear(WIDTH, WIDTH), layers), calls()
    expected = model(x)
    if member.rank > 1:  # the second replica, which takes the first one's numbers
        layers.up.codes.view(torch.uint8).zero_()  # pyright: ignore
    plan = {"version": 1, "modules": {"1.up": "colwise", "1.down": "rowwise"}}
    sharded = tpplan.parallelize(model, plan, mesh["tp"], (x,))
    found = DistributedDataParallel(sharded, process_group=mesh["dp"].get_group())(x)
    return expected.detach(), found.detach()


@pytest.mark.slow
def test_replicas_have_the_same_parts() -> None:
    for expected, found in world(4).run(_averaged):
        assert_close(found, expected)


@pytest.mark.parametrize(("tp", "kinds"), slow_but([(2, ONE_OF_EACH)], [(2, ONE_OF_EACH), (4, tuple(KINDS))]))
def test_processes_hold_save_and_load_shards(tp: int, kinds: tuple[str, ...], tmp_path: Path) -> None:
    (expected,) = world(1).run(_run, kinds, str(tmp_path))
    for found in world(tp).run(_run, kinds, str(tmp_path)):
        assert found.keys() == expected.keys()
        for name, held in found.items():
            if name.endswith(("result", "loaded")):
                assert_close(held, expected[name], rtol=1e-4, atol=1e-4)
            else:
                assert _alike(held, expected[name]), name
