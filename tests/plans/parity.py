"""Run a model as it is and parallelized, and compare everything that comes out."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import tpplan
from tests.models.tiny import output_tensors

PLANS = Path(__file__).parents[2] / "plans"

_NAMES = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
}


def tolerance(dtype: torch.dtype, terms: int = 512) -> float:
    """The error to allow, relative to a tensor's largest entry.

    A sum of n terms in another order differs by at most about n·ε of its largest term. n = 512 is more than the longest
    sums of the tiny models (the 36 tokens of a batch in a weight's gradient, 112 features) after one another in depth.
    """
    return terms * torch.finfo(dtype).eps


@dataclass
class Run:
    """What came of one forward and backward."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    forward: Counter[str]
    backward: Counter[str]


def whole(tensor: Tensor | None) -> Tensor | None:
    """A plain, whole tensor of any kind."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def counted(mode: CommDebugMode) -> Counter[str]:
    """The collectives that ran, by the names that programs use."""
    found: Counter[str] = Counter()
    for operator, count in mode.get_comm_counts().items():
        name = str(operator).rpartition(".")[2]
        found[_NAMES.get(name, name)] += count
    return found


def loss_of(outputs: list[Tensor]) -> Tensor:
    """A scalar that pulls at each entry of each output differently."""
    total = outputs[0].new_zeros(())
    for index, tensor in enumerate(outputs):
        generator = torch.Generator().manual_seed(100 + index)
        pull = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
        total = total + (tensor * pull).sum()
    return total


def run(model: nn.Module, keywords: Mapping[str, Any], counts: bool = True) -> Run:
    """One forward and one backward; without `counts` for models with a module in several places, as T5's embedding.

    CommDebugMode loses track of those.
    """
    with CommDebugMode() if counts else nullcontext() as there:
        outputs = output_tensors(model(**keywords))
    loss = loss_of([o for o in outputs if o.is_floating_point()])
    with CommDebugMode() if counts else nullcontext() as back:
        loss.backward()
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    forward, backward = (Counter[str]() if mode is None else counted(mode) for mode in (there, back))
    return Run([o.detach() for o in outputs], gradients, forward, backward)


def assert_close(name: str, ours: Tensor | None, reference: Tensor | None, allowed: float, least: float = 1e-3) -> None:
    """Compare to a reference, relative to the reference's largest entry or to `least`."""
    if ours is None or reference is None:
        assert ours is None and reference is None, f"{name}: one of the two has no gradient"
        return
    assert ours.shape == reference.shape, f"{name}: {tuple(ours.shape)} is not {tuple(reference.shape)}"
    scale = max(reference.abs().max().item(), least)
    error = (ours - reference).abs().max().item() / scale
    assert error <= allowed, f"{name}: relative error {error:.2e} > {allowed:.2e}"


def assert_same_run(ours: Run, reference: Run, allowed: float) -> None:
    """Every output and every parameter's gradient must agree."""
    assert len(ours.outputs) == len(reference.outputs)
    for index, (one, other) in enumerate(zip(ours.outputs, reference.outputs, strict=True)):
        assert_close(f"output {index}", one, other, allowed)
    assert list(ours.gradients) == list(reference.gradients)
    # Some gradients are zero but for rounding, such as that of a key's bias: softmax doesn't see it.
    least = 0.01 * max((g.abs().max().item() for g in reference.gradients.values() if g is not None), default=1.0)
    for name, gradient in reference.gradients.items():
        assert_close(f"gradient of {name}", ours.gradients[name], gradient, allowed, least)


def assert_parity(
    model: nn.Module,
    keywords: Mapping[str, Any],
    plan: Any,
    mesh: DeviceMesh,
    allowed: float,
    *,
    inputs: Mapping[str, Any] | None = None,
    prepare: Callable[[nn.Module], object] | None = None,
) -> nn.Module:
    """Parallelize a copy of `model`, run both, compare outputs and gradients; returns the parallelized model."""
    stock = copy.deepcopy(model)
    sharded = tpplan.parallelize(copy.deepcopy(model), plan, mesh, dict(inputs or keywords))
    for held in (stock, sharded):
        if prepare is not None:
            prepare(held)
    assert_same_run(run(sharded, keywords), run(stock, keywords), allowed)
    return sharded
