"""Calls of a sharded model that differ from the example: proved on the spot, or refused on every rank."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.compiler.toys import HIDDEN, MLP, Mlp
from tests.runtime.world import Member, world

SHAPE = (3, 12, HIDDEN)


class Branches(Mlp):
    """A flag decides whether the wide activation can stay split; a bias may be given."""

    def forward(self, x: Tensor, bias: Tensor | None = None, wide: bool = False) -> Tensor:
        y = self.up(x if bias is None else x + bias)
        y = torch.softmax(y, -1).cumsum(-1) if wide else functional.gelu(y)
        return self.down(y)


def build(make: type[nn.Module], member: Member, rules: dict[str, Any], freeze: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = make().double()
    if freeze is not None:
        model.get_parameter(freeze).requires_grad_(False)
    plan = {"version": 1, "modules": rules}
    return tpplan.parallelize(model, plan, member.mesh(), (torch.zeros(SHAPE, dtype=torch.float64),))


def error_of(model: nn.Module, *arguments: Any, **keywords: Any) -> str:
    try:
        model(*arguments, **keywords)
    except tpplan.TpplanError as error:
        return str(error)
    return ""


class Halves(nn.Module):
    """The second half takes what the first has made, from now or from before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mlp(), Mlp()
        self.table = nn.Embedding(8, HIDDEN)

    def forward(self, ids: Tensor | None = None, made: OrderedDict[str, Tensor] | None = None) -> Tensor:
        if ids is not None:
            made = OrderedDict(first=self.first(self.table(ids)))
        if not isinstance(made, OrderedDict):
            raise TypeError("what the first half has made comes in an ordered mapping")
        return self.second(made["first"])


def half_a_model(member: Member) -> tuple[float, float]:
    """The largest difference of a result and of a gradient, in a call that does without the first half."""
    torch.manual_seed(0)
    stock = Halves().double()
    model = copy.deepcopy(stock)
    rules = {"table": "vocab"} | {
        f"{half}.{name}": style for half in ("first", "second") for name, style in MLP.items()
    }
    tpplan.parallelize(model, {"version": 1, "modules": rules}, member.mesh(), (torch.zeros(3, 12, dtype=torch.long),))
    made = OrderedDict(first=torch.randn(SHAPE, dtype=torch.float64))
    ours, theirs = model(made=made), stock(made=made)
    for result in (ours, theirs):
        result.pow(2).sum().backward()
    assert model.first.up.weight.grad is None
    pairs = zip(model.second.parameters(), stock.second.parameters(), strict=True)
    errors = [(p.grad.full_tensor() - q.grad).abs().max() for p, q in pairs]  # pyright: ignore
    return float((ours - theirs).abs().max()), float(max(errors))


def an_argument_more(member: Member) -> float:
    torch.manual_seed(0)
    stock = Branches().double()
    model = build(Branches, member, MLP)
    x, bias = torch.randn(SHAPE, dtype=torch.float64), torch.randn(HIDDEN, dtype=torch.float64)
    return float((model(x, bias=bias) - stock(x, bias=bias)).abs().max())


def another_branch(member: Member) -> list[float]:
    torch.manual_seed(0)
    stock = Branches().double()
    model, x = build(Branches, member, MLP), torch.randn(SHAPE, dtype=torch.float64)
    return [float((model(x, wide=wide) - stock(x, wide=wide)).abs().max()) for wide in (True, False, True)]


class BreaksOnOne(Branches):
    """A flag that can't be proved; on one rank it can."""

    rank = 0

    def forward(self, x: Tensor, bias: Tensor | None = None, wide: bool = False) -> Tensor:
        if wide and BreaksOnOne.rank == 1:
            x = x * float(x.sum())
        return super().forward(x, bias, wide)


def broken_on_one(member: Member) -> tuple[str, float]:
    BreaksOnOne.rank = member.rank
    model, x = build(BreaksOnOne, member, MLP), torch.ones(SHAPE, dtype=torch.float64)
    text = error_of(model, x, wide=True)
    return text, float(model(x).abs().max())


def a_thawed_parameter(member: Member, rules: dict[str, Any]) -> tuple[str, float]:
    model, x = build(Mlp, member, rules, freeze="down.bias"), torch.ones(SHAPE, dtype=torch.float64)
    torch.manual_seed(0)
    stock = Mlp().double()
    model(x)
    model.get_parameter("down.bias").requires_grad_(True)
    alone = error_of(model.get_submodule("down"), torch.zeros(3, 12, stock.down.in_features, dtype=torch.float64))
    for held in (model, stock):
        held(x).square().sum().backward()
    grads = [(p.grad, stock.get_parameter(name).grad) for name, p in model.named_parameters()]
    return alone, max(float((ours.full_tensor() - wanted).abs().max()) for ours, wanted in grads)  # pyright: ignore


class Block(nn.Module):
    """A norm in a sequence region, between two bodies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = Mlp(), nn.LayerNorm(HIDDEN), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)))


SEQUENCE = {"{first,second}.up": "colwise", "{first,second}.down": "rowwise", "norm": "sequence"}


def an_odd_sequence(member: Member) -> list[float]:
    torch.manual_seed(0)
    stock = Block().double()
    model = build(Block, member, SEQUENCE)
    errors: list[float] = []
    for length in (13, 12, 1):
        x = torch.randn(3, length, HIDDEN, dtype=torch.float64)
        errors.append(float((model(x) - stock(x)).abs().max()))
    return errors


def a_module_by_itself(member: Member) -> list[float]:
    torch.manual_seed(0)
    stock = Block().double()
    model = build(Block, member, SEQUENCE)
    errors: list[float] = []
    for length, name in ((13, "first"), (12, ""), (12, "norm"), (12, "")):
        x = torch.randn(3, length, HIDDEN, dtype=torch.float64)
        ours, theirs = model.get_submodule(name)(x), stock.get_submodule(name)(x)
        errors.append(float((ours - theirs).abs().max()))
    return errors


class Patches(Block):
    """The sequence is made in the body: the call's tensors don't show its length."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(-1, (-1, HIDDEN)))


def patches(member: Member, count: int) -> float:
    torch.manual_seed(0)
    stock = Patches().double()
    plan = {"version": 1, "modules": SEQUENCE}
    example = (torch.zeros(3, 12 * HIDDEN, dtype=torch.float64),)
    model = tpplan.parallelize(copy.deepcopy(stock), plan, member.mesh(), example)
    x = torch.randn(3, count * HIDDEN, dtype=torch.float64)
    return float((model(x) - stock(x)).abs().max())


class Dropouts(nn.Module):
    """Whole sequences need one random stream for the features and another one for the norm's result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.norm(self.first(x)), 0.1, self.training)
        return self.down(functional.dropout(self.up(h), 0.1, self.training))


NORMED = {"norm": "sequence", "up": "colwise", "down": "rowwise"}


def two_streams(member: Member) -> list[Tensor]:
    model = build(Dropouts, member, NORMED)
    return [model(torch.ones(3, length, HIDDEN, dtype=torch.float64)).detach() for length in (13, 12, 1)]


class Breaks(Dropouts):
    """A model that can't be run a second time."""

    broken = False

    def forward(self, x: Tensor) -> Tensor:
        if Breaks.broken:
            raise ValueError("broken")
        return super().forward(x)


def no_second_program(member: Member) -> str:
    model = build(Breaks, member, NORMED)
    Breaks.broken = True
    try:
        return error_of(model, torch.zeros(3, 13, HIDDEN, dtype=torch.float64))
    finally:
        Breaks.broken = False


@pytest.mark.processes
def test_an_argument_that_changes_no_reshard_is_proved_on_the_spot() -> None:
    assert all(error < 1e-13 for error in world(2).run(an_argument_more))


def unlike_dense(x: Tensor) -> dict[str, Tensor]:
    items = [x[0], x[1, :1]]
    return {
        "it passes a nested tensor": torch.nested.nested_tensor(items, layout=torch.jagged),
        r"is or holds a nested tensor(.|\n)*pass a padded tensor": torch.nested.nested_tensor(items),
        "it passes a `torch.sparse_coo` tensor": x.to_sparse(),
        "it passes a `torch.qint8` tensor": torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    }


def passed_unlike_dense(member: Member) -> float:
    torch.manual_seed(0)
    stock, model, x = Mlp().double(), build(Mlp, member, MLP), torch.randn(SHAPE, dtype=torch.float64)
    with torch.no_grad():
        found = [float((model(x) - stock(x)).abs().max()) for _ in range(2)]
        for said, held in unlike_dense(x).items():
            with pytest.raises(tpplan.UnprovedCallError, match=said):
                model(held)
        return max(*found, float((model(x) - stock(x)).abs().max()))


@pytest.mark.processes
@pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor:UserWarning", "ignore:The PyTorch API of nested:UserWarning"
)
def test_what_does_not_lie_in_strides_is_refused_by_name() -> None:
    assert max(world(2).run(passed_unlike_dense)) < 1e-13


@pytest.mark.processes
def test_a_call_may_do_without_modules_that_the_plan_shards() -> None:
    for found in world(2).run(half_a_model):
        assert max(found) < 1e-12


@pytest.mark.processes
def test_a_branch_that_needs_other_reshards_gets_a_program_of_its_own() -> None:
    assert max(error for errors in world(2).run(another_branch) for error in errors) < 1e-13


@pytest.mark.processes
def test_a_call_that_one_rank_cannot_prove_is_refused_on_every_rank() -> None:
    (other, one), (broken, two) = world(2).run(broken_on_one)
    for text in (other, broken):
        assert text.startswith("TP117 unproved-call: ") and "differs from the example (`wide` is True" in text
    assert "rank 1 of the axis could not compile" in other and "reads a tensor's values" in broken
    assert one == two, "and goes on afterwards"


@pytest.mark.processes
def test_a_parameter_that_was_frozen_in_the_proof_may_be_trained_by_calls_of_the_model() -> None:
    for alone, error in world(2).run(a_thawed_parameter, MLP):
        assert error < 1e-12
        assert alone.startswith("TP117 unproved-call: `down.bias` requires grad, but was frozen")


@pytest.mark.processes
def test_a_sequence_that_cannot_be_split_is_kept_whole() -> None:
    assert max(error for errors in world(2).run(an_odd_sequence) for error in errors) < 1e-13


@pytest.mark.processes
def test_a_module_called_by_itself_takes_and_gives_whole_sequences() -> None:
    assert max(error for errors in world(2).run(a_module_by_itself) for error in errors) < 1e-13


@pytest.mark.processes
def test_a_sequence_that_the_call_does_not_show_is_split_or_whole() -> None:
    for count in (14, 13):
        assert max(world(2).run(patches, count)) < 1e-13


@pytest.mark.processes
def test_each_program_of_a_model_draws_by_its_own_streams() -> None:
    for one, other in zip(*world(2).run(two_streams), strict=True):
        assert torch.equal(one, other) and one.std() > 0


@pytest.mark.processes
def test_a_sequence_that_no_second_program_runs_is_refused() -> None:
    for text in world(2).run(no_second_program):
        assert text.startswith("TP118 uneven-sequence: ") and "can't be compiled without `sequence`" in text
        assert "broken" in text
