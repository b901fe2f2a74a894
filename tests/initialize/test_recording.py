"""What constructors do: draw until it fits, read numbers, seed, go back, bring generators, compute tables."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.initialize.compare import SEED, differences, on_meta, stock_of, unlike, without_numbers

init = nn.init


class Built(nn.Module):
    """A module whose constructor does what it's told, after and before draws of others."""

    def __init__(self, work: Callable[[Any], object]) -> None:
        super().__init__()
        self.before = nn.Linear(9, 7)
        self.weight = nn.Parameter(torch.empty(24, 20))
        with torch.no_grad():
            work(self)
        self.after = nn.Linear(3, 5)


def _filled(fill: Callable[..., object], *arguments: Any, **keywords: Any) -> Callable[[Any], object]:
    return lambda module: fill(module.weight, *arguments, **keywords)


def _drop_path(module: Any) -> None:
    for number, rate in enumerate(torch.linspace(0, 0.3, 4)):
        init.constant_(module.weight[number], rate.item())
    rates = [*torch.linspace(0, 1, 5).tolist(), *torch.linspace(1, 2, 3).numpy()]
    init.normal_(module.weight[4:], std=float(sum(rates)))
    module.weight[[4, 7]] = module.weight.new_tensor([1.5])
    module.weight[np.array([9, 11]), [3, 4]] = 0.5


def _reads_what_was_drawn(module: Any) -> None:
    init.normal_(module.weight)
    if module.weight.mean() > 0:
        module.weight.neg_()
    module.weight.div_(module.weight.abs().max().item())
    order = torch.randperm(20).tolist()
    module.weight.copy_(module.weight[:, order])


def _rows_found(module: Any) -> None:
    init.normal_(module.weight)
    rows = (module.weight[:, 0] > 0).nonzero().flatten()
    module.register_buffer("rows", rows)
    module.register_buffer("positive", module.weight[module.weight > 0].clone())
    module.weight[rows] = 2.0


def _seeds(module: Any) -> None:
    torch.manual_seed(11)
    init.normal_(module.weight)


def _seeds_alike(module: Any) -> None:
    torch.manual_seed(SEED)
    init.normal_(module.weight)


def _goes_back(module: Any) -> None:
    state = torch.get_rng_state()
    init.normal_(module.weight[:10])
    torch.manual_seed(3)
    init.uniform_(module.weight[10:])
    torch.set_rng_state(state)
    module.register_buffer("again", torch.randn(10, 20))


def _forks(module: Any) -> None:
    with torch.random.fork_rng([]):
        torch.manual_seed(7)
        init.trunc_normal_(module.weight)


def _own_generator(module: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    init.normal_(module.weight, generator=generator)
    module.register_buffer("noise", torch.rand(3, generator=generator))
    generator.manual_seed(4)
    module.register_buffer("more", torch.randn(20, generator=generator) + module.weight[0])


def _tables(module: Any) -> None:
    positions = torch.arange(12, dtype=torch.float32)[:, None]
    rates = torch.exp(torch.arange(0, 8, 2) * (-math.log(10000.0) / 8))
    table = torch.zeros(12, 8)
    table[:, 0::2], table[:, 1::2] = torch.sin(positions * rates), torch.cos(positions * rates)
    module.register_buffer("table", table.unsqueeze(0), persistent=False)
    module.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)), persistent=False)
    module.register_buffer("complex", torch.polar(torch.ones(4), torch.linspace(0, 3, 4)).conj())
    module.register_buffer("ids", torch.arange(6).expand(1, -1))
    module.register_buffer("mask", torch.triu(torch.full((5, 5), float("-inf")), 1) == 0)
    module.register_buffer("numpy", torch.from_numpy(np.sin(np.arange(6.0))))
    module.register_buffer("listed", torch.tensor([3.0, 1.0, 2.0]).sort().values)
    module.register_buffer("legacy", torch.FloatTensor([1, 2]))
    module.legacy[1] = 5
    module.weight.copy_(torch.arange(24.0).outer(torch.ones(20)))


def _copies(module: Any) -> None:
    init.normal_(module.weight)
    layers: Any = nn.ModuleList(copy.deepcopy(module.before) for _ in range(3))
    init.zeros_(layers[1].weight)
    module.layers = layers
    module.register_buffer("twin", copy.deepcopy(module.weight.detach()) * 2)


def _swaps_data(module: Any) -> None:
    module.weight.data = torch.randn(20, 24).t() + 1
    module.before.weight.data.mul_(3)
    module.before.bias.data = module.before.bias.data.to(torch.float64).to(torch.float32)
    module.weight = nn.Parameter(module.weight * 2)


def _ties(module: Any) -> None:
    init.normal_(module.weight)
    module.head = nn.Linear(20, 24)
    module.head.weight = module.weight


def _one_memory(module: Any) -> None:
    flat = torch.empty(48, 10).normal_()
    module.weight.copy_(flat[:24].repeat(1, 2))
    module.left, module.right = nn.Parameter(flat[:20]), nn.Parameter(flat[20:].t())


def _takes_others_random(module: Any) -> None:
    init.normal_(module.weight, std=random.random() + float(np.random.rand()))


def _moves(module: Any) -> None:
    init.normal_(module.weight)
    module.weight.data.cpu().mul_(2)  # the same memory
    module.weight.data.to("cpu", torch.float32).add_(1)
    module.weight.data.to("cpu", copy=True).add_(9)  # other memory
    assert module.weight.device.type == "cpu" and not module.weight.is_meta and module.weight.get_device() == -1
    module.register_buffer("same", torch.zeros(3, device=module.weight.device).normal_())


def _orthogonal_parts(module: Any) -> None:
    init.orthogonal_(module.weight[:8], gain=2)
    init.eye_(module.weight[8:12])
    init.sparse_(module.weight[12:], 0.3)
    module.conv = nn.Conv1d(4, 8, 3)
    init.dirac_(module.conv.weight, 2)


WORK: dict[str, Callable[[Any], object]] = {
    "trunc_normal": _filled(init.trunc_normal_, std=0.02),
    "trunc_normal, redrawn": _filled(init.trunc_normal_),
    "trunc_normal of a tail": _filled(init.trunc_normal_, mean=0.0, std=3.0, a=-1.0, b=1.0),
    "orthogonal": _filled(init.orthogonal_),
    "kaiming_normal": _filled(init.kaiming_normal_),
    "xavier_uniform": _filled(init.xavier_uniform_),
    "parts": _orthogonal_parts,
    "rates of layers": _drop_path,
    "numbers that were drawn": _reads_what_was_drawn,
    "rows by their numbers": _rows_found,
    "a seed": _seeds,
    "the same seed": _seeds_alike,
    "an earlier state": _goes_back,
    "a fork": _forks,
    "a generator of its own": _own_generator,
    "tables": _tables,
    "copies": _copies,
    "data": _swaps_data,
    "ties": _ties,
    "several in one memory": _one_memory,
    "python's random numbers": _takes_others_random,
    "moves": _moves,
}


@pytest.mark.parametrize("name", WORK)
def test_what_a_constructor_does(name: str) -> None:
    def make() -> nn.Module:
        random.seed(1)
        np.random.seed(1)
        return Built(WORK[name])

    assert differences(make, without_numbers(stock_of(make)[0]), make) == []


def test_a_generator_from_elsewhere_moves_on() -> None:
    ours, theirs = torch.Generator().manual_seed(8), torch.Generator().manual_seed(8)
    stock, _ = stock_of(lambda: Built(_filled(init.normal_, generator=theirs)))
    torch.manual_seed(SEED)
    model = without_numbers(stock)
    tpplan.init_weights(model, build=lambda: Built(_filled(init.normal_, generator=ours)))
    assert unlike(model, stock) == [] and torch.equal(ours.get_state(), theirs.get_state())


def test_other_random_numbers_move_on_as_well() -> None:
    make: Callable[[], nn.Module] = lambda: Built(_takes_others_random)  # noqa: E731
    random.seed(2)
    np.random.seed(2)
    stock, _ = stock_of(make)
    after = random.getstate(), np.random.rand()
    random.seed(2)
    np.random.seed(2)
    torch.manual_seed(SEED)
    model = without_numbers(stock)
    tpplan.init_weights(model, build=make)
    assert unlike(model, stock) == [] and (random.getstate(), np.random.rand()) == after


def test_a_tensor_from_elsewhere_is_left_alone() -> None:
    outside = torch.ones(24, 20)

    def work(module: Any) -> None:
        outside.mul_(3)
        module.weight.copy_(outside)

    stock, _ = stock_of(lambda: Built(work))
    outside.fill_(1)
    torch.manual_seed(SEED)
    model = without_numbers(stock)
    tpplan.init_weights(model, build=lambda: Built(work))
    assert unlike(model, stock) == [] and torch.equal(outside, torch.ones(24, 20))


def test_what_the_stock_model_leaves_undefined() -> None:
    model: Any = on_meta(lambda: Built(lambda _: None))
    with pytest.warns(UserWarning, match="TP143.*leaves 1 tensors without numbers(.|\n)*`weight`") as seen:
        tpplan.init_weights(model, build=lambda: Built(lambda _: None))
    assert len(seen) == 1 and not model.weight.any()


def test_plain_tensors_on_meta_get_numbers_too() -> None:
    def work(module: Any) -> None:
        init.normal_(module.weight)
        module.scale = torch.arange(3.0) * 2

    model: Any = on_meta(lambda: Built(work))
    assert isinstance(model.scale, Tensor) and model.scale.is_meta
    tpplan.init_weights(model, build=lambda: Built(work))
    assert model.scale.tolist() == [0, 2, 4]


@pytest.mark.parametrize("back", [True, False])
def test_what_a_constructor_does_to_the_generator_at_last(back: bool) -> None:
    def make() -> nn.Module:
        state = torch.get_rng_state()
        model = nn.Linear(3, 4)
        if back:
            torch.set_rng_state(state)
        else:
            torch.manual_seed(99)
        return model

    assert differences(make, on_meta(make), make) == []
