"""Bodies that draw for sharded and for replicated values, on processes: masks, gradients, checkpoints, refusals."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.marking import slow_but
from tests.models.mixed_draws import HIDDEN, SUBJECTS, TOYS, WIDE, Functional, Masks, mixed_draws
from tests.models.tiny import output_tensors
from tests.plans.parity import run
from tests.runtime.world import Member, world
from tpplan.calls.changes import Changes
from tpplan.compat.modes import TorchDispatchMode
from tpplan.plan import TpplanError

pytestmark = pytest.mark.processes


def gathered(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, tensor.contiguous())
    return parts


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


QUICK = [*((name, 2) for name in SUBJECTS if name != "bart"), *((name, 4) for name in TOYS)]


@pytest.mark.parametrize(("name", "size"), slow_but(QUICK, [*QUICK, ("bart", 2)]))
@pytest.mark.one_in(5)
def test_masks_differ_between_ranks_where_values_are_split_and_only_there(name: str, size: int) -> None:
    world(size).run(_masks, name)


def _masks(member: Member, name: str) -> None:
    (stock, plan, keywords), (model, _, _) = mixed_draws(name, "sdpa"), mixed_draws(name, "sdpa")
    tpplan.parallelize(model, plan, member.mesh(), keywords)
    drawn: list[list[Tensor]] = []
    for held in (stock, model, model):
        torch.manual_seed(7)
        with Masks() as masks:
            held.zero_grad()
            output = output_tensors(held(**keywords))[0]
        output.square().mean().backward()
        drawn.append(masks.found)
    whole, ours, again = drawn
    assert len(whole) == len(ours) and all(map(torch.equal, ours, again))
    kinds = [one.shape == other.shape for one, other in zip(whole, ours, strict=True)]
    assert {True, False} == set(kinds)
    for index, mask in enumerate(ours):
        assert 0 < mask.mean() < 1
        first, *others = gathered(mask)
        for other in others:
            if kinds[index]:
                assert torch.equal(first, other), f"mask {index} is of a replicated value"
            else:
                assert abs(correlation(first, other)) < 6 / mask.numel() ** 0.5, f"mask {index} is of a sharded value"
        if all(kinds[: index + 1]):
            assert torch.equal(mask, whole[index]), f"mask {index} comes before any split one"
    for one, other in itertools.pairwise(ours):
        assert one.shape != other.shape or not torch.equal(one, other)
    assert all(torch.equal(part, output) for part in gathered(output.detach()))
    for key, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        if parameter.grad.placements[0].is_replicate():
            local = parameter.grad.to_local()
            assert all(torch.equal(part, local) for part in gathered(local)), key


@pytest.mark.slow
def test_collectives_in_training_are_those_that_were_predicted() -> None:
    world(2).run(_collectives)


def _collectives(member: Member) -> None:
    for name in ("functional", "bart"):
        model, plan, keywords = mixed_draws(name)
        predicted = tpplan.compile_plan(model, plan, tp=2, inputs=keywords).count_collectives()
        found = run(tpplan.parallelize(model, plan, member.mesh(), keywords), keywords)
        assert found.forward + found.backward == predicted


@pytest.mark.parametrize("name", slow_but(["nested"], ["nested", "bart"]))
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_body_draws_the_same_masks(name: str, reentrant: bool) -> None:
    world(2).run(_recomputed, name, reentrant)


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


def _recomputed(member: Member, name: str, reentrant: bool) -> None:
    gradients: list[list[Tensor]] = []
    for checkpointed in (False, True):
        model, plan, keywords = mixed_draws(name)
        if name == "nested":
            keywords["x"].requires_grad_()
        tpplan.parallelize(model, plan, member.mesh(), keywords)
        if checkpointed and name == "bart":
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # pyright: ignore
        elif checkpointed:
            layers: Any = model.layers
            model.layers = nn.ModuleList(Checkpointed(layer, reentrant) for layer in layers)
        torch.manual_seed(3)
        output_tensors(model(**keywords))[0].square().mean().backward()
        gradients.append([p.grad.full_tensor() for p in model.parameters()])  # pyright: ignore
    for ours, reference in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-12)


def raised(model: nn.Module, *args: Any, **keywords: Any) -> str:
    try:
        model(*args, **keywords).sum().backward()
    except TpplanError as error:
        return str(error)
    return ""


def parallelized(member: Member, model: nn.Module, rules: dict[str, Any] | None = None) -> tuple[nn.Module, Tensor]:
    x = torch.randn(3, 12, HIDDEN, requires_grad=True)
    plan = {"version": 1, "modules": rules or {"up": "colwise", "down": "rowwise"}}
    return tpplan.parallelize(model.train(), plan, member.mesh(), (x,)), x


def test_a_body_that_draws_otherwise_than_in_the_example_is_proved_anew() -> None:
    for found in world(2).run(_otherwise):
        assert found == ("", "", "")


def test_a_body_that_draws_otherwise_than_in_its_proof_is_refused() -> None:
    for fewer, more, _ in world(2).run(_unseen):
        assert fewer.startswith("TP119 randomness-mixed: the body of the model draws random numbers 2 times")
        assert "instead of 4 times as in the example (replicated, sharded, replicated, replicated)" in fewer
        assert "more often in this call instead of 3 times" in more and "help: " in more


def _unseen(member: Member) -> tuple[str, ...]:
    """Without the guard's look at what was changed."""
    with mock.patch.object(Changes, "look", lambda self: False):
        return _otherwise(member)


def _otherwise(member: Member) -> tuple[str, ...]:
    model = Functional()
    x = parallelized(member, model)[1]
    assert raised(model, x) == ""
    assert raised(model.eval(), x) == ""
    model.train()
    model.first = model.second = model.last = 0.0
    assert raised(model, x) == "", "a body that draws nothing can't take the wrong stream"
    model.first = model.second = 0.3
    fewer = raised(model, x)
    model.last = 0.3
    assert raised(model, x) == "", "an error leaves the streams in order"
    another = raised(model, x, twice=True)
    model = Functional()
    model.first = 0.0
    x = parallelized(member, model)[1]
    model.first = 0.3
    return fewer, raised(model, x), another


class CheckpointsAPart(Functional):
    """An activation checkpoint around the middle of a body: what is recomputed there isn't the body."""

    reentrant: bool | None = None

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        x = functional.dropout(x, 0.3, self.training)
        if self.reentrant is None:
            return self.down(self.middle(x))
        return self.down(checkpoint(self.middle, x, use_reentrant=self.reentrant))

    def middle(self, x: Tensor) -> Tensor:
        return functional.dropout(self.up(x).relu(), 0.3, self.training)


class OneDropout(nn.Module):
    """One dropout for features and for the residual stream, in a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.dropout(self.up(x))))


def test_what_could_not_be_drawn_again_is_refused() -> None:
    for texts in world(2).run(_not_again):
        for text in texts:
            assert text.startswith("TP119 randomness-mixed: ") and "checkpoint around" in text, texts


def _not_again(member: Member) -> list[str]:
    found: list[str] = []
    for reentrant in (False, True):
        model = CheckpointsAPart()
        x = parallelized(member, model)[1]
        assert raised(model, x) == ""
        model.reentrant = reentrant
        found.append(raised(model, x))
    shared = OneDropout()
    x = parallelized(member, shared)[1]
    assert raised(shared, x) == ""
    found.append(raised(shared.dropout, x))
    return found


def test_the_streams_are_in_order_after_an_error_in_a_body() -> None:
    world(2).run(_after_an_error)


class Fails(Functional):
    fails = False

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        h = functional.dropout(self.up(functional.dropout(x, 0.3, self.training)), 0.3, self.training)
        if self.fails:
            raise RuntimeError("in the middle")
        return functional.dropout(self.down(h), 0.3, self.training)


def _after_an_error(member: Member) -> None:
    model, x = parallelized(member, nn.Sequential(Fails(), nn.Dropout(0.3)), {"0.up": "colwise", "0.down": "rowwise"})
    vars(model[0])["fails"] = True  # as an assignment, it would be proved first, and refused  # pyright: ignore
    with pytest.raises(RuntimeError, match="in the middle"):
        model(x)
    assert torch.equal(*gathered(torch.rand(8)))
    vars(model[0])["fails"] = False  # pyright: ignore
    assert torch.equal(*gathered(model(x).detach()))


class Passes(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class OpensAMode(OneDropout):
    """A mode around a module that draws: what counts the body's own draws is below it, and sees those of the module."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(functional.dropout(x, 0.3, self.training))
        with Passes():
            h = self.dropout(h)
        return functional.dropout(self.down(functional.dropout(h, 0.3, self.training)), 0.3, self.training)


def test_a_body_may_open_a_mode() -> None:
    for one, other in zip(*world(2).run(_a_mode), strict=True):
        assert torch.equal(one, other)


def _a_mode(member: Member) -> list[Tensor]:
    model, x = parallelized(member, OpensAMode())
    return [model(x).detach(), torch.rand(8)]


class LayerDrop(nn.Module):
    """Layers that are skipped by a random number, after a dropout in the sequence region."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.layers = nn.ModuleList(Functional() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, list[int]]:
        x, skipped = functional.dropout(self.norm(x), 0.1, self.training), list[int]()
        for index, layer in enumerate(self.layers):
            if self.training and torch.rand([]) < 0.5:
                skipped.append(index)
            else:
                x = layer(x)
        return x, skipped


def test_all_ranks_skip_the_same_layers() -> None:
    one, other = world(2).run(_layer_drop)
    assert one == other and 0 < len(one) < 6 * 4


def _layer_drop(member: Member) -> list[int]:
    rules = {"norm": "sequence", "layers.*.up": "colwise", "layers.*.down": "rowwise"}
    torch.manual_seed(member.rank)  # what is compiled doesn't depend on what is drawn
    model, x = parallelized(member, LayerDrop(), rules)
    torch.manual_seed(1)
    x = torch.rand_like(x)  # the same on all ranks
    found: list[int] = []
    for _ in range(6):
        result, skipped = model(x)
        result.sum().backward()
        found += skipped
    return found
