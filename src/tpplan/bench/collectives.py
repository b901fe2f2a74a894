"""Collectives: what each shipped plan's program predicts, held against what torch counts when the model runs."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module

from tpplan.api import compile_plan, parallelize
from tpplan.bench.subjects import SHIPPED, first_tensor, tiny_transformer, torch_plan
from tpplan.compiler.ir.layout import Collective
from tpplan.plan import shipped_plan_names

TORCH = "parallelize_module"
_KINDS = {
    "one_shot_all_reduce": Collective.ONE_SHOT,
    "all_reduce": Collective.ALL_REDUCE,
    "allreduce": Collective.ALL_REDUCE,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "all_gather": Collective.ALL_GATHER,
    "allgather": Collective.ALL_GATHER,
    "all_to_all": Collective.ALL_TO_ALL,
    "alltoall": Collective.ALL_TO_ALL,
}
FEWER, MORE = 2, 3


@dataclass(frozen=True, slots=True)
class Count:
    """How often each collective runs: in a forward, and in a forward with its backward."""

    forward: Counter[str]
    step: Counter[str]

    def __sub__(self, other: Count) -> Count:
        """What a larger model issues on top of a smaller one."""
        return Count(self.forward - other.forward, self.step - other.step)

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Plain data."""
        return {"forward": dict(sorted(self.forward.items())), "step": dict(sorted(self.step.items()))}


def measure(plans: tuple[str, ...] = (), size: int = 2) -> dict[str, Any]:
    """Count the collectives of shipped plans.

    Args:
        plans: their names; all that fit an architecture of transformers if empty.
        size: ranks of the axis.

    Returns:
        Plain data: a row for each plan, with counts predicted and counted, per block and in all; plans left out.
    """
    torch.set_num_threads(1)
    known = {name: name.removesuffix("-sequence") for name in plans or shipped_plan_names()}
    chosen = {name: kind for name, kind in known.items() if kind in SHIPPED}
    rows = [_row(name, kind, size) for name, kind in chosen.items()]
    if "llama" in chosen:
        rows.append(_torch_row(size))
    return {"tp": size, "rows": rows, "left_out": sorted(set(known) - set(chosen))}


def _row(name: str, kind: str, size: int) -> dict[str, Any]:
    predicted = {layers: _predicted(name, kind, layers, size) for layers in (FEWER, MORE)}
    counted = {layers: _counted(name, kind, layers, size) for layers in (FEWER, MORE)}
    return {
        "of": "steps",
        "plan": name,
        "by": "tpplan",
        "agrees": predicted == counted,
        "block": {
            "predicted": (predicted[MORE] - predicted[FEWER]).to_dict(),
            "counted": (counted[MORE] - counted[FEWER]).to_dict(),
        },
        "model": {"layers": FEWER, "predicted": predicted[FEWER].to_dict(), "counted": counted[FEWER].to_dict()},
    }


def _torch_row(size: int) -> dict[str, Any]:
    counted: dict[int, Count] = {}
    for layers in (FEWER, MORE):
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        model = parallelize_module(tiny_transformer(SHIPPED["llama"], layers), mesh, torch_plan(layers))
        counted[layers] = count_collectives(model, _call(size))
    return {
        "of": "steps",
        "plan": "llama",
        "by": TORCH,
        "agrees": None,
        "block": {"counted": (counted[MORE] - counted[FEWER]).to_dict()},
        "model": {"layers": FEWER, "counted": counted[FEWER].to_dict()},
    }


def _predicted(name: str, kind: str, layers: int, size: int) -> Count:
    program = compile_plan(tiny_transformer(SHIPPED[kind], layers, "meta"), name, size, _call(size))
    return Count(program.count_collectives(backward=False), program.count_collectives())


def _counted(name: str, kind: str, layers: int, size: int) -> Count:
    mesh: DeviceMesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    call = _call(size)
    return count_collectives(parallelize(tiny_transformer(SHIPPED[kind], layers), name, mesh, call), call)


def _call(size: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(3 * 4 * size).view(3, -1)}


def count_collectives(model: nn.Module, call: Mapping[str, Any]) -> Count:
    """Run a forward and a backward of `model` under torch's own counter."""
    with torch.no_grad():
        model(**call)  # what a first call has tpplan prove is none of the counter's business
    with warnings.catch_warnings(), CommDebugMode() as counter:
        warnings.simplefilter("ignore", UserWarning)  # the counter's own hooks, which modules without a gradient upset
        result = first_tensor(model(**call))
        forward = by_kind(counter.get_comm_counts())
        torch.autograd.backward(result, torch.ones_like(result))
        return Count(forward, by_kind(counter.get_comm_counts()))


def by_kind(counts: Mapping[Any, int]) -> Counter[str]:
    """What was counted by operators, by tpplan's names."""
    counted: Counter[str] = Counter()
    for operator, count in counts.items():
        kind = next((kind for text, kind in _KINDS.items() if text in str(operator)), None)
        counted[str(operator) if kind is None else str(kind)] += count
    return counted
