"""A run that is saved by torch.distributed.checkpoint goes on as the unsharded one, with parameters as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from tests.runtime.owner import train
from tests.runtime.test_owner import TOLERANCE, difference, sharded
from tests.runtime.world import Member, world
from tpplan.runtime.parameters.sharded_tensors import ShardedTensor

pytestmark = pytest.mark.processes


def geometry(model: nn.Module, optimizer: Any) -> list[Any]:
    """What DTensors tell of themselves."""
    found: list[Any] = []
    for parameter in model.parameters():
        for held in (parameter, optimizer.state[parameter]["exp_avg"]):
            assert isinstance(held, DTensor) and isinstance(held, ShardedTensor)
            assert held.full_tensor().shape == parameter.shape
            found.append((held.placements, held.to_local().shape))
    return found


def goes_on(member: Member, name: str, replicas: int, folder: str) -> float:
    stock, model = sharded(member, name, replicas)
    theirs, ours = (torch.optim.AdamW(held.parameters(), lr=0.01) for held in (stock, model))
    train(stock, theirs)
    train(model, ours)
    before = geometry(model, ours)
    kept = get_state_dict(model, ours)
    save({"model": kept[0], "optimizer": kept[1]}, checkpoint_id=folder)

    _, other = sharded(member, name, replicas)
    again = torch.optim.AdamW(other.parameters(), lr=0.01)
    held: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(other, again), strict=True))
    load(held, checkpoint_id=folder)
    set_state_dict(other, again, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
    assert geometry(other, again) == before
    train(stock, theirs)
    train(other, again)
    full = get_model_state_dict(other, options=StateDictOptions(full_state_dict=True))
    assert not any(isinstance(tensor, DTensor) for tensor in full.values())
    wholes = [difference(full[key], tensor) for key, tensor in stock.state_dict().items()]
    return max(*wholes, difference([*other.parameters()], [*stock.parameters()]))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "size", "replicas"), [("uneven", 2, 1), ("packed", 4, 2)])
def test_a_saved_run_goes_on(name: str, size: int, replicas: int, tmp_path: Path) -> None:
    assert max(world(size).run(goes_on, name, replicas, str(tmp_path))) < TOLERANCE
