"""Models that draw random numbers in evaluation, too: ranks draw what the unsharded model draws."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tpplan.compiler.ir.layout import Layout, Pack, packed
from tpplan.parity.drawn import OwnDraws, part_of
from tpplan.parity.threads import ThreadCommunicator, run_ranks
from tpplan.plan import CompileError
from tpplan.runtime.random.randomness import SplitRandomness

PLAN = {"version": 1, "modules": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}


def x_of() -> Tensor:
    return torch.randn(3, 12, 16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(self.up(x).relu()))  # draws for split values, in training


def picked(x: Tensor) -> Tensor:
    return x[:, torch.multinomial(torch.ones(x.shape[1]), x.shape[1] - 2)]


def disturbed(x: Tensor) -> Tensor:
    return x + torch.zeros(16).normal_() * torch.empty(16).uniform_(0.1, 0.2)


def dropped(x: Tensor) -> Tensor:
    return x * nn.functional.dropout(torch.ones(16), 0.3)


class Drawing(nn.Module):
    """Draws after each block, whatever the mode."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.draw(block(x))
        return x


@pytest.mark.parametrize("draw", [picked, disturbed, dropped])
def test_ranks_draw_what_the_unsharded_model_draws(draw: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, call = Drawing(draw), (torch.randn(3, 12, 16),)
    state = torch.get_rng_state()
    report = tpplan.verify(model, PLAN, tp=2, inputs=call)
    assert report.ok, report.problems
    assert torch.equal(torch.get_rng_state(), state)


class Noisy(nn.Module):
    """Noise on what is split, drawn in five ways."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 30), nn.Linear(30, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = h + torch.randn_like(h) + torch.empty_like(h).uniform_() * torch.rand(h.shape, device=h.device)
        h = h * torch.bernoulli(h.sigmoid()) + torch.randn_like(h.transpose(1, 2)).transpose(1, 2)
        return self.down(h.relu()) + torch.randn_like(x)


@pytest.mark.parametrize("tp", [2, 4])
def test_what_a_rank_holds_a_part_of_is_part_of_what_the_unsharded_model_draws(tp: int) -> None:
    plan = {"version": 1, "modules": {"0.up": "colwise", "0.down": "rowwise"}}
    report = tpplan.verify(nn.Sequential(Noisy()), plan, tp, (x_of(),))  # the body of a root would gather them
    assert report.ok, report.problems
    assert report.collectives == report.predicted


class Packed(nn.Module):
    """Noise of one shape on features in two packs, and then in one."""

    def __init__(self) -> None:
        super().__init__()
        self.gated, self.joined = nn.Linear(16, 28), nn.Linear(14, 16)
        self.up, self.down = nn.Linear(16, 28), nn.Linear(28, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.gated(x)
        h = (h + torch.rand_like(h)) * torch.bernoulli(h.sigmoid()) + torch.empty_like(h).normal_()
        gate, value = h.chunk(2, -1)
        x = x + self.joined(gate.sigmoid() * value)
        h = self.up(x)
        return self.down((h + torch.rand_like(h)).relu())


PACKED = {"gated": {"style": "colwise", "packed": {"gate": 14, "value": 14}}, "joined": "rowwise"}


@pytest.mark.parametrize("tp", [2, 4])  # 4 ranks have 4, 4, 4 and 2 of 14 features
def test_noise_on_packed_features_is_the_rank_s_parts_of_what_is_drawn(tp: int) -> None:
    modules = {f"0.{name}": rule for name, rule in (PACKED | {"up": "colwise", "down": "rowwise"}).items()}
    report = tpplan.verify(nn.Sequential(Packed()), {"version": 1, "modules": modules}, tp, (x_of(),))
    assert report.ok, report.problems


class Attention(nn.Module):
    """Noise on queries, keys and values in one, by heads: 6 heads of queries, with 2 of keys, for 3 or 4 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 40), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.qkv(x)
        h = h + torch.rand_like(h)
        q, k, v = (held.view(batch, length, -1, 4).transpose(1, 2) for held in h.split([24, 8, 8], -1))
        k, v = (held.repeat_interleave(3, 1) for held in (k + torch.randn_like(k), v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, 24))


@pytest.mark.parametrize("tp", [3, 4])
def test_so_it_is_on_heads_that_several_ranks_share(tp: int) -> None:
    rules = {"0.qkv": {"style": "colwise", "packed": {"q": 24, "k": 8, "v": 8}}, "0.out": "rowwise"}
    report = tpplan.verify(nn.Sequential(Attention()), {"version": 1, "modules": rules}, tp, (x_of(),))
    assert report.ok, report.problems


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        (Layout("S", "S", 0, interleave=3), 2),
        (packed(1, [Pack(5), Pack(7)]), 4),
        (packed(1, [Pack(12, parts=((0, 6), (6, 6)))], [Pack(36, parts=((0, 18), (18, 18)))]), 2),
    ],
)
def test_a_part_has_the_shape_that_its_layout_says(layout: Layout, size: int) -> None:
    whole = torch.arange(6 * 12 * 3).view(6, 12, 3)
    parts = [part_of(whole, layout, size, rank) for rank in range(size)]
    assert [tuple(part.shape) for part in parts] == [layout.local_shape((6, 12, 3), size, r) for r in range(size)]
    assert sorted(int(number) for part in parts for number in part.flatten()) == list(range(whole.numel()))


def test_rows_of_a_sequence_that_is_flattened_with_its_batch_are_interleaved() -> None:
    rows = torch.arange(12)  # of 3 sequences of 4
    layout = Layout("S", "S", 0, interleave=3)
    assert part_of(rows, layout, 2, 0).tolist() == [0, 1, 4, 5, 8, 9]
    assert part_of(rows, layout, 2, 1).tolist() == [2, 3, 6, 7, 10, 11]


class Seeding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        torch.manual_seed(3)
        return self.down(h + torch.randn_like(h))


def test_a_seed_is_seen_where_the_generator_has_it_already() -> None:
    model, call = nn.Sequential(Seeding()), (x_of(),)
    torch.manual_seed(3)
    with pytest.raises(CompileError, match="seeds the random numbers"):
        tpplan.compile_plan(model, {"version": 1, "modules": {"0.up": "colwise", "0.down": "rowwise"}}, 2, call)


@pytest.mark.slow
def test_real_ranks_draw_what_the_unsharded_model_draws() -> None:
    report = tpplan.verify(Drawing(picked), PLAN, tp=2, inputs=(torch.randn(3, 12, 16),), processes=True)
    assert report.ok, report.problems


def test_a_stream_of_its_own_draws_as_a_generator_does_and_leaves_torch_s_alone() -> None:
    state = torch.get_rng_state()
    own = OwnDraws(5)
    with own:
        first = torch.rand(3)
        named = torch.rand(2, generator=torch.Generator().manual_seed(1))
        second = torch.rand(4)
    assert len(own.made) == 2
    assert torch.equal(torch.get_rng_state(), state)
    expected = torch.Generator().manual_seed(5)
    assert torch.equal(first, torch.rand(3, generator=expected))
    assert torch.equal(second, torch.rand(4, generator=expected))
    assert torch.equal(named, torch.rand(2, generator=torch.Generator().manual_seed(1)))


def test_ranks_that_seed_do_not_disturb_what_others_draw() -> None:
    def work(axis: ThreadCommunicator) -> list[Tensor]:
        found: list[Tensor] = []
        with OwnDraws(7):
            for _ in range(300):
                with SplitRandomness(axis, torch.device("cpu")):
                    found.append(torch.rand(2000))
        return found

    generator = torch.Generator().manual_seed(7)
    expected = [torch.rand(2000, generator=generator) for _ in range(300)]
    for found in run_ranks(4, work):
        assert all(map(torch.equal, found, expected))
