"""Collectives of generation: what the programs of a prompt and of a token after it predict, and what is counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tpplan.api import parallelize
from tpplan.bench.causal import CAUSAL
from tpplan.bench.collectives import FEWER, MORE, by_kind
from tpplan.bench.decode import next_calls
from tpplan.bench.rank_processes import RankTraffic
from tpplan.bench.subjects import Architecture, tiny_transformer
from tpplan.compiler.ir.layout import Collective
from tpplan.plan import shipped_plan_names
from tpplan.runtime.modules.module_runtime import RUNTIME

PROMPT, TOKEN = "prompt", "token"
BATCH, LENGTH = 2, 8  # of a prompt, which the ranks can share
_BEFORE = 2  # a call is proved when it first comes, and the other sides of its branches when it comes again


@dataclass(frozen=True, slots=True)
class Sent:
    """The collectives of one call.

    Attributes:
        predicted: by the program that the call ran by.
        counted: as they ran.
        varies: whether parts of the model run for some data only, as experts do, so that fewer may be counted.
    """

    predicted: Counter[str]
    counted: Counter[str]
    varies: bool


def measure(plans: tuple[str, ...] = (), size: int = 2) -> dict[str, Any]:
    """Count the collectives of generation under shipped plans.

    Args:
        plans: their names; those that aren't of a causal model are left out. All if empty.
        size: ranks of the axis.

    Returns:
        Plain data: a row for each plan, with what is predicted and counted for a block and around the blocks.
    """
    known = {name: CAUSAL.get(name.removesuffix("-sequence")) for name in plans or shipped_plan_names()}
    rows = [_row(name, architecture, size) for name, architecture in known.items() if architecture is not None]
    return {"tp": size, "rows": rows}


def _row(name: str, architecture: Architecture, size: int) -> dict[str, Any]:
    fewer, more = (_generation(name, architecture, layers, size) for layers in (FEWER, MORE))
    return {"of": "generation", "plan": name, **{call: _of(fewer[call], more[call]) for call in (PROMPT, TOKEN)}}


def _of(fewer: Sent, more: Sent) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for way in ("predicted", "counted"):
        model, block = getattr(fewer, way), getattr(more, way) - getattr(fewer, way)
        around = model - Counter({kind: FEWER * count for kind, count in block.items()})
        told[way] = {"block": dict(sorted(block.items())), "around": dict(sorted(around.items()))}
    same = fewer.predicted == fewer.counted and more.predicted == more.counted
    return told | {"agrees": None if fewer.varies and not same else same}


def _generation(name: str, architecture: Architecture, layers: int, size: int) -> dict[str, Sent]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    ids = torch.arange(BATCH * LENGTH).view(BATCH, -1)
    model = parallelize(tiny_transformer(architecture, layers), name, mesh, {"input_ids": ids})
    with torch.no_grad():
        for _ in range(_BEFORE):
            first, after = next_calls(model, {"input_ids": ids})
            for call in (first, after(1)):
                model(**call)
        first, after = next_calls(model, {"input_ids": ids})
        return {PROMPT: _sent(model, first), TOKEN: _sent(model, after(1))}


def _sent(model: nn.Module, call: dict[str, Any]) -> Sent:
    with RankTraffic() as counter:  # torch's `CommDebugMode` fails where a module is called twice without gradients
        model(**call)
    program = vars(model)[RUNTIME].guard.program
    return Sent(program.count_collectives(backward=False), by_kind(counter.counted), bool(program.picked))


def is_least(row: dict[str, Any]) -> bool:
    """Whether a token takes at most two all-reduces a block, and around the blocks a table's and the head's gather."""
    token = row[TOKEN]["counted"]
    block, around = Counter[str](token["block"]), Counter[str](token["around"])
    sums, gathers = str(Collective.ALL_REDUCE), str(Collective.ALL_GATHER)
    return block <= Counter({sums: 2}) and around <= Counter({sums: 1, gathers: 1})


__all__ = ["PROMPT", "TOKEN", "Sent", "is_least", "measure"]
