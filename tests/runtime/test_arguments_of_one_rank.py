"""An argument of another kind on one rank alone: all raise, and nobody waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import tpplan
from tests.runtime.world import Member, world

pytestmark = pytest.mark.processes
PLAN: dict[str, Any] = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def _sharded(member: Member) -> nn.Module:
    return tpplan.parallelize(Mlp(), PLAN, member.mesh(), torch.zeros(2, 8))


CALLS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "a source": (tpplan.load_weights, {}, {"source": 3}),
    "strict": (tpplan.load_weights, {"source": "nowhere"}, {"strict": "no"}),
    "rename": (tpplan.load_weights, {"source": "nowhere"}, {"rename": 3}),
    "a folder to save to": (tpplan.save_weights, {}, {"folder": None}),
    "a size of files": (tpplan.save_weights, {}, {"file_bytes": "4"}),
    "a model to save": (tpplan.save_weights, {}, {"model": "mine"}),
    "a folder of a model": (tpplan.from_pretrained, {"plan": "llama"}, {"folder": 3}),
    "a dtype": (tpplan.from_pretrained, {"plan": "llama"}, {"dtype": 3}),
    "ranks of a model": (tpplan.from_pretrained, {"plan": "llama"}, {"tp": "2"}),
    "ranks": (tpplan.parallelize, {"plan": PLAN}, {"tp": "2"}),
    "broadcast": (tpplan.parallelize, {"plan": PLAN}, {"broadcast": "no"}),
    "a model": (tpplan.parallelize, {"plan": PLAN}, {"model": Mlp}),
    "a plan": (tpplan.parallelize, {"plan": PLAN}, {"plan": 3}),
    "stages": (tpplan.check_stages, {"plan": PLAN}, {"stages": "mine"}),
}


def _told(member: Member, name: str, folder: str, without_mesh: bool) -> tuple[str, str]:
    function, given, wrong = CALLS[name]
    mesh = {} if without_mesh else {"mesh": member.mesh()}
    given = dict(given)
    if function is tpplan.from_pretrained:
        given |= {"folder": folder} | mesh
    elif function is tpplan.parallelize:
        given |= {"model": Mlp(), "inputs": torch.zeros(2, 8)} | mesh
    elif function is tpplan.check_stages:
        given |= {"stages": Mlp(), "mesh": member.mesh()}
    else:
        given |= {"model": _sharded(member)}
        given.setdefault("folder" if function is tpplan.save_weights else "source", folder)
    try:
        function(**(given | (wrong if member.rank == 1 else {})))
    except tpplan.TpplanError as error:
        return type(error).__name__, str(error)
    except TypeError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("name", CALLS)
def test_all_ranks_raise(name: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    if CALLS[name][0] is tpplan.from_pretrained:
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(tmp_path)
    (kind, text), (own, refusal) = world(2).run(_told, name, str(tmp_path), False, seconds=60)
    (argument,) = CALLS[name][2]
    assert own == "ArgumentError" and f"`{argument}` takes " in refusal
    assert kind in ("CompileError", "CheckpointError", "ArgumentError") and f"`{argument}` takes " in text, text
    assert "rank 1" in text


def test_all_ranks_raise_without_a_mesh(tmp_path: Path) -> None:
    (kind, text), (own, _) = world(2).run(_told, "broadcast", str(tmp_path), True, seconds=60)
    assert (kind, own) == ("CompileError", "ArgumentError") and "rank 1" in text


def _of_two_axes(member: Member, folder: str) -> str:
    mesh = member.mesh(2, 2, names=("dp", "tp"))
    try:
        dtype: Any = 3 if member.rank == 3 else None
        tpplan.from_pretrained(folder, "llama", mesh, dtype)
    except tpplan.TpplanError as error:
        return str(error)
    return ""


def test_all_ranks_of_a_mesh_of_two_axes_raise(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(tmp_path)
    for text in world(4).run(_of_two_axes, str(tmp_path), seconds=60):
        assert "`dtype` takes " in text


def _of_no_plan(member: Member) -> str:
    wrong: dict[str, Any] = {"plan": "nowhere", "broadcast": "no"} if member.rank else {"plan": PLAN}
    try:
        tpplan.parallelize(Mlp(), **wrong, mesh=member.mesh(), inputs=torch.zeros(2, 8))
    except tpplan.TpplanError as error:
        return str(error)
    return ""


def test_all_ranks_raise_where_one_has_no_plan_either() -> None:
    for text in world(2).run(_of_no_plan, seconds=60):
        assert "`broadcast` takes " in text
