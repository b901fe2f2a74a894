"""Whole values that a body makes, of which each rank takes the part of its heads: biases by distance, gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import tpplan
from tests.marking import in_turns, slow_but
from tests.runtime.simulated import worst
from tests.runtime.world import Member, world
from tpplan.compat.process_groups import fake_process_group
from tpplan.plan import Style
from tpplan.suggest import search, write_plan

WIDTH, HEADS = 24, 4
RULES = {"*.{q,k,v}": "colwise", "*.out": "rowwise"}
PLAN = {"version": 1, "modules": RULES}


class Attention(nn.Module):
    """Scores with something added that isn't split."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.table = nn.Parameter(torch.randn(HEADS, 64))
        self.gate = nn.Linear(WIDTH // HEADS, 2)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)

    def biases(self, x: Tensor) -> Tensor:
        """Of whole heads."""
        steps = torch.arange(x.shape[1])
        return self.table[:, steps[:, None] - steps + 32]

    def mixed(self, scores: Tensor, x: Tensor) -> Tensor:
        return (scores + self.biases(x)).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        return self.out((self.mixed(q @ k.transpose(-1, -2) / 2, x) @ v).transpose(1, 2).flatten(2))


class Gated(Attention):
    """As WavLM's: what a gate of the stream makes of biases."""

    def biases(self, x: Tensor) -> Tensor:
        gate, other = self.gate(self.heads(x)).sigmoid().chunk(2, -1)
        return super().biases(x) * gate + other


class OfTokens(Attention):
    """Weights of each token and head."""

    def mixed(self, scores: Tensor, x: Tensor) -> Tensor:
        by_head = (x @ self.table[:, :WIDTH].T).sigmoid().transpose(1, 2)
        return scores.softmax(-1) * by_head[..., None]


class Flat(Gated):
    """Batch and heads in one dim, in a product that adds."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (self.heads(layer(x)).flatten(0, 1) for layer in (self.q, self.k, self.v))
        scores = torch.baddbmm(self.biases(x).flatten(0, 1), q, k.transpose(1, 2), alpha=0.5)
        mixed = (scores.softmax(-1) @ v).view(batch, HEADS, length, -1)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Fused(Attention):
    """The biases are a mask of torch's attention."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.biases(x))
        return self.out(mixed.transpose(1, 2).flatten(2))


class Chosen(Attention):
    """Of two whole tensors and split scores."""

    def mixed(self, scores: Tensor, x: Tensor) -> Tensor:
        biases = self.biases(x)
        return torch.where(biases > 0, scores, biases.exp() * 0.1).softmax(-1)


class InPlace(Attention):
    def mixed(self, scores: Tensor, x: Tensor) -> Tensor:
        scores += self.biases(x)
        return scores.softmax(-1)


class LookedUp(Attention):
    """By a table that the body calls, with places that it makes; scaled by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(64, HEADS)
        self.register_buffer("slopes", torch.randn(HEADS, 1, 1))

    def biases(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1])
        return self.places(steps[:, None] - steps + 32).permute(2, 0, 1) * self.slopes


class Memory(Attention):
    """Keys that are parameters, before those of the stream."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        kept = self.table[:, :WIDTH].reshape(1, HEADS, -1, WIDTH // HEADS).expand(len(x), -1, -1, -1)
        k, v = torch.cat([kept, k], 2), torch.cat([kept, v], 2)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Untouched(Attention):
    """What is sliced is read whole as well."""

    def mixed(self, scores: Tensor, x: Tensor) -> Tensor:
        biases = self.biases(x)
        return (scores + biases * biases.mean()).softmax(-1)


KINDS = (Attention, Gated, OfTokens, Flat, Fused, Chosen, InPlace, LookedUp, Memory, Untouched)


class Net(nn.Module):
    """Two of them, with a norm before the first."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), kind(), kind()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(self.norm(x))
        return x + self.second(x)


def x_of(length: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64, requires_grad=True)


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Net(kind).double()


@pytest.mark.parametrize(("kind", "tp"), in_turns(KINDS, [2, 3, 4]))
@pytest.mark.one_in(5)
def test_each_rank_takes_the_part_of_its_heads(kind: Callable[[], nn.Module], tp: int) -> None:
    model = made(kind)
    report = tpplan.verify(model, PLAN, tp, (x_of(8),))
    assert report.ok, report.problems
    program = tpplan.compile_plan(model, PLAN, tp, (x_of(8),))
    assert "all-gather" not in {str(way) for _, held in program.reshards() for way in (held.forward, held.backward)}
    notes = [d.message for d in program.diagnostics if d.code == "TP124"]
    assert len(notes) == 2 and all("can be sliced beside split ones at " in note for note in notes)


@pytest.mark.parametrize("kind", slow_but(KINDS[::3], KINDS))
@pytest.mark.one_in(3)
def test_calls_of_other_sizes_are_right(kind: Callable[[], nn.Module]) -> None:
    example, *calls = [((x_of(*sizes),), {}) for sizes in ((8,), (8,), (5, 3), (1, 1), (12, 4))]
    assert max(worst(made(kind), RULES, 2, example, calls)) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(9)
def test_suggested_plans_split_the_layers_beside_them(kind: Callable[[], nn.Module]) -> None:
    found = search(made(kind), 2, (x_of(8),), {}, False)
    wanted = {f"{net}.{layer}" for net in ("first", "second") for layer in ("q", "k", "v")}
    assert wanted <= {name for name, held in found.settings.items() if held.style is Style.COLWISE}
    assert tpplan.verify(made(kind), PLAN, 2, (x_of(8),)).ok


class Normed(Gated):
    """Calls a norm that runs operations whose results nobody reads, as its own code does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.heads(self.norm(self.q(x).flatten(0, 1)).view_as(x))
        k, v = self.heads(self.k(x)), self.heads(self.v(x))
        return self.out((self.mixed(q @ k.transpose(-1, -2) / 2, x) @ v).transpose(1, 2).flatten(2))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tp", [2, 4])
def test_what_such_a_body_calls_runs_all_of_its_own_code(tp: int) -> None:
    rules = {**RULES, "{first,second}.norm.{weight,bias,running_mean,running_var}": "colwise"}
    call = ((x_of(8),), {})
    assert max(worst(made(Normed), rules, tp, call, [call, call])) < 1e-12
    program = tpplan.compile_plan(made(Normed), {"version": 1, "modules": rules}, tp, call[0])
    assert "TP104" not in {d.code for d in program.diagnostics}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tp", [2, 4])
def test_a_table_that_numbers_pick_from_is_split_by_its_heads(tp: int) -> None:
    found = search(made(Attention), tp, (x_of(8),), {}, False)
    assert {"first.table", "second.table"} <= {n for n, held in found.settings.items() if held.style is Style.COLWISE}
    text = write_plan(found, "net")
    example, *calls = [((x_of(*sizes),), {}) for sizes in ((8,), (8,), (5, 3))]
    assert max(worst(made(Attention), text, tp, example, calls)) < 1e-12


@pytest.mark.parametrize("kind", [Gated, Flat])
def test_counted_as_predicted(kind: Callable[[], nn.Module]) -> None:
    predicted = tpplan.compile_plan(made(kind), PLAN, 2, (x_of(8),)).count_collectives()
    # Forward and backward of each attention, and the gradients of what is sliced, together.
    assert predicted == {"all-reduce": 2 * 2 + 1}
    with fake_process_group(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded = tpplan.parallelize(made(kind), PLAN, mesh, (x_of(8),))
        with CommDebugMode() as mode:
            sharded(x_of(8)).sum().backward()
    assert mode.get_total_counts() == sum(predicted.values())


def _trained(member: Member) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(3)
    model, x = made(Gated), x_of(8)
    if member.size > 1:
        model = tpplan.parallelize(model, PLAN, member.mesh(), (x,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[float] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in model.named_parameters()}


@pytest.mark.slow
def test_a_training_on_processes() -> None:
    (expected, weights), *_ = world(1).run(_trained)
    for losses, trained in world(2).run(_trained):
        assert losses == pytest.approx(expected, rel=1e-9)
        for name, weight in weights.items():
            torch.testing.assert_close(trained[name], weight, rtol=1e-8, atol=1e-8)


class Box:
    """No container."""

    def __init__(self, held: Tensor) -> None:
        self.held = held


class Boxed(Gated):
    """A record can't pass on the object, so the body's own code has to run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Unboxed()

    def biases(self, x: Tensor) -> Tensor:
        return super().biases(x) * self.inner(Box(x))


class Unboxed(nn.Module):
    def forward(self, box: Any) -> Tensor:
        return box.held.mean()


def test_a_body_that_has_no_record_gathers_instead() -> None:
    program = tpplan.compile_plan(made(Boxed), PLAN, 2, (x_of(8),))
    assert {"TP104"} <= {d.code for d in program.diagnostics}
    assert not any(module.recorded for module in program.modules)
    assert tpplan.verify(made(Boxed), PLAN, 2, (x_of(8),)).ok
