"""DTensor knows the operators: which placements they keep, which they gather, and that the numbers are right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

from tests.runtime.world import Member, world
from tpplan import kernels
from tpplan.compat.process_groups import fake_process_group
from tpplan.compat.propagator import OperatorMeta, propagate

OPS = torch.ops.tpplan
R, P = Replicate(), Partial()


def meta(placement: Placement, *shape: int) -> OperatorMeta:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return OperatorMeta(shape, tuple(strides), torch.float32, placement)


def asked(operator: Any, *arguments: Any) -> list[Placement | None] | None:
    return propagate(operator.default, arguments, {}, 2)


@pytest.mark.parametrize("placement", [R, Shard(0), Shard(1)], ids=str)
def test_a_norm_keeps_what_is_sharded_beside_its_dims(placement: Placement) -> None:
    x, statistic, weight = meta(placement, 4, 6, 8), meta(placement, 4, 6), meta(R, 8)
    summed = R if placement == R else P
    rms = (1, 1e-5, 0.0, False, torch.float32)
    assert asked(OPS.layer_norm, x, weight, weight, 1, 1e-5, torch.float32) == [placement] * 3
    assert asked(OPS.layer_norm, x, None, weight, 1, 1e-5, torch.float32) == [placement] * 3
    assert asked(OPS.rms_norm, x, weight, *rms) == [placement] * 2
    assert asked(OPS.residual_layer_norm, x, x, None, None, 1, 1e-5, torch.float32) == [placement] * 4
    assert asked(OPS.residual_rms_norm, x, x, weight, *rms) == [placement] * 3
    dtypes = (torch.float32, torch.float32)
    found = asked(OPS.layer_norm_backward, x, x, weight, statistic, statistic, None, 1, *dtypes)
    assert found == [placement, summed, summed]
    found = asked(OPS.rms_norm_backward, x, x, weight, statistic, x, 1, 0.0, False, torch.float32)
    assert found == [placement, summed]


def test_a_norm_over_two_dims_keeps_only_what_is_before_them() -> None:
    weight = meta(R, 6, 8)
    for dim, kept in ((0, True), (1, False), (2, False)):
        found = asked(OPS.layer_norm, meta(Shard(dim), 4, 6, 8), weight, weight, 2, 1e-5, torch.float32)
        assert (found == [Shard(dim)] * 3) == kept


def test_a_partial_input_is_not_taken_as_it_is() -> None:
    assert asked(OPS.rms_norm, meta(P, 4, 8), None, 1, 1e-5, 0.0, False, torch.float32) is None
    assert asked(OPS.gelu, meta(P, 4, 8), "none") is None


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_activations_keep_any_shard(dim: int) -> None:
    x = meta(Shard(dim), 4, 6, 8)
    assert asked(OPS.gelu, x, "tanh") == [Shard(dim)]
    assert asked(OPS.gated, x, x, "silu") == [Shard(dim)]
    assert asked(OPS.gated_backward, x, x, x, "silu") == [Shard(dim)] * 2
    bias = meta(Shard(0) if dim == 2 else R, 8)
    assert asked(OPS.bias_gelu, x, bias, "none") == [Shard(dim)]
    assert asked(OPS.bias_gelu_backward, x, x, bias, "none", True) == [Shard(dim), Shard(0) if dim == 2 else P]


def test_cross_entropy_keeps_its_rows_and_gathers_its_classes() -> None:
    rows = meta(Shard(0), 6)
    assert asked(OPS.cross_entropy_parts, meta(Shard(0), 6, 8), rows, 0, 8, -100, False) == [Shard(0)] * 4
    assert asked(OPS.cross_entropy_parts, meta(Shard(1), 6, 8), meta(R, 6), 0, 8, -100, False) is None


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_process_group(2):
        yield init_device_mesh("cpu", (2,))


def test_a_rule_remembers_which_of_two_optional_tensors_was_given(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(1)])
    vector = distribute_tensor(torch.randn(8), mesh, [R])
    for weight, bias in ((vector, None), (None, vector), (vector, None)):
        with CommDebugMode() as communication:
            y, *_ = OPS.layer_norm.default(x, weight, bias, 1, 1e-5, torch.float32)
        assert y.placements == (R,)
        assert communication.get_total_counts() == 1


def test_a_rule_remembers_how_many_dims_are_normalized(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.randn(4, 6, 8), mesh, [Shard(1)])
    for dims, placement in ((1, Shard(1)), (2, R), (1, Shard(1))):
        y, *_ = OPS.layer_norm.default(x, None, None, dims, 1e-5, torch.float32)
        assert y.placements == (placement,)


def test_no_kernel_communicates_in_a_sequence_region(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.randn(2, 6, 8), mesh, [Shard(1)]).requires_grad_()
    weight = distribute_tensor(torch.randn(8), mesh, [R]).requires_grad_()
    with CommDebugMode() as communication:
        y, s, *_ = OPS.residual_layer_norm.default(x, x, weight, weight, 1, 1e-5, torch.float32)
        z = OPS.bias_gelu.default(OPS.gated.default(y, s, "silu"), weight, "none")
        z.to_local().sum().backward()
    assert communication.get_total_counts() == 0
    assert isinstance(x.grad, DTensor) and isinstance(weight.grad, DTensor)
    assert x.grad.placements == (Shard(1),)
    assert weight.grad.placements == (P,)


# On real processes.


def _norm_as_dtensor(member: Member) -> list[float]:
    """The largest differences to the same computation on whole tensors."""
    mesh = member.mesh()
    torch.manual_seed(3)
    whole = [torch.randn(4, 6, 8), torch.randn(8), torch.randn(8), torch.randn(4, 6, 8)]
    x, weight, bias, dy = whole
    placed = [distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(whole, (Shard(1), R, R), strict=False)]
    y = OPS.layer_norm.default(*placed, 1, 1e-5, torch.float32)[0]
    y.backward(distribute_tensor(dy, mesh, [Shard(1)]))
    exact = [t.clone().requires_grad_() for t in (x, weight, bias)]
    wanted = functional.layer_norm(exact[0], (8,), exact[1], exact[2])
    wanted.backward(dy)
    pairs = [(y, wanted), *((ours.grad, its.grad) for ours, its in zip(placed, exact, strict=True))]
    return [float((ours.full_tensor() - its).abs().max()) for ours, its in pairs]  # pyright: ignore


def _cross_entropy_in_parts(member: Member, smoothing: float, reduction: Any) -> tuple[float, float, dict[str, int]]:
    """The differences of loss and gradient to those of the whole vocabulary, and the collectives of a forward."""
    torch.manual_seed(4)
    logits, target = torch.randn(7, 20) * 3, torch.randint(0, 20, (7,))
    logits[3, : 20 // member.size] = -torch.inf  # the first rank has nothing to say of this row
    target[1], target[3] = -100, 19
    columns = 20 // member.size
    mine = logits[:, member.rank * columns : (member.rank + 1) * columns].clone().requires_grad_()
    with CommDebugMode() as communication:
        loss = kernels.cross_entropy(
            mine, target, label_smoothing=smoothing, reduction=reduction, group=dist.group.WORLD
        )
    counts = {str(name): count for name, count in communication.get_comm_counts().items()}
    (gradient,) = torch.autograd.grad(loss.sum(), mine)
    wide = logits.double().requires_grad_()
    exact = functional.cross_entropy(wide, target, label_smoothing=smoothing, reduction=reduction)
    (wanted,) = torch.autograd.grad(exact.sum(), wide)
    part: Tensor = wanted[:, member.rank * columns : (member.rank + 1) * columns]
    return float((loss - exact).abs().max()), float((gradient - part).abs().max()), counts


@pytest.mark.processes
def test_a_sharded_norm_computes_what_a_whole_one_does() -> None:
    for differences in world(2).run(_norm_as_dtensor):
        assert max(differences) < 5e-6


@pytest.mark.processes
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_split_vocabulary_has_the_loss_of_the_whole_one_for_two_all_reduces(reduction: str) -> None:
    for loss, gradient, counts in world(2).run(_cross_entropy_in_parts, 0.0, reduction):
        assert loss < 2e-6
        assert gradient < 1e-6
        assert sum(counts.values()) == 2, counts


def _smoothed(member: Member) -> tuple[float, float]:
    torch.manual_seed(5)
    logits, target = torch.randn(7, 20), torch.randint(0, 20, (7,))
    target[2] = -100
    mine = logits.chunk(member.size, 1)[member.rank].clone().requires_grad_()
    loss = kernels.cross_entropy(mine, target, label_smoothing=0.2, group=dist.group.WORLD)
    (gradient,) = torch.autograd.grad(loss, mine)
    wide = logits.double().requires_grad_()
    exact = functional.cross_entropy(wide, target, label_smoothing=0.2)
    (wanted,) = torch.autograd.grad(exact, wide)
    part = wanted.chunk(member.size, 1)[member.rank]
    return float((loss - exact).abs()), float((gradient - part).abs().max())


@pytest.mark.processes
def test_smoothing_spreads_over_the_classes_of_all_ranks() -> None:
    for loss, gradient in world(2).run(_smoothed):
        assert loss < 1e-6
        assert gradient < 1e-7
