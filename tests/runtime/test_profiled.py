"""In a profiler's trace each collective has a name: which it is, and whose boundary it serves."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import tpplan
from tpplan.compat.process_groups import fake_process_group
from tpplan.runtime.ranks.profiled import told_place


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def named(rules: dict[str, str], gradients: bool = True) -> Counter[str]:
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 4, 8, requires_grad=True)
    with fake_process_group(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        tpplan.parallelize(model, {"version": 1, "modules": rules}, mesh, x)
        for _ in range(2):  # the second call is one like any other
            model(x).sum().backward()
        with profile(activities=[ProfilerActivity.CPU]) as profiled, torch.set_grad_enabled(gradients):
            result = model(x)
            if gradients:
                result.sum().backward()
    assert told_place() == ""
    events = profiled.key_averages()
    return Counter({e.key.removeprefix("tpplan "): e.count for e in events if e.key.startswith("tpplan ")})


def test_layers() -> None:
    rules = {"*.up": "colwise", "*.down": "rowwise"}
    forward = {f"all-reduce: the result of `{n}.down`": 1 for n in range(2)}
    assert named(rules) == forward | {f"all-reduce, backward: the argument `input` of `{n}.up`": 1 for n in range(2)}
    assert named(rules, gradients=False) == forward


def test_sequences_and_sums_of_gradients() -> None:
    found = named({"*.norm": "sequence", "*.up": "colwise", "*.down": "rowwise"})
    assert found["all-gather: the argument `input` of `1.up`"] == 1
    assert found["reduce-scatter, backward: the argument `input` of `1.up`"] == 1
    assert found["all-reduce, backward: the gradients of replicated parameters"] == 1
    assert sum(found.values()) == 9
