"""Optimizers step on parts: bit for bit as on DTensors, with the same state, whatever hooks and closures do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tpplan.compat.dtensors import local_of, made_dtensor
from tpplan.compat.process_groups import fake_process_group
from tpplan.compat.propagator import fake_mesh
from tpplan.compiler.ir.layout import Pack, packed
from tpplan.runtime.data_parallel.stepping import BY_ELEMENT, step_on_parts
from tpplan.runtime.parameters.packed_tensors import PackedTensor, packed_tensor
from tpplan.runtime.parameters.sharded_tensors import ShardedTensor

UNDO = step_on_parts()
HOOKS = "torch.optim.optimizer._global_optimizer_pre_hooks"
Parameters = list[nn.Parameter]
Make = Callable[[Any], optim.Optimizer]


def _tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A split tensor, a replicated one, a scalar, one with packs, one of which there is nothing, a plain one."""
    generator = torch.Generator().manual_seed(seed)
    mesh = fake_mesh(2, 1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    layout, uneven = packed(0, [Pack(8), Pack(4, replicas=2)]), packed(0, [Pack(1)])
    return [
        made_dtensor(ShardedTensor, drawn(4, 5), mesh, [Shard(0)], (8, 5)),
        made_dtensor(ShardedTensor, drawn(5), mesh, [Replicate()], (5,)),
        made_dtensor(ShardedTensor, drawn(), mesh, [Replicate()], ()),
        packed_tensor(drawn(8, 3), mesh, layout, (12, 3)),
        packed_tensor(drawn(0, 3), mesh, uneven, (1, 3)),
        drawn(3, 2),
    ]


def _parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> Parameters:
    return [nn.Parameter(tensor) for tensor in _tensors(seed, dtype)]


def _give(parameters: Parameters, seed: int) -> None:
    for parameter, gradient in zip(parameters, _tensors(seed, parameters[0].dtype), strict=True):
        parameter.grad = gradient


@contextmanager
def _as_torch_steps() -> Iterator[None]:
    with mock.patch.dict(HOOKS, clear=True):
        yield


def _steps(make: Make, ours: bool, count: int = 3) -> tuple[Parameters, optim.Optimizer]:
    parameters = _parameters()
    optimizer = make(parameters)
    for step in range(count):
        _give(parameters, 1 + step)
        if ours:
            optimizer.step()
        else:
            with _as_torch_steps():
                optimizer.step()
    return parameters, optimizer


def _assert_same(ours: tuple[Parameters, optim.Optimizer], theirs: tuple[Parameters, optim.Optimizer]) -> None:
    for mine, its in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(local_of(mine), local_of(its))
        assert mine._version > 0 or not isinstance(mine, DTensor)
    assert [*ours[1].state] == [p for p in ours[0] if p in ours[1].state]  # none is of a local tensor
    for mine, its in zip(ours[0], theirs[0], strict=True):
        _assert_same_state(ours[1].state.get(mine, {}), theirs[1].state.get(its, {}))
    assert ours[1].state_dict()["param_groups"] == theirs[1].state_dict()["param_groups"]


def _assert_same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert [*ours] == [*theirs]
    assert type(ours) is dict
    for name, its in theirs.items():
        mine = ours[name]
        assert type(mine) is type(its), name
        if isinstance(its, DTensor):
            assert isinstance(mine, DTensor)
            assert mine.placements == its.placements and mine.shape == its.shape and mine.stride() == its.stride(), name
        if isinstance(its, Tensor):
            assert mine.dtype == its.dtype and torch.equal(local_of(mine), local_of(its)), name
        else:
            assert mine == its, name


_OPTIONS: dict[type[optim.Optimizer], dict[str, Any]] = {
    optim.SGD: {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
    optim.RMSprop: {"momentum": 0.5, "centered": True},
    optim.Adam: {"amsgrad": True, "maximize": True},
}
MADE: dict[str, Make] = {kind.__name__: lambda p, kind=kind: kind(p, **_OPTIONS.get(kind, {})) for kind in BY_ELEMENT}
ONLY_PLAIN = ("Rprop",)  # torch's own can't do it on DTensors
MADE["SGD without momentum"] = lambda p: optim.SGD(p, lr=0.1)
MADE["AdamW with a tensor as rate"] = lambda p: optim.AdamW(p, lr=torch.tensor(0.1))


@pytest.mark.parametrize("name", [name for name in MADE if name not in ONLY_PLAIN])
def test_a_step_is_torchs_own_bit_for_bit(name: str) -> None:
    _assert_same(_steps(MADE[name], ours=True), _steps(MADE[name], ours=False))


@pytest.mark.parametrize("name", MADE)
def test_a_step_is_that_of_local_tensors_bit_for_bit(name: str) -> None:
    distributed, optimizer = _steps(MADE[name], ours=True)
    local = [nn.Parameter(local_of(tensor)) for tensor in _tensors(0)]
    plain = MADE[name](local)
    for step in range(3):
        for parameter, gradient in zip(local, _tensors(1 + step), strict=True):
            parameter.grad = local_of(gradient)
        plain.step()
    for ours, theirs in zip(distributed, local, strict=True):
        assert torch.equal(local_of(ours), theirs)
        for key, held in plain.state[theirs].items():
            assert torch.equal(local_of(optimizer.state[ours][key]), held), key


FASTER: dict[str, Make] = {
    "AdamW foreach": lambda p: optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, fused=True),
    "SGD foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad fused": lambda p: optim.Adagrad(p, fused=True),
}


@pytest.mark.parametrize("name", FASTER)
def test_lists_of_tensors_step_as_torchs_own(name: str) -> None:
    def distributed(parameters: Parameters) -> optim.Optimizer:
        return FASTER[name](parameters[:-1])  # torch's own takes no plain tensors among them

    _assert_same(_steps(distributed, ours=True), _steps(distributed, ours=False))


def _stepped_on(optimizer: optim.Optimizer) -> list[Any]:
    """The classes of the parameters, gradients and state that a step of AdamW computes on; it isn't computed."""
    with mock.patch("torch.optim.adam.adam") as adam:
        optimizer.step()
    return [type(tensor) for held in adam.call_args.args for tensor in held]


def _has_distributed(optimizer: optim.Optimizer) -> bool:
    return any(issubclass(kind, DTensor) for kind in _stepped_on(optimizer))


def test_no_operation_of_a_step_is_dispatched_on_dtensors() -> None:
    parameters = _parameters()
    _give(parameters, 1)
    seen = _stepped_on(optim.AdamW(parameters))
    assert len(seen) == 5 * len(parameters)
    assert not any(issubclass(kind, DTensor) for kind in seen)


def test_groups_of_mixed_kinds_keep_their_options_and_parameters_without_gradients_theirs() -> None:
    found: list[tuple[Parameters, optim.Optimizer]] = []
    for ours in (True, False):
        parameters = _parameters()
        optimizer = optim.AdamW(
            [{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:], "weight_decay": 0.0}]
        )
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(3):
            _give(parameters, 1 + step)
            parameters[0].grad = None if step == 1 else parameters[0].grad
            with mock.patch.dict(HOOKS, clear=not ours):
                optimizer.step()
            scheduler.step()
        found.append((parameters, optimizer))
    _assert_same(*found)


def test_a_closure_is_called_as_torch_does() -> None:
    def run(ours: bool) -> tuple[Parameters, optim.Optimizer]:
        parameters = _parameters()
        optimizer = optim.SGD(parameters, lr=0.1, momentum=0.9)
        for step in range(2):

            def closure(step: int = step) -> float:
                assert torch.is_grad_enabled()
                optimizer.zero_grad()
                _give(parameters, 1 + step)
                optimizer.param_groups[0]["lr"] = 0.3
                return 7.0

            with mock.patch.dict(HOOKS, clear=not ours):
                assert optimizer.step(closure) == 7.0
        return parameters, optimizer

    _assert_same(run(True), run(False))


def test_hooks_of_the_optimizer_may_change_gradients_and_options_and_see_the_state() -> None:
    def run(ours: bool) -> tuple[Parameters, optim.Optimizer]:
        parameters = _parameters()
        optimizer = optim.Adam(parameters)

        def before(held: optim.Optimizer, *_: Any) -> None:
            assert held is optimizer
            held.param_groups[0]["lr"] = 0.7
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)

        def after(held: optim.Optimizer, *_: Any) -> None:
            assert held is optimizer
            for parameter in parameters:
                assert isinstance(held.state[parameter]["exp_avg"], DTensor) == isinstance(parameter, DTensor)
                held.state[parameter]["exp_avg"].mul_(2)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        for step in range(2):
            _give(parameters, 1 + step)
            with mock.patch.dict(HOOKS, clear=not ours):
                optimizer.step()
        return parameters, optimizer

    _assert_same(run(True), run(False))


def test_a_step_that_raises_leaves_the_optimizer_as_it_was() -> None:
    parameters = _parameters()
    optimizer = optim.AdamW(parameters)
    _give(parameters, 1)
    optimizer.step()
    groups, state = optimizer.param_groups, dict(optimizer.state)
    _give(parameters, 2)
    with mock.patch("torch.optim.adam.adam", side_effect=ValueError), pytest.raises(ValueError):
        optimizer.step()
    assert optimizer.param_groups is groups and groups[0]["params"] == parameters
    assert [*optimizer.state] == [*state] and all(optimizer.state[p] is held for p, held in state.items())
    optimizer.step()
    _assert_same((parameters, optimizer), _steps(optim.AdamW, ours=False, count=2))


def test_state_survives_saving_loading_and_copying() -> None:
    def run(ours: bool) -> tuple[Parameters, optim.Optimizer]:
        parameters, optimizer = _steps(optim.AdamW, ours)
        copied = copy.deepcopy(optimizer.state_dict())
        fresh = optim.AdamW(parameters, lr=9.0)
        fresh.load_state_dict(copied)
        _give(parameters, 9)
        with mock.patch.dict(HOOKS, clear=not ours):
            fresh.step()
        return parameters, fresh

    _assert_same(run(True), run(False))


def test_what_lies_otherwise_is_left_to_torch() -> None:
    mesh = fake_mesh(2, 1)
    parameter = nn.Parameter(made_dtensor(ShardedTensor, torch.randn(4, 5), mesh, [Shard(0)], (8, 5)))
    optimizer = optim.AdamW([parameter])
    parameter.grad = made_dtensor(DTensor, torch.randn(8, 5), mesh, [Replicate()], (8, 5))
    assert not _has_distributed(optimizer)  # it was cut
    parameter.grad = made_dtensor(DTensor, torch.randn(4, 5), mesh, [Shard(0)], (8, 5))
    assert not _has_distributed(optimizer)
    optimizer.state[parameter]["exp_avg"] = made_dtensor(DTensor, torch.zeros(8, 5), mesh, [Replicate()], (8, 5))
    assert _has_distributed(optimizer)
    partial = nn.Parameter(made_dtensor(DTensor, torch.randn(5), mesh, [Partial()], (5,)))
    partial.grad = torch.zeros_like(partial)
    assert _has_distributed(optim.AdamW([partial]))
    differentiable = nn.Parameter(_tensors(0)[0])
    differentiable.grad = torch.zeros_like(differentiable)
    assert _has_distributed(optim.AdamW([differentiable], differentiable=True))


class _Louder(optim.AdamW):
    """One of a user's own, that asks for the norms of its parameters."""

    def _init_group(self, group: Any, *args: Any) -> bool:
        assert all(isinstance(parameter, DTensor) for parameter in group["params"])
        return super()._init_group(group, *args)  # pyright: ignore


def test_other_optimizers_see_the_dtensors() -> None:
    parameters = _parameters()
    _give(parameters, 1)
    _Louder(parameters[:-1]).step()


def test_gradients_that_a_scaler_divides_in_the_step_are_divided() -> None:
    found: list[list[Tensor]] = []
    for ours in (True, False):
        parameters = _parameters()[:2]
        optimizer = optim.AdamW(parameters, fused=True)
        for parameter, gradient in zip(parameters, _tensors(1), strict=False):
            parameter.grad = gradient
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)  # pyright: ignore
        if ours:
            optimizer.step()
        else:
            for parameter in parameters:
                parameter.grad = parameter.grad / 4  # pyright: ignore
            del optimizer.grad_scale, optimizer.found_inf  # pyright: ignore
            optimizer.step()
        found.append([*map(local_of, parameters), *(local_of(p.grad) for p in parameters if p.grad is not None)])
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its)


def test_a_graph_that_saved_a_parameter_notices_the_step() -> None:
    parameter = nn.Parameter(_tensors(0)[0])
    squared = parameter * parameter
    parameter.grad = torch.ones_like(parameter)
    optim.SGD([parameter], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward(torch.ones_like(squared))


@pytest.mark.slow
def test_a_step_may_be_compiled() -> None:
    with fake_process_group(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parameter = nn.Parameter(made_dtensor(DTensor, torch.randn(4, 5), mesh, [Shard(0)], (8, 5)))
        optimizer = optim.SGD([parameter], lr=0.1)
        parameter.grad = torch.ones_like(parameter)
        before = local_of(parameter).clone()
        torch.compile(optimizer.step, backend="eager")()
        torch.testing.assert_close(local_of(parameter), before - 0.1)


def test_packed_state_that_lost_its_class_gets_it_back() -> None:
    parameter = nn.Parameter(_tensors(0)[3])
    optimizer = optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = optimizer.state[parameter]["exp_avg"]
    lost = made_dtensor(DTensor, local_of(held), held.device_mesh, held.placements, held.shape)
    optimizer.state[parameter]["exp_avg"] = lost
    assert DTensor not in _stepped_on(optimizer)
    assert type(lost) is PackedTensor
