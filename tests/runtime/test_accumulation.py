"""Gradients that are accumulated, clipped and stepped with, on real processes: numbers, hooks, and their order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import tpplan
from tests.checkpoint.subjects import SUBJECTS, subject
from tests.marking import in_thirds, slow_but, sweep_but
from tests.models.tiny import example_keywords, first_output, tiny_model
from tests.plans.parity import PLANS, assert_close, counted, loss_of, tolerance, whole
from tests.runtime.world import Member, world
from tpplan.compat.dtensors import local_of
from tpplan.runtime.parameters.packed_tensors import PackedTensor
from tpplan.runtime.parameters.sharded_tensors import ShardedTensor

pytestmark = pytest.mark.processes

EXACT = tolerance(torch.float64)
NAMES = ("torch_transformer-sequence", "gpt2", "uneven", "torch_transformer", "gpt2-sequence", "phi3", "phi3-sequence")
QUICK = (NAMES[0], "uneven")


def _pair(name: str, member: Member) -> tuple[nn.Module, nn.Module, list[dict[str, Any]]]:
    """The stock model, a parallelized copy, and three calls."""
    if name in SUBJECTS and name == "uneven":
        held = subject(name)
        stock, plan, calls = held.model, held.plan, [held.inputs]
        with torch.no_grad():
            for parameter in stock.parameters():
                parameter.mul_(0.3)
        calls += [
            {"x": torch.rand(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i))} for i in (1, 2)
        ]
    else:
        architecture = name.removesuffix("-sequence")
        stock, _ = tiny_model(architecture)
        plan = PLANS / f"{name}.yaml"
        calls = [example_keywords(architecture, batch=2, sequence=8, seed=seed) for seed in range(3)]
    return stock, tpplan.parallelize(copy.deepcopy(stock), plan, member.mesh(), calls[0]), calls


QUICK_LOOPS = ["AdamW", "SGD foreach"]


def _zero_in_place(optimizer: optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


Clip = Callable[..., Tensor]
# Adam makes whole steps of rounding where its epsilon is small.
LOOPS: dict[str, tuple[Callable[[Any], optim.Optimizer], Callable[[optim.Optimizer], None] | None, Clip, float]] = {
    "AdamW": (lambda p: optim.AdamW(p, 0.05, eps=1e-2), _zero_in_place, tpplan.clip_grad_norm_, 2.0),
    "AdamW foreach": (
        lambda p: optim.AdamW(p, 0.05, eps=1e-2, foreach=True),
        None,
        torch.nn.utils.clip_grad_norm_,
        2.0,
    ),
    "Adam fused": (
        lambda p: optim.Adam(p, 0.05, eps=1e-2, fused=True),
        _zero_in_place,
        tpplan.clip_grad_norm_,
        torch.inf,
    ),
    "SGD": (lambda p: optim.SGD(p, 0.05, momentum=0.9), None, tpplan.clip_grad_norm_, 1.0),
    "SGD foreach": (
        lambda p: optim.SGD(p, 0.05, momentum=0.9, foreach=True),
        _zero_in_place,
        torch.nn.utils.clip_grad_norm_,
        torch.inf,
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", in_thirds(QUICK, ["gpt2", "phi3-sequence"], NAMES))
def test_steps_of_three_micro_batches_are_the_stock_models(name: str) -> None:
    world(2).run(_trained, name, QUICK_LOOPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep_but(NAMES[:1], NAMES[:2]))
def test_steps_of_all_optimizers_are_the_stock_models(name: str) -> None:
    world(2).run(_trained, name, [loop for loop in LOOPS if loop not in QUICK_LOOPS])


def _trained(member: Member, name: str, loops: list[str]) -> None:
    stock, sharded, calls = _pair(name, member)
    begin = {n: whole(p.detach()).clone() for n, p in stock.named_parameters()}  # pyright: ignore
    for loop in loops:
        norms: list[list[Tensor | None]] = []
        for held in (stock, sharded):
            with torch.no_grad():
                for n, parameter in held.named_parameters():
                    _fill(parameter, begin[n])
            norms.append(_loop(held, calls, loop))
        for ours, theirs in zip(norms[1], norms[0], strict=True):
            assert_close(f"{loop}: norm", ours, theirs, 100 * EXACT)
        for n, parameter in stock.named_parameters():
            ours = whole(sharded.get_parameter(n).detach())
            assert_close(f"{loop}: {n}", ours, parameter.detach(), 100 * EXACT, least=0.1)
            stock.get_parameter(n).grad = sharded.get_parameter(n).grad = None


def _fill(parameter: Tensor, numbers: Tensor) -> None:
    if isinstance(parameter, PackedTensor):
        local_of(parameter).copy_(parameter.part.of(numbers))
    elif isinstance(parameter, DTensor):
        parameter.copy_(distribute_tensor(numbers, parameter.device_mesh, parameter.placements))
    else:
        parameter.copy_(numbers)


def _loop(model: nn.Module, calls: list[dict[str, Any]], loop: str) -> list[Tensor | None]:
    make, zero, clip, order = LOOPS[loop]
    optimizer = make(model.parameters())
    norms: list[Tensor | None] = []
    for _ in range(3):
        for call in calls:
            (loss_of([first_output(model(**call))]) / len(calls)).backward()
        norms.append(whole(clip(model.parameters(), 0.5, order)))
        optimizer.step()
        (zero or optim.Optimizer.zero_grad)(optimizer)
    return norms


def test_what_arrives_is_added_to_gradients_of_any_kind() -> None:
    world(2).run(_added)


def _added(member: Member) -> None:
    stock, sharded, calls = _pair("uneven", member)
    for held in (stock, sharded):
        loss_of([held(**calls[0])]).backward()
    wanted = {name: parameter.grad for name, parameter in stock.named_parameters()}
    spared: dict[str, Tensor] = {}
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.grad is not None
        if name in ("pair.weight", "up.weight"):  # of the user's, that lies otherwise: it is cut
            zeros = torch.zeros(parameter.shape, dtype=parameter.dtype)
            parameter.grad = distribute_tensor(zeros, parameter.device_mesh, [Replicate()])
            assert parameter.grad is not None and type(parameter.grad) in (ShardedTensor, PackedTensor)
        else:
            spared[name] = parameter.grad
    hooked: list[tuple[str, type]] = []
    for name, parameter in sharded.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: hooked.append((name, type(p.grad))))
    loss_of([sharded(**calls[0])]).backward()
    for name, parameter in sharded.named_parameters():
        again = wanted[name]
        assert again is not None
        assert_close(name, whole(parameter.grad), again * (2 if name in spared else 1), EXACT)
        if name in spared:
            assert parameter.grad is spared[name], name  # in place, as of any parameter
    assert sorted(name for name, _ in hooked) == sorted(wanted)
    assert {kind for _, kind in hooked} == {ShardedTensor, PackedTensor}

    # Neither of these touches what is in `.grad`.
    before = {name: copy.deepcopy(whole(parameter.grad)) for name, parameter in sharded.named_parameters()}
    output = sharded(**calls[0])
    parameters = dict(sharded.named_parameters())
    torch.autograd.grad(loss_of([output]), list(parameters.values()), retain_graph=True)
    loss_of([output]).backward(inputs=[parameters["up.weight"]], retain_graph=True)
    loss_of([output]).backward(inputs=[parameters["up.weight"]])
    for name, parameter in parameters.items():
        once, times = wanted[name], 2 if name == "up.weight" else 0
        held = before[name]
        assert once is not None and held is not None
        assert_close(name, whole(parameter.grad), held + times * once, EXACT)


ORDERS = (2.0, 1.0, torch.inf, 3.0, 0.0, -torch.inf)


@pytest.mark.parametrize("name", slow_but(["uneven"], ["uneven", "packs", "shared", "tied", "phi3"]))
def test_the_norm_is_that_of_the_unsharded_gradients(name: str) -> None:
    world(2).run(_clipped, name, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packs", "uneven", "shared in packs"])
def test_the_norm_counts_each_element_of_a_larger_mesh_once(name: str) -> None:
    world(4).run(_clipped, name, (2, 2))


def _clipped(member: Member, name: str, shape: tuple[int, int] | None) -> None:
    held = subject(name)
    stock = held.model
    mesh = member.mesh() if shape is None else member.mesh(*shape, names=("dp", "tp"))
    sharded = tpplan.parallelize(copy.deepcopy(stock), held.plan, mesh, held.inputs)
    if shape is not None:
        fully_shard(sharded, mesh=mesh["dp"])
    gradients = {n: torch.randn_like(p) for n, p in stock.named_parameters()}
    for generator in (torch.Generator().manual_seed(5),):
        for gradient in gradients.values():
            gradient.copy_(torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype))
    for order in ORDERS:
        for maximum in (0.5, 1e6):
            for clip in (tpplan.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
                if clip is not tpplan.clip_grad_norm_ and (order <= 0 or shape is not None):
                    continue  # torch's own isn't meant for them
                _give(stock, sharded, gradients)
                wanted = torch.nn.utils.clip_grad_norm_(stock.parameters(), maximum, order)
                with CommDebugMode() as mode:
                    norm = clip(sharded.parameters(), maximum, order)
                if clip is tpplan.clip_grad_norm_:
                    assert type(norm) is Tensor and norm.dtype == wanted.dtype
                    assert sum(counted(mode).values()) == (1 if shape is None else 2), counted(mode)
                assert_close(f"{order}", whole(norm), wanted, EXACT)
                for n, parameter in stock.named_parameters():
                    ours = whole(sharded.get_parameter(n).grad)
                    assert_close(f"{order}: {n}", ours, parameter.grad, EXACT)


def _give(stock: nn.Module, sharded: nn.Module, gradients: dict[str, Tensor]) -> None:
    for n, parameter in stock.named_parameters():
        parameter.grad = gradients[n].clone()
        ours = sharded.get_parameter(n)
        gradient = torch.zeros_like(ours).detach()
        _fill(gradient, gradients[n])
        ours.grad = gradient


def test_a_scaled_loss_and_optimizers_that_need_whole_parameters() -> None:
    world(2).run(_scaled_and_whole)


def _scaled_and_whole(member: Member) -> None:
    held = subject("uneven")
    sharded = tpplan.parallelize(copy.deepcopy(held.model), held.plan, member.mesh(), held.inputs)
    begin = {n: p.detach().clone() for n, p in held.model.named_parameters()}
    gradients = [{n: torch.randn_like(p) for n, p in begin.items()} for _ in range(3)]
    generator = torch.Generator().manual_seed(3)
    for step in gradients:
        for gradient in step.values():
            gradient.normal_(generator=generator)
    # One infinity, in the rows of the last rank: all ranks leave out the second step.
    gradients[1]["up.weight"][-1, 0] = torch.inf
    for loop in ("fused", "for", "Adafactor", "Muon"):
        found: list[dict[str, Tensor | None]] = []
        for model in (held.model, sharded):
            with torch.no_grad():
                for n, parameter in model.named_parameters():
                    _fill(parameter, begin[n])
            found.append(_stepped(model, gradients, loop))
        for n, wanted in found[0].items():
            assert_close(f"{loop}: {n}", found[1][n], wanted, EXACT)


def test_numbers_of_gradients_are_those_of_the_whole() -> None:
    world(2).run(_numbers)


def _numbers(member: Member) -> None:
    stock, sharded, calls = _pair("torch_transformer", member)
    for held in (stock, sharded):
        loss_of([first_output(held(**calls[0]))]).backward()
    for name, parameter in stock.named_parameters():
        ours, theirs = sharded.get_parameter(name).grad, parameter.grad
        assert ours is not None and theirs is not None
        for number in (Tensor.norm, Tensor.sum, lambda t: t.abs().max()):
            assert abs(number(ours).item() - number(theirs).item()) <= EXACT * max(1.0, theirs.abs().sum().item()), name
    # An infinity on one rank alone, in a gradient behind one that is whole on all ranks.
    parameters = [sharded.get_parameter("blocks.0.mlp.down.bias"), sharded.get_parameter("blocks.0.mlp.up.weight")]
    assert parameters[1].grad is not None
    if member.rank == 1:
        local_of(parameters[1].grad).view(-1)[0] = torch.inf
    before = [local_of(parameter.detach()).clone() for parameter in parameters]
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), optim.SGD(parameters, lr=0.1)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert all(torch.equal(local_of(p.detach()), b) for p, b in zip(parameters, before, strict=True))


def _stepped(model: nn.Module, gradients: list[dict[str, Tensor]], loop: str) -> dict[str, Tensor | None]:
    parameters = dict(model.named_parameters())
    if loop in ("fused", "for"):
        optimizer: Any = optim.AdamW(parameters.values(), lr=0.1, fused=loop == "fused")
    elif loop == "Adafactor":
        optimizer = optim.Adafactor(parameters.values(), lr=0.1)
    else:
        optimizer = optim.Muon([p for p in parameters.values() if p.dim() == 2], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=loop in ("fused", "for"))
    for step in gradients if loop in ("fused", "for") else gradients[::2]:
        scaler.scale(torch.ones(()))  # which makes its scale
        for n, parameter in parameters.items():
            parameter.grad = torch.zeros_like(parameter).detach()
            _fill(parameter.grad, step[n])
        scaler.step(optimizer)
        scaler.update()
    return {n: whole(parameter.detach()) for n, parameter in parameters.items()}


def test_norms_that_are_not_finite_and_gradients_that_are_missing() -> None:
    world(2).run(_unusual)


def _unusual(member: Member) -> None:
    stock, sharded, calls = _pair("torch_transformer", member)
    for held in (stock, sharded):
        loss_of([first_output(held(**calls[0]))]).backward()
    clip = tpplan.clip_grad_norm_
    # A tensor alone, a generator, nothing.
    weight = sharded.get_parameter("blocks.0.mlp.up.weight")
    wanted = torch.linalg.vector_norm(stock.get_parameter("blocks.0.mlp.up.weight").grad)  # pyright: ignore
    assert_close("one", clip(weight, 1e9), wanted, EXACT)
    assert clip([], 1.0) == 0.0
    # A gradient that one rank alone has, of a replicated parameter and of a split one.
    replicated = sharded.get_parameter("blocks.0.mlp.down.bias")
    if member.rank == 1:
        weight.grad = None
    norm = clip(sharded.parameters(), 1e9)
    every: list[Any] = [None, None]
    dist.all_gather_object(every, norm)
    assert every[0] == every[1] and bool(norm.isfinite())
    # Infinities and what isn't a number, on the rank that holds it alone.
    assert isinstance(replicated, DTensor)
    up = sharded.get_parameter("blocks.1.mlp.up.weight")
    for bad in (torch.nan, torch.inf):
        for order in (2.0, torch.inf):
            assert up.grad is not None
            local_of(up.grad).fill_(bad if member.rank == 1 else 1.0)
            norm = clip(sharded.parameters(), 1e9, order) if bad == torch.inf else clip([up], 1e9, order)
            assert not norm.isfinite() and bool(norm.isnan()) == (bad != bad)
            local_of(up.grad).fill_(bad if member.rank == 1 else 1.0)
            with pytest.raises(RuntimeError, match="non-finite"):
                clip([up], 1.0, order, error_if_nonfinite=True)
    for kind in (torch.bfloat16, torch.float16):
        short = torch.full((4, 8), 300.0, dtype=kind)
        holder = nn.Parameter(distribute_tensor(short.clone(), member.mesh(), [Shard(0)]))
        holder.grad = distribute_tensor(short.clone(), member.mesh(), [Shard(0)])
        norm = clip([holder], 1.0)
        assert norm.dtype is kind and norm == torch.linalg.vector_norm(short.float()).to(kind)


@pytest.mark.parametrize("plan", slow_but([NAMES[0]], [NAMES[0], "torch_transformer"]))
def test_gradients_arrive_block_by_block_and_summed_ones_at_the_end(plan: str) -> None:
    for late in world(2).run(_order, plan):
        assert not late or plan == NAMES[0]


def _order(member: Member, plan: str) -> set[str]:
    """The parameters whose gradients arrive after their block's backward."""
    stock, sharded, calls = _pair(plan, member)
    seen: list[str] = []
    for n, parameter in sharded.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, n=n: seen.append(n))
    loss_of([first_output(sharded(**calls[0]))]).backward()
    assert sorted(seen) == sorted(n for n, _ in stock.named_parameters())
    late: set[str] = set()
    for i in range(len(sharded.blocks) - 1):  # pyright: ignore
        # Before anything of block i arrives, all of block i + 1 has, but for what is summed.
        first = min(place for place, n in enumerate(seen) if n.startswith(f"blocks.{i}."))
        late |= {n for n in seen[first:] if n.startswith(f"blocks.{i + 1}.")}
    for n in late:  # the last of all
        assert seen.index(n) >= len(seen) - len([m for m in seen if "norm" in m or m.endswith(("o.bias", "down.bias"))])
    return late
