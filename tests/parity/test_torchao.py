"""torchao: weights quantised before `parallelize`, and training in float8. Skipped without the extra `torchao`."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import tpplan
from tests.marking import in_turns, slow_but
from tests.models.quantised import Mlp
from tests.runtime.world import Member, world
from tpplan.plan import CompileError

quantisation: Any = pytest.importorskip("torchao.quantization", reason="needs the extra `torchao`, 0.18.0")
granularity: Any = pytest.importorskip("torchao.quantization.granularity")

PLAN = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
WIDTH = 32
INT4: Any = vars(torch)["int4"]
GROUPS = {"weight_dtype": INT4, "granularity": granularity.PerGroup(8)}
WEIGHTS: dict[str, Callable[[], Any]] = {
    "Int8WeightOnlyConfig, by row": lambda: quantisation.Int8WeightOnlyConfig(),
    "Int8WeightOnlyConfig, one scale": lambda: quantisation.Int8WeightOnlyConfig(granularity=granularity.PerTensor()),
    "IntxWeightOnlyConfig, by group": lambda: quantisation.IntxWeightOnlyConfig(**GROUPS),
    "IntxWeightOnlyConfig, by row": lambda: quantisation.IntxWeightOnlyConfig(granularity=granularity.PerAxis(0)),
    "Float8WeightOnlyConfig": lambda: quantisation.Float8WeightOnlyConfig(),
}
ACTIVATIONS: dict[str, Callable[[], Any]] = {
    "Int8DynamicActivationInt8WeightConfig, by token": lambda: quantisation.Int8DynamicActivationInt8WeightConfig(),
    "Int8DynamicActivationInt8WeightConfig, by tensor": lambda: quantisation.Int8DynamicActivationInt8WeightConfig(
        granularity=granularity.PerTensor()
    ),
    "Int8DynamicActivationIntxWeightConfig": lambda: quantisation.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=INT4, weight_granularity=granularity.PerGroup(8)
    ),
}
FLOAT8 = "Float8DynamicActivationFloat8WeightConfig"
KINDS = WEIGHTS | ACTIVATIONS


def quantised(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = Mlp(nn.Linear)
    if kind == FLOAT8:
        return _float8_activations(model.bfloat16().requires_grad_(False))
    quantisation.quantize_(model, KINDS[kind]())
    return model


def _float8_activations(model: nn.Module) -> nn.Module:
    """As that config makes it, which wants a GPU."""
    tensors: Any = importlib.import_module("torchao.quantization.quantize_.workflows.float8.float8_tensor")
    inference: Any = importlib.import_module("torchao.float8.inference")
    rows, fast = granularity.PerRow(), inference.Float8MMConfig(use_fast_accum=True)
    for layer in model.children():
        kept = tensors.QuantizeTensorToFloat8Kwargs(granularity=rows)
        weight: Any = layer.weight
        made = tensors.Float8Tensor.from_hp(weight.detach(), granularity=rows, mm_config=fast, act_quant_kwargs=kept)
        layer.weight = nn.Parameter(made, requires_grad=False)
    return model


def calls(kind: str = "") -> tuple[Tensor]:
    return (torch.randn(2, 5, WIDTH, dtype=torch.bfloat16 if kind == FLOAT8 else torch.float32),)


@pytest.mark.parametrize(("kind", "tp"), in_turns([*KINDS, FLOAT8], [2, 4], quick=len(KINDS) + 1))
def test_outputs_are_equal(kind: str, tp: int) -> None:
    model, inputs = quantised(kind), calls(kind)
    program = tpplan.compile_plan(model, PLAN, tp, inputs)
    extremes = {"all-gather": 2} if kind in ACTIVATIONS else {}  # the largest entries, and the smallest
    extremes = {"all-gather": 1} if kind == FLOAT8 else extremes
    assert program.count_collectives(backward=False) == {"all-reduce": 1, **extremes}
    for held in program.parameters:
        if held.name.startswith("up.") and held.shape != (1, 1):
            assert held.local_bytes * tp == held.bytes, held.name
    report = tpplan.verify(model, PLAN, tp, inputs)
    assert report.ok, report.problems


def test_a_cut_inside_of_a_group_is_refused_by_its_size() -> None:
    torch.manual_seed(0)
    model = Mlp(nn.Linear, inner=32)
    quantisation.quantize_(model, quantisation.IntxWeightOnlyConfig(**GROUPS))
    with pytest.raises(CompileError, match=r"TP102.*groups of 8 inputs; 4 a rank"):
        tpplan.compile_plan(model, PLAN, 8, calls())


def _run(member: Member, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        whole, (x,) = quantised(kind), calls(kind)
        expected = whole(x)
        model = tpplan.parallelize(copy.deepcopy(whole), PLAN, member.mesh(), (x,))
        # Terms that are rounded to bfloat16, on each rank and where they are added.
        close: Any = {"rtol": 1e-3, "atol": member.size * torch.finfo(x.dtype).eps if kind == FLOAT8 else 1e-3}
        assert_close(model(x), expected, **close)
        assert [*model.state_dict()] == [*whole.state_dict()]
        for name, dim in (("up", 0), ("down", 1)):
            held: Any = model.get_submodule(name).weight
            stock: Any = whole.get_submodule(name).weight
            assert isinstance(held, DTensor) and type(held.to_local()) is type(stock)
            assert _alike(held.full_tensor(), stock)
            count = stock.shape[dim] // member.size
            if not (dim and kind == "IntxWeightOnlyConfig, by row"):  # torchao cuts no block, of a row either
                assert _alike(held.to_local(), stock.narrow(dim, member.rank * count, count)), (kind, name)
            held.to_local().dequantize()
        for parameter in model.parameters():
            parameter.to_local().detach().zero_()  # pyright: ignore
        model.load_state_dict(whole.state_dict())
        assert_close(model(x), expected, **close)


def _alike(one: Any, other: Any) -> bool:
    names, context = other.__tensor_flatten__()
    ours = [getattr(one, name).contiguous().view(torch.uint8) for name in names]
    theirs = [getattr(other, name).contiguous().view(torch.uint8) for name in names]
    return one.__tensor_flatten__()[1] == context and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("tp", [2, 4])
def test_processes_hold_what_torchao_slices(tp: int) -> None:
    world(tp).run(_run, (*KINDS, FLOAT8))


# -- training in float8 -----------------------------------------------------------------------------------------------
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_BLOCK = {"attention.{q,k,v}": "colwise", "attention.o": "rowwise", "mlp.up": "colwise", "mlp.down": "rowwise"}
_SEQUENCE = _BLOCK | {"norms.*": "sequence"}


def _float8_training(
    model: nn.Module, recipe: str = "tensorwise", gathers: bool = False, emulate: bool = True
) -> nn.Module:
    float8: Any = importlib.import_module("torchao.float8")
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    return float8.convert_to_float8_training(
        model, config=dataclasses.replace(config, enable_fsdp_float8_all_gather=gathers)
    )


class Attention(nn.Module):
    def __init__(self, keys: int = WIDTH) -> None:
        super().__init__()
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, keys, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        made = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(made.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp(nn.Linear)
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


FORWARD = {"tensorwise": 3, "rowwise": 2, "rowwise_with_gw_hp": 2}
BACKWARD = {"tensorwise": 4, "rowwise": 2, "rowwise_with_gw_hp": 3}


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize(("recipe", "tp"), in_turns(RECIPES, [2, 4]))
def test_training_in_float8_is_equal(recipe: str, tp: int, emulate: bool) -> None:
    torch.manual_seed(0)
    model = _float8_training(Mlp(nn.Linear), recipe, emulate=emulate)
    inputs = (torch.randn(2, 16, WIDTH, requires_grad=True),)
    program = tpplan.compile_plan(model, PLAN, tp, inputs)
    assert program.count_collectives(backward=False) == {"all-gather": FORWARD[recipe], "all-reduce": 1}
    assert program.count_collectives() == {"all-gather": FORWARD[recipe] + BACKWARD[recipe], "all-reduce": 2}
    report = tpplan.verify(model, PLAN, tp, inputs)
    assert report.ok, report.problems


def _scaled_products(member: Member, ways: tuple[tuple[str, torch.dtype], ...]) -> None:
    for recipe, dtype in ways:
        torch.manual_seed(0)
        whole = _float8_training(Mlp(nn.Linear).to(dtype), recipe, emulate=False)
        x, back = (torch.randn(2, 16, WIDTH, dtype=dtype) for _ in range(2))
        model = tpplan.parallelize(copy.deepcopy(whole), PLAN, member.mesh(), (x.requires_grad_(),))
        found: list[list[Tensor]] = []
        for each in (model, whole):
            given = x.detach().clone().requires_grad_()
            made = each(given)
            made.backward(back)
            gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in each.parameters()]
            found.append([made.detach(), given.grad, *gradients])  # pyright: ignore
        # Each rank's term is rounded once to what the product comes out in, and each addition of two once to `dtype`.
        rounds_to = torch.float32 if (recipe, dtype) == ("tensorwise", torch.float32) else torch.bfloat16
        bound = member.size * torch.finfo(rounds_to).eps
        for place, (ours, theirs) in enumerate(zip(*found, strict=True)):
            error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
            assert error <= (bound if place < 2 else torch.finfo(dtype).eps), (recipe, dtype, place, error, bound)


@pytest.mark.parametrize(("tp", "dtype"), [(2, torch.bfloat16), (4, torch.float32)])
def test_processes_multiply_float8_by_its_kernel(tp: int, dtype: torch.dtype) -> None:
    world(tp).run(_scaled_products, tuple((recipe, dtype) for recipe in RECIPES))


def _train(member: Member, ways: tuple[tuple[str, dict[str, str], bool], ...]) -> None:
    for recipe, rules, emulate in ways:
        torch.manual_seed(0)
        whole, x = _float8_training(Block(), recipe, emulate=emulate), torch.randn(2, 16, WIDTH)
        model = tpplan.parallelize(copy.deepcopy(whole), {"version": 1, "modules": rules}, member.mesh(), (x,))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (whole, model)]
        for length in (16, 24):
            x = torch.randn(2, length, WIDTH)
            expected, made = whole(x), model(x)
            assert_close(made, expected)
            for result, optimizer in zip((expected, made), optimizers, strict=True):
                optimizer.zero_grad()
                (result * x).sum().backward()
            for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
                assert theirs.grad is not None and ours.grad is not None
                assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-4)  # pyright: ignore
            for optimizer in optimizers:
                optimizer.step()


@pytest.mark.parametrize(
    ("tp", "ways"),
    [
        (2, (("tensorwise", _BLOCK, True), ("rowwise", _SEQUENCE, True), ("tensorwise", _SEQUENCE, False))),
        pytest.param(4, (("tensorwise", _SEQUENCE, True),), marks=pytest.mark.slow),
    ],
)
def test_processes_train_in_float8(tp: int, ways: tuple[tuple[str, dict[str, str], bool], ...]) -> None:
    world(tp).run(_train, ways)


def _beside_fsdp(member: Member) -> None:
    torch.manual_seed(0)
    mesh, whole, halves = member.mesh(2, 2, names=("dp", "tp")), Mlp(nn.Linear), torch.randn(2, 2, 16, WIDTH)
    whole = _float8_training(whole)
    model: Any = tpplan.parallelize(copy.deepcopy(whole), PLAN, mesh["tp"], (halves[0],))
    for each in (model.up, model.down, model):
        fully_shard(each, mesh=mesh["dp"])
    given = halves[member.rank // 2]
    made = model(given)
    assert_close(made, whole(given))
    made.sum().backward()
    for half in halves:
        (whole(half).sum() / 2).backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_fsdp_gathers_plain_weights_beside_float8_layers() -> None:
    world(4).run(_beside_fsdp)


# -- what is refused --------------------------------------------------------------------------------------------------
def _qat(model: nn.Module) -> nn.Module:
    qat: Any = importlib.import_module("torchao.quantization.qat")
    quantisation.quantize_(model, qat.QATConfig(KINDS["Int8DynamicActivationIntxWeightConfig"](), step="prepare"))
    return model


@pytest.mark.parametrize(
    ("convert", "style", "told"),
    [
        (
            partial(_float8_training, gathers=True),
            "colwise",
            r"TP112.*DynamicFloat8CastTensor`.*`fsdp_pre_all_gather`(.|\n)*`enable_fsdp_float8_all_gather=False`",
        ),
        (_qat, "colwise", r"TP107.*leaves a tensor.*`up.weight_fake_quantizer.scale`"),
    ],
)
def test_what_isnt_exact_is_refused_by_name(convert: Callable[[nn.Module], nn.Module], style: str, told: str) -> None:
    torch.manual_seed(0)
    model = convert(Mlp(nn.Linear))
    inputs = (torch.randn(2, 16, WIDTH, dtype=next(model.parameters()).dtype, requires_grad=True),)
    with pytest.raises(CompileError, match=told):
        tpplan.compile_plan(model, {"version": 1, "modules": {"up": style}}, 2, inputs)


def _quantised_late(member: Member, kind: str) -> str:
    torch.manual_seed(0)
    stock, inputs = Mlp(nn.Linear), calls()
    model = tpplan.parallelize(copy.deepcopy(stock), PLAN, member.mesh(), inputs)
    before = model(*inputs)
    with pytest.raises(tpplan.StateError) as caught:
        quantisation.quantize_(model, KINDS[kind]())
    assert_close(model(*inputs), before, rtol=0, atol=0)
    # What the help says:
    quantisation.quantize_(stock, KINDS[kind]())
    model = tpplan.parallelize(copy.deepcopy(stock), PLAN, member.mesh(), inputs)
    assert_close(model(*inputs), stock(*inputs))
    return str(caught.value)


@pytest.mark.parametrize("kind", slow_but(["IntxWeightOnlyConfig, by group"], [*WEIGHTS]))
def test_quantising_a_sharded_model_is_refused_by_name_and_leaves_it_as_it_was(kind: str) -> None:
    for message in world(2).run(_quantised_late, kind):
        assert "TP130" in message and "`up.weight` was to be replaced by a `" in message
        assert "quantise the stock model, before `parallelize`" in message


@pytest.mark.parametrize("kind", ["Float8WeightOnlyConfig", "IntxWeightOnlyConfig, by row"])
def test_weights_of_half_precision_are_verified_in_their_own(kind: str) -> None:
    torch.manual_seed(0)
    model = Mlp(nn.Linear, WIDTH).bfloat16().requires_grad_(False)
    quantisation.quantize_(model, KINDS[kind]())
    report = tpplan.verify(model, PLAN, 2, torch.randn(2, 5, WIDTH, dtype=torch.bfloat16))
    assert report.ok and "bfloat16" in str(report)
