"""A checkpoint of the stock model goes into a parallelized one, and comes back as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

import tpplan
from tests.runtime.world import Member, world
from tpplan import load_weights, save_weights
from tpplan.checkpoint.files import CheckpointError

PLAN = """
version: 1
modules:
  up: colwise
  down: rowwise
  pair: {style: colwise, packed: [wide, narrow]}
  "{wide,narrow}_out": rowwise
  even: {style: colwise, packed: [one, other]}
  even_out: rowwise
"""


class Block(nn.Module):
    """With `more` than an even number of features in every pack, two or four ranks can't share them evenly."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16 + more)
        self.down = nn.Linear(16 + more, 8)
        self.wide, self.narrow = 8 + more, 4 + more
        self.pair = nn.Linear(8, self.wide + self.narrow)
        self.wide_out, self.narrow_out = nn.Linear(self.wide, 8), nn.Linear(self.narrow, 8)
        self.even, self.even_out = nn.Linear(8, 8 + 2 * more), nn.Linear(4 + more, 8)
        self.register_buffer("scale", torch.rand(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide, narrow = self.pair(x).split([self.wide, self.narrow], -1)
        one, other = self.even(x).chunk(2, -1)
        packed = self.wide_out(wide) + self.narrow_out(narrow) + self.even_out(one * other)
        return (self.down(torch.relu(self.up(x))) + packed) * self.scale


def _round_trip(member: Member, folder: str, meta: bool, more: int) -> None:
    rank, size, mesh = member.rank, member.size, member.mesh()
    torch.manual_seed(rank)
    with torch.device("meta" if meta else "cpu"):
        model = Block(more)
    tpplan.parallelize(model, PLAN, mesh, inputs=(torch.zeros(2, 8),))
    load_weights(model, f"{folder}/in")
    stock = Block(more)
    stock.load_state_dict(load_file(f"{folder}/in/model.safetensors"))
    x = torch.ones(2, 8)
    torch.testing.assert_close(model(x), stock(x))
    assert isinstance(model.up.weight, DTensor)
    assert model.up.weight.to_local().shape == stock.up.weight.chunk(size)[rank].shape
    save_weights(model, f"{folder}/out", file_bytes=256)
    again = tpplan.parallelize(Block(more), PLAN, mesh, inputs=(torch.zeros(2, 8),))
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(x), stock(x))


@pytest.mark.one_in(3)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "meta", "more"),
    [(2, False, 0), (2, True, 0), (2, True, 1), (4, False, 1)],
    ids=["materialised", "meta", "uneven", "uneven on four"],
)
def test_a_sharded_model_loads_and_saves_the_stock_checkpoint(tmp_path: Path, size: int, meta: bool, more: int) -> None:
    torch.manual_seed(3)
    stock = Block(more).state_dict()
    (tmp_path / "in").mkdir()
    save_file(stock, tmp_path / "in" / "model.safetensors")
    world(size).run(_round_trip, str(tmp_path), meta, more)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(stock)
    assert len(set(index["weight_map"].values())) > 1
    read = Block(more)
    load_weights(read, tmp_path / "out")
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, stock[name]), name


def test_every_name_that_does_not_fit_is_reported_and_nothing_is_loaded(tmp_path: Path) -> None:
    model = Block()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    held = {f"bert.{name}": tensor for name, tensor in model.state_dict().items()}
    held["up.weight"] = torch.zeros(3, 8)
    held["down.bias"] = torch.zeros(8)
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, tmp_path)
    text = str(caught.value)
    assert "TP121" in text and "`up.weight` has shape [3, 8] there and [16, 8]" in text
    assert "`up.bias` is not in the checkpoint" in text and "the checkpoint has `bert.down.bias`" in text
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("content", [None, b"no safetensors"])
def test_a_missing_or_broken_file_is_a_finding(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="TP121"):
        load_weights(Block(), tmp_path)


def test_tied_parameters_are_saved_once_and_loaded_into_both(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        return model

    model = tied()
    save_weights(model, tmp_path)
    assert list(load_file(tmp_path / "model.safetensors")) == ["0.weight"]
    other = tied()
    load_weights(other, tmp_path)
    assert other[1].weight is other[0].weight
    assert torch.equal(other.state_dict()["0.weight"], model.state_dict()["0.weight"])
