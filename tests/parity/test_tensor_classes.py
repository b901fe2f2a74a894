"""Weights of classes of their own: taken apart, cut with the features of their parts, and put together again."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import tpplan
from tests.marking import in_turns
from tests.models.coded import Below, Coded, Dynamic, Groups, Unread, coded
from tests.models.quantised import Mlp
from tests.parity.test_quantised import Attention
from tests.runtime.world import Member, world
from tpplan.api import suggest_text
from tpplan.plan import CompileError

PLAN = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
WIDTH = 32
KINDS: dict[str, type[Coded]] = {
    "with what isn't read": Unread, "activations by token": Dynamic, "below autograd": Below, "in groups": Groups,
    "by row": Coded,
}  # fmt: skip


def calls(**options: Any) -> tuple[Tensor]:
    return (torch.randn(2, 5, WIDTH, **options),)


@pytest.mark.parametrize(("kind", "tp"), in_turns([*KINDS], [2, 4], quick=5))
def test_outputs_are_equal(kind: str, tp: int) -> None:
    torch.manual_seed(0)
    model, inputs = coded(Mlp(nn.Linear), KINDS[kind]), calls()
    stock = {name: (type(held), id(held)) for name, held in model.named_parameters()}
    report = tpplan.verify(model, PLAN, tp, inputs)
    assert report.ok, report.problems
    program = tpplan.compile_plan(model, PLAN, tp, inputs)
    maxima = {"all-gather": 1} if kind == "activations by token" else {}
    assert program.count_collectives(backward=False) == {"all-reduce": 1, **maxima}
    placed = {held.name: held for held in program.parameters}
    assert placed["up._weight_codes"].layout.dim == 0 and placed["down._weight_codes"].layout.dim == 1
    own = [held for held in program.parameters if held.name.startswith("up.")]
    assert all(held.local_bytes * tp == held.bytes for held in own)
    assert {name: (type(held), id(held)) for name, held in model.named_parameters()} == stock


def test_gradients_pass_through_frozen_layers() -> None:
    torch.manual_seed(0)
    report = tpplan.verify(coded(Mlp(nn.Linear), Groups), PLAN, 2, calls(requires_grad=True))
    assert report.ok, report.problems


def _by_quanto(weights: str, freezes: bool) -> nn.Module:
    quanto: Any = pytest.importorskip("optimum.quanto")
    torch.manual_seed(0)
    model = Mlp(nn.Linear).requires_grad_(False)
    quanto.quantize(model, weights=weights)
    if freezes:
        quanto.freeze(model)  # makes parameters that require grad
    return model


@pytest.mark.parametrize(("weights", "freezes", "tp"), [("qint8", True, 2), ("qfloat8", True, 4), ("qint8", False, 4)])
def test_weights_of_quanto(weights: str, freezes: bool, tp: int) -> None:
    model, inputs = _by_quanto(weights, freezes), calls(requires_grad=True)
    if freezes:
        with pytest.raises(CompileError, match=r"TP112.*it requires grad(.|\n)*`requires_grad_\(False\)` on `down"):
            tpplan.compile_plan(model, PLAN, tp, inputs)
        model.requires_grad_(False)
    program = tpplan.compile_plan(model, PLAN, tp, inputs)
    codes = [held for held in program.parameters if held.name.endswith(("weight", "_data"))]
    assert len(codes) == 2 and all(held.local_bytes * tp == held.bytes for held in codes)
    report = tpplan.verify(model, PLAN, tp, inputs)
    assert report.ok, report.problems


@pytest.mark.parametrize(("kind", "packed"), [(Groups, False), (Coded, True)])
def test_parts_of_heads_are_cut_in_their_own_entries(kind: type[Coded], packed: bool) -> None:
    torch.manual_seed(0)
    heads = {"0.qkv": {"style": "colwise", "packed": ["q", "k", "v"]}} if packed else {"0.{q,k,v}": "colwise"}
    model = coded(nn.Sequential(Attention(partial(nn.Linear, bias=False), packed)), kind)
    report = tpplan.verify(model, {"version": 1, "modules": {**heads, "0.o": "rowwise"}}, 4, calls())
    assert report.ok, report.problems


class Shared(nn.Module):
    """Two pairs; of the second one `up` has the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (coded(Mlp(nn.Linear), Groups) for _ in range(2))
        self.b.up.weight = self.a.up.weight  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) / 16)


def test_what_two_layers_share_is_cut_once() -> None:
    plan = {"version": 1, "modules": {"*.up": "colwise", "*.down": "rowwise"}}
    report = tpplan.verify(Shared(), plan, 2, calls())
    assert report.ok, report.problems
    shared = [held for held in tpplan.compile_plan(Shared(), plan, 2, calls()).parameters if len(held.names) == 2]
    assert [held.names for held in shared] == [(f"a.up.{n}", f"b.up.{n}") for n in ("_weight_codes", "_weight_scales")]


@pytest.mark.parametrize("kind", [Groups, Coded])
def test_a_plan_is_found(kind: type[Coded]) -> None:
    model = coded(Mlp(nn.Linear), kind)
    assert tpplan.suggest_plan(model, 2, inputs=calls()).to_dict()["modules"] == PLAN["modules"]
    assert "- down" not in suggest_text(model, 2, inputs=calls())  # a row's scales are as small as its bias


@pytest.mark.slow
def test_weights_travel_to_processes_of_a_verification() -> None:
    model = coded(Mlp(nn.Linear), Groups)
    assert tpplan.verify(model, PLAN, 2, calls(), processes=True).ok
    assert isinstance(model.get_submodule("up").weight, Groups)


class Kernel(Coded):
    """Multiplies by a kernel that takes codes and scales."""

    def multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor:
        made = torch.ops.aten._weight_int8pack_mm.default(x.flatten(0, 1), self.codes, self.scales.flatten())
        return made.view(*x.shape[:2], -1)


def test_a_kernel_without_a_rule_is_refused_by_the_class() -> None:
    with pytest.raises(CompileError, match=r"TP101.*the class of `up.weight`, a `Kernel`, shows no product"):
        tpplan.compile_plan(coded(Mlp(nn.Linear), Kernel), {"version": 1, "modules": {"up": "colwise"}}, 2, calls())


def test_a_cut_inside_of_a_group_is_refused_by_its_size() -> None:
    with pytest.raises(CompileError, match=r"TP102.*groups of 8 inputs; 4 a rank"):
        tpplan.compile_plan(coded(Mlp(nn.Linear, inner=32), Groups), PLAN, 8, calls())


# -- on processes -----------------------------------------------------------------------------------------------------
def _run(member: Member, kind: str, folder: str) -> dict[str, Any]:
    torch.manual_seed(1)
    whole = coded(Mlp(nn.Linear), KINDS[kind])
    (x,) = calls()
    expected = whole(x)
    expected.square().sum().backward()
    model = copy.deepcopy(whole)
    for held in model.parameters():
        held.grad = None
        if member.rank:  # everybody takes the first rank's numbers
            parts = [getattr(held, name) for name in held.KEPT] if isinstance(held, Coded) else [held.detach()]
            for part in parts:
                part.zero_()
    before = dict(model.named_parameters())
    with pytest.raises(CompileError, match="TP012"):
        tpplan.parallelize(model, {"version": 1, "modules": {"nothing": "colwise"}}, member.mesh(), (x,))
    assert all(held is before[name] for name, held in model.named_parameters())
    model = tpplan.parallelize(model, PLAN, member.mesh(), (x,))
    with CommDebugMode() as seen:
        found = model(x)
    program = tpplan.compile_plan(whole, PLAN, member.size, (x,))
    assert sum(seen.get_comm_counts().values()) == program.count_collectives(backward=False).total()
    assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found.square().sum().backward()
    for name in ("up", "down"):
        layer: Any = model.get_submodule(name)
        assert_close(layer.bias.grad.full_tensor(), whole.get_submodule(name).bias.grad, rtol=1e-4, atol=1e-4)
        _is_cut(layer.weight, whole.get_submodule(name).weight, int(name == "down"), member)
        with pytest.raises(tpplan.StateError, match=r"TP140.*`weight` of a `Linear` was set"):
            layer.weight = nn.Parameter(torch.zeros(2, 2))
        with pytest.raises(tpplan.StateError, match=r"TP140.*`aten::mul.Tensor` was asked of a sharded weight"):
            _ = layer.weight * 2
    _is_saved_and_loaded(model, whole, folder)
    assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    assert_close(model(x[:, :3]), whole(x[:, :3]), rtol=1e-4, atol=1e-4)
    assert_close(model.eval()(x), expected, rtol=1e-4, atol=1e-4)
    return {}


def _is_cut(held: Any, whole: Any, dim: int, member: Member) -> None:
    """As the class's own slicing cuts it, bit for bit, and whole again."""
    assert isinstance(held, DTensor) and held.shape == whole.shape
    local, count = held.to_local(), whole.shape[dim] // member.size
    assert type(local) is type(whole) and local.shape[dim] == count
    assert _alike(held.full_tensor(), whole)
    if not isinstance(whole, Below):
        assert _alike(local, whole.narrow(dim, member.rank * count, count))


def _alike(one: Any, other: Any) -> bool:
    assert type(one) is type(other) and one.block == other.block
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in one.KEPT)


def _is_saved_and_loaded(model: nn.Module, whole: nn.Module, folder: str) -> None:
    expected, state = whole.state_dict(), model.state_dict()
    assert [*state] == [*expected]
    tpplan.save_weights(model, folder)
    stock = copy.deepcopy(whole)
    for name, held in stock.state_dict().items():
        for part in (getattr(held, part) for part in held.KEPT) if isinstance(held, Coded) else (held,):
            part.zero_()
        assert not isinstance(held, Coded) or not _alike(held, expected[name])
    tpplan.load_weights(stock, folder)
    assert all(_alike(held, expected[name]) for name, held in stock.state_dict().items() if isinstance(held, Coded))
    torch.save(state, f"{folder}/{torch.distributed.get_rank()}.pt")
    ours = torch.load(f"{folder}/{torch.distributed.get_rank()}.pt", weights_only=False)
    for load in (
        lambda: tpplan.load_weights(model, folder),
        lambda: model.load_state_dict(expected),
        lambda: model.load_state_dict(ours),
        lambda: model.load_state_dict(expected, assign=True),
    ):
        for parameter in model.parameters():
            parameter.to_local().detach().zero_()  # pyright: ignore
        load()
        for name, held in model.state_dict().items():
            full: Any = held.full_tensor()
            assert _alike(full, expected[name]) if isinstance(full, Coded) else torch.equal(full, expected[name]), name


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "tp"), in_turns([*KINDS], [2, 4], quick=2))
def test_processes_hold_save_and_load_shards(kind: str, tp: int, tmp_path: Path) -> None:
    world(tp).run(_run, kind, str(tmp_path))


# -- what can't be taken apart ----------------------------------------------------------------------------------------
class Plain(Tensor):
    """Says itself what is computed, and can't be taken apart."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Lost(Coded):
    """Isn't what its parts make."""

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: object) -> Coded:
        return Coded((1, 1), **inner)


def _kept_beside(*shape: int) -> Tensor:
    made = nn.Parameter(Coded.drawn(*shape), requires_grad=False)
    vars(made)["beside"] = torch.ones(1)
    return made


def _nested(outputs: int, inputs: int) -> Tensor:
    return Coded((1, inputs), codes=Coded.drawn(outputs, inputs), scales=torch.rand(outputs, 1))


@pytest.mark.parametrize(
    ("made", "name", "reason"),
    [
        (lambda *shape: torch.randn(shape).as_subclass(Plain), "Plain", "its class has no `__tensor_flatten__`"),
        (lambda *shape: Lost.drawn(*shape), "Lost", "its parts make another tensor"),
        (_nested, "Coded", "again of a class of its own, a `Coded`"),
        (_kept_beside, "Coded", "it keeps a tensor that its `__tensor_flatten__` doesn't give"),
        (lambda *shape: Coded.drawn(*shape).requires_grad_(), "Coded", "it requires grad"),
    ],
)
def test_a_weight_that_cant_be_taken_apart_is_refused_by_name(made: Any, name: str, reason: str) -> None:
    model = Mlp(nn.Linear)
    weight = made(WIDTH, 2 * WIDTH)
    is_parameter = isinstance(weight, nn.Parameter)
    model.down.weight = weight if is_parameter else nn.Parameter(weight, requires_grad=weight.requires_grad)
    for attempt in (tpplan.compile_plan, tpplan.verify):
        with pytest.raises(CompileError, match=rf"TP112.*`down.weight` is an? `[\w.]*{name}`.*{reason}"):
            attempt(model, PLAN, 2, calls())


@pytest.mark.parametrize("held", [nn.Parameter(torch.ones(2 * WIDTH)), 2.0])
def test_a_name_of_a_part_that_is_taken_is_refused(held: Any) -> None:
    model = coded(Mlp(nn.Linear), Coded)
    setattr(model.up, "_weight_codes", held)  # noqa: B010
    with pytest.raises(CompileError, match=r"TP112.*`up.weight` is.*names, such as `_weight_codes`, are free"):
        tpplan.compile_plan(model, PLAN, 2, calls())
    assert getattr(model.up, "_weight_codes") is held  # noqa: B009


class AskingLinear(nn.Linear):
    """Asks of its weight what is true of the stock module's."""

    def forward(self, x: Tensor) -> Tensor:
        made = nn.functional.linear(x, self.weight, self.bias)
        if isinstance(self.weight, nn.Parameter) and self.weight is self.weight:
            made = made * getattr(self.weight, "tag", 1)
        return made * len([*self.parameters()])


class Asking(Mlp):
    """Asks a layer for its class."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if type(self.up) is nn.Linear else 1)


def _asked(member: Member) -> None:
    torch.manual_seed(0)
    (x,), model = calls(), coded(Mlp(AskingLinear), Coded)
    setattr(model.get_parameter("up.weight"), "tag", 2)  # noqa: B010 -- as libraries note on parameters what they did
    expected = model(x)
    assert_close(tpplan.parallelize(model, PLAN, member.mesh(), (x,))(x), expected, rtol=1e-4, atol=1e-3)


def test_a_body_asks_the_stock_modules_weight() -> None:
    assert tpplan.verify(coded(Mlp(AskingLinear), Coded), PLAN, 2, calls()).ok
    world(2).run(_asked)


def test_a_class_of_a_module_that_is_asked_for_is_the_stock_one() -> None:
    model = coded(Asking(nn.Linear), Coded)
    with pytest.raises(CompileError, match=r"TP107.*the body of the model doesn't compute on local shards"):
        tpplan.compile_plan(model, PLAN, 2, calls())
    assert type(model.up) is nn.Linear


def _written_to(member: Member) -> None:
    torch.manual_seed(0)
    (x,), model = calls(), coded(Mlp(nn.Linear), Coded)
    state: dict[str, Any] = copy.deepcopy(model.state_dict())
    expected = model(x)
    model = tpplan.parallelize(model, PLAN, member.mesh(), (x,))
    weight: Any = model.get_parameter("up.weight")
    attempts = (
        weight.requires_grad_,
        lambda: setattr(weight, "data", torch.zeros(2 * WIDTH, WIDTH)),
        model.double,
        lambda: nn.Sequential(model).to(torch.bfloat16),
    )
    for attempt in attempts:
        with pytest.raises(tpplan.StateError, match="TP140"):
            attempt()
    biases = [held for name, held in model.named_parameters() if name.endswith("bias")]
    assert biases and {held.dtype for held in biases} == {torch.float32}
    assert model.to("cpu").float() is model
    other = Coded((1, WIDTH // 2), codes=state["up.weight"].codes, scales=state["up.weight"].scales)
    with pytest.raises(tpplan.StateError, match=r"TP140.*`up.weight` that is loaded.*\(1, 16\), not \(1, 32\)"):
        model.load_state_dict({**state, "up.weight": other})
    kept = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.to_local().detach().zero_()  # pyright: ignore
    model.load_state_dict(kept)
    assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


def test_what_would_be_lost_when_it_is_set_is_refused() -> None:
    world(2).run(_written_to)


def _coded_late(member: Member) -> str:
    torch.manual_seed(0)
    stock, inputs = Mlp(nn.Linear), calls()
    model = tpplan.parallelize(copy.deepcopy(stock), PLAN, member.mesh(), inputs)
    before = model(*inputs)
    with pytest.raises(tpplan.StateError) as caught:
        coded(model, Coded)
    assert_close(model(*inputs), before, rtol=0, atol=0)
    # What the help says:
    torch.manual_seed(1)
    whole = coded(stock, Coded)
    model = tpplan.parallelize(copy.deepcopy(whole), PLAN, member.mesh(), inputs)
    assert_close(model(*inputs), whole(*inputs))
    return str(caught.value)


def test_a_weight_that_is_set_after_parallelize_is_refused_by_name() -> None:
    for message in world(2).run(_coded_late):
        assert "TP130" in message and "`up.weight` was to be replaced by a `Coded`" in message
        assert "quantise the stock model, before `parallelize`" in message and "runs as before" in message


def _beside(member: Member, how: str) -> tuple[Tensor, ...]:
    torch.manual_seed(2)
    mesh = member.mesh(2, 2, names=("dp", "tp"))
    model, (x,) = nn.Sequential(nn.Linear(WIDTH, WIDTH), coded(Mlp(nn.Linear), Unread)), calls()
    whole = copy.deepcopy(model)
    expected = whole(x)
    expected.square().sum().backward()
    plan = {"version": 1, "modules": {"1.up": "colwise", "1.down": "rowwise"}}
    sharded = tpplan.parallelize(model, plan, mesh["tp"], (x,))
    if how == "ddp":
        sharded = DistributedDataParallel(sharded, process_group=mesh["dp"].get_group())
    else:
        fully_shard(sharded, mesh=mesh["dp"])
    found = sharded(x)
    found.square().sum().backward()
    state = model.state_dict()
    assert [*state] == [*whole.state_dict()]
    assert all(_alike(state[f"1.{n}.weight"].full_tensor(), whole[1].get_submodule(n).weight) for n in ("up", "down"))  # pyright: ignore
    gradient: Any = model[0].weight.grad
    return found.detach(), expected.detach(), gradient.full_tensor(), whole[0].weight.grad  # pyright: ignore


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_replicas_and_fsdp_stand_beside(how: str) -> None:
    for found, expected, gradient, own in world(4).run(_beside, how):
        assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert_close(gradient, own, rtol=1e-3, atol=1e-3)
