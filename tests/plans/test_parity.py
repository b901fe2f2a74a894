"""Every shipped plan computes what the unsharded model computes, on real processes, and communicates as it says."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.distributed.tensor import DTensor

import tpplan
from tests.marking import in_thirds
from tests.models.tiny import ARCHITECTURES, tiny_model
from tests.plans.parity import PLANS, assert_same_run, run, tolerance, whole
from tests.plans.test_families import FAMILIES, WITHOUT_SEQUENCE
from tests.plans.test_others import OTHERS
from tests.runtime.world import Member, world

pytestmark = pytest.mark.processes

# They differ most; the others are slow for their number.
QUICK = ("gpt2", "llama")
# On four ranks each holds a single KV head of llama.
ON_FOUR_RANKS = ("llama",)


def test_every_shipped_plan_is_tested() -> None:
    shipped = {path.stem.removesuffix("-sequence") for path in PLANS.glob("*.yaml")}
    assert shipped == {*ARCHITECTURES, *FAMILIES, *OTHERS}
    both = {*ARCHITECTURES, *FAMILIES} - {*WITHOUT_SEQUENCE}
    assert all((PLANS / f"{name}-sequence.yaml").exists() for name in both)


BOTH = [(name, style) for name in ARCHITECTURES for style in ("tp", "sequence")]
# The others' sequences are split by four ranks, and by two in the sweep.
ON_TWO = in_thirds(
    [(name, style) for name, style in BOTH if name in QUICK], [case for case in BOTH if case[1] == "tp"], BOTH
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "style"), ON_TWO)
def test_a_plan_computes_what_the_stock_model_computes(name: str, style: str) -> None:
    _assert_parity(2, name, style)


# Without sequences they run on two ranks, and on four in the sweep, as the suggested plans of docs/coverage.md do.
ALL_ON_FOUR = [
    pytest.param(
        name,
        style,
        marks=[] if name in ON_FOUR_RANKS else pytest.mark.slow if style == "sequence" else pytest.mark.sweep,
    )
    for name, style in BOTH
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "style"), ALL_ON_FOUR)
def test_a_plan_computes_what_the_stock_model_computes_on_four_ranks(name: str, style: str) -> None:
    _assert_parity(4, name, style)


def _assert_parity(size: int, name: str, style: str) -> None:
    path = str(PLANS / (f"{name}-sequence.yaml" if style == "sequence" else f"{name}.yaml"))
    model, keywords = tiny_model(name, device="meta")
    program = tpplan.compile_plan(model, path, size, keywords)
    forward, both = program.count_collectives(backward=False), program.count_collectives()
    world(size).run(_parity, name, path, forward, both)


def _parity(member: Member, name: str, path: str, forward: Counter[str], both: Counter[str]) -> None:
    model, keywords = tiny_model(name)
    stock, _ = tiny_model(name)
    keys = list(stock.state_dict())
    sharded = tpplan.parallelize(model, path, member.mesh(), keywords)
    assert sharded is model
    ours, reference = run(sharded, keywords), run(stock, keywords)
    assert_same_run(ours, reference, tolerance(ARCHITECTURES[name].coarsest))
    assert ours.forward == forward
    assert ours.forward + ours.backward == both
    assert list(sharded.state_dict()) == keys
    for (key, held), expected in zip(sharded.state_dict().items(), stock.state_dict().values(), strict=True):
        mine = whole(held)
        assert mine is not None and torch.equal(mine, expected), key
    _replicated_gradients_agree(sharded)


def _replicated_gradients_agree(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        if not parameter.placements[0].is_replicate() or parameter.grad is None:
            continue
        mine = parameter.grad.to_local().contiguous()  # pyright: ignore
        others = [torch.empty_like(mine) for _ in range(parameter.device_mesh.size())]
        torch.distributed.all_gather(others, mine, group=parameter.device_mesh.get_group())
        assert all(torch.equal(mine, other) for other in others), f"{name}: ranks hold different gradients"
