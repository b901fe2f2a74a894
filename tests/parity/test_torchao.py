"""torchao's weights, quantised before `parallelize`: needs the extra `torchao`, and is skipped without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import tpplan
from tests.marking import in_turns
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
KINDS = WEIGHTS | ACTIVATIONS


def quantised(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = Mlp(nn.Linear)
    quantisation.quantize_(model, KINDS[kind]())
    return model


def calls() -> tuple[Tensor]:
    return (torch.randn(2, 5, WIDTH),)


@pytest.mark.parametrize(("kind", "tp"), in_turns([*KINDS], [2, 4], quick=len(KINDS)))
def test_outputs_are_equal(kind: str, tp: int) -> None:
    model, inputs = quantised(kind), calls()
    program = tpplan.compile_plan(model, PLAN, tp, inputs)
    extremes = {"all-gather": 2} if kind in ACTIVATIONS else {}  # the largest entries, and the smallest
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
        whole, (x,) = quantised(kind), calls()
        expected = whole(x)
        model = tpplan.parallelize(copy.deepcopy(whole), PLAN, member.mesh(), (x,))
        assert_close(model(x), expected, rtol=1e-3, atol=1e-3)
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
        assert_close(model(x), expected, rtol=1e-3, atol=1e-3)


def _alike(one: Any, other: Any) -> bool:
    names, context = other.__tensor_flatten__()
    ours = [getattr(one, name).contiguous().view(torch.uint8) for name in names]
    theirs = [getattr(other, name).contiguous().view(torch.uint8) for name in names]
    return one.__tensor_flatten__()[1] == context and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("tp", [2, 4])
def test_processes_hold_what_torchao_slices(tp: int) -> None:
    world(tp).run(_run, tuple(KINDS))
