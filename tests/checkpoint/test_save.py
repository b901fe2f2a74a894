"""What a saved folder holds: the stock model's tensors, bit for bit, whatever the layout, the mesh and the dtype."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.checkpoint.cells import Bench
from tests.checkpoint.subjects import subject
from tests.marking import in_thirds
from tests.runtime.world import Member, world
from tpplan import CheckpointError, save_weights
from tpplan.checkpoint import stream
from tpplan.checkpoint.blocks import blocks
from tpplan.checkpoint.commit import Stage
from tpplan.checkpoint.stored_tensors import CODES


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, by safetensors' own reader."""
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    found: dict[str, torch.Tensor] = {}
    for name in sorted(names):
        tensors = load_file(folder / name)
        assert not set(tensors) & set(found)
        found |= tensors
    return found


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return (
        ours.dtype == theirs.dtype
        and ours.shape == theirs.shape
        and torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).contiguous().view(torch.uint8))
    )


def assert_holds(folder: Path, stock: nn.Module) -> None:
    found = read(folder)
    state = stock.state_dict(keep_vars=True)
    for name, tensor in state.items():
        others = [other for other, held in state.items() if held is tensor]
        assert [other for other in others if other in found] == others[:1], name
        assert same_bits(found[others[0]], tensor.detach()), name
    assert set(found) <= set(state)


def _saves(member: Member, name: str, shape: Any, folder: str, round_bytes: int, file_bytes: int) -> int:
    bench = Bench(member, name, shape, Path(folder))
    model = bench.sharded()
    sent = Counter[str]()
    whole = DTensor.full_tensor
    with (
        mock.patch.object(stream, "ROUND_BYTES", round_bytes),
        mock.patch.object(DTensor, "full_tensor", lambda *a, **k: sent.update(["whole"]) or whole(*a, **k)),
    ):
        save_weights(model, folder, file_bytes=file_bytes)
    return sent["whole"]


@pytest.mark.one_in(5)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "shape"),
    in_thirds(
        [("packs", (2,)), ("tied", (2,)), ("uneven", (4,)), ("heads", (4,))],
        [("groups", (2, 2))],
        [("packs", (2,)), ("uneven", (2,)), ("tied", (2,)), ("phi3", (2,)), ("uneven", (4,)), ("shared in packs", (4,)),
         ("heads in packs", (2, 2)),
         ("groups", (2, 2)), ("uneven", (2, 2)), ("gpt2", (2, 2)), ("tied", (2, 2))],
    ),
    ids=str,
)  # fmt: skip
def test_every_layout_is_saved_as_the_stock_model_has_it(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    for number, (round_bytes, file_bytes) in enumerate([(1 << 26, 1 << 30), (1 << 10, 1 << 10), (64, 3000)]):
        folder = tmp_path / str(number)
        size = math.prod(shape)
        gathered = world(size).run(_saves, name, shape, str(folder), round_bytes, file_bytes)
        assert gathered == [0] * size  # no rank has had a whole tensor
        assert_holds(folder, subject(name).model)


class Every(nn.Module):
    """A buffer of every dtype that safetensors has a name for, of odd sizes, empty ones and scalars among them."""

    def __init__(self) -> None:
        super().__init__()
        for number, dtype in enumerate(CODES):
            for size in (0, 1, 5):
                numbers = (torch.arange(size * dtype.itemsize) + number).to(torch.uint8)
                numbers = numbers % 2 if dtype is torch.bool else numbers
                self.register_buffer(f"{str(dtype).split('.')[1]}_{size}", numbers.view(dtype).view(size))
        self.register_buffer("scalar", torch.tensor(2.5))
        self.register_buffer("turned", torch.rand(3, 4).t())
        self.register_buffer("conjugate", torch.view_as_complex(torch.rand(3, 2)).conj())


def test_every_dtype_is_written_as_safetensors_would(tmp_path: Path) -> None:
    model = Every()
    save_weights(model, tmp_path)
    save_file({n: t.contiguous().resolve_conj() for n, t in model.state_dict().items()}, tmp_path / "theirs")
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "theirs")
    assert set(ours) == set(theirs)
    for name in theirs:
        assert same_bits(ours[name], theirs[name]), name


def test_numbers_lie_at_multiples_of_their_width(tmp_path: Path) -> None:
    save_weights(Every(), tmp_path)
    raw = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    widths = {code: dtype.itemsize for dtype, code in CODES.items()}
    assert all((8 + length + held["data_offsets"][0]) % widths[held["dtype"]] == 0 for held in header.values())


@pytest.mark.parametrize("shape", [(), (7,), (0, 3), (3, 5, 4), (1, 9), (2, 0)])
@pytest.mark.parametrize("limit", [1, 3, 4, 8, 1000])
def test_blocks_follow_each_other_over_the_whole_tensor(shape: tuple[int, ...], limit: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    found = [block.of(whole).reshape(-1) for block in blocks(shape, limit)]
    assert all(0 < len(held) <= limit for held in found)
    assert torch.equal(torch.cat([*found, whole.new_empty(0)]), whole.reshape(-1))


def _foreign(member: Member, folder: str) -> None:
    """DTensors that tpplan didn't make."""
    mesh = member.mesh(2, 2, names=("dp", "tp"))
    model = nn.Module()
    for number, placements in enumerate([(Shard(0), Shard(0)), (Shard(1), Shard(0)), (Replicate(), Shard(1))]):
        whole = torch.arange(7.0 * 6).view(7, 6) + number
        placed = dist.tensor.distribute_tensor(whole, mesh, placements)  # pyright: ignore
        model.register_parameter(f"p{number}", nn.Parameter(placed))
    save_weights(model, folder)


@pytest.mark.processes
def test_foreign_dtensors_are_saved_whole(tmp_path: Path) -> None:
    world(4).run(_foreign, str(tmp_path))
    found = read(tmp_path)
    for number in range(3):
        assert torch.equal(found[f"p{number}"], torch.arange(42.0).view(7, 6) + number)


def _writes(member: Member, folder: str, seen: bool) -> list[str]:
    model = Bench(member, "packs", (2,), Path(folder)).sharded()
    own = folder if seen or member.rank == 0 else f"{folder}-{member.rank}"
    opened: list[str] = []
    opens = os.open

    def note(path: str, flags: int, *rest: int, **folder: int) -> int:
        if flags & os.O_WRONLY and str(path).endswith(".safetensors"):
            opened.append(Path(path).name)
        return opens(path, flags, *rest, **folder)

    with mock.patch.object(os, "open", note):
        save_weights(model, own, file_bytes=1000)
    return opened


@pytest.mark.processes
@pytest.mark.parametrize("shared", [True, False])
def test_ranks_write_different_files_of_a_folder_that_they_share(shared: bool, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    first, second = world(2).run(_writes, str(folder), shared)
    names = {path.name for path in folder.glob("*.safetensors")}
    assert len(names) > 2 and set(first) | set(second) == names and not set(first) & set(second)
    assert bool(second) == shared
    assert not (tmp_path / "folder-1").exists()
    assert_holds(folder, subject("packs").model)


def _copies(member: Member, folder: str) -> None:
    """Two groups of tensor parallelism side by side, each with the model."""
    mesh = member.mesh(2, 2, names=("dp", "tp"))["tp"]
    bench = Bench(member, "packs", (2, 2), Path(folder))
    bench.mesh, bench.two_dim = mesh, False
    save_weights(bench.sharded(), folder, file_bytes=1000)


@pytest.mark.processes
def test_copies_of_a_model_side_by_side_write_it_once(tmp_path: Path) -> None:
    world(4).run(_copies, str(tmp_path))
    assert_holds(tmp_path, subject("packs").model)


def test_a_part_of_a_model_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

    with pytest.raises(CheckpointError, match=r"TP121.*`0._extra_state` is no tensor but a dict"):
        save_weights(nn.Sequential(Extra(2, 2)), tmp_path)


@pytest.mark.parametrize("bad", [torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse()], ids=str)
def test_what_safetensors_has_no_word_for_is_refused(bad: torch.Tensor, tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("bad", bad)
    with pytest.raises(CheckpointError, match=r"`bad` is .* which safetensors has no word for"):
        save_weights(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_stage_knows_its_files() -> None:
    stage = Stage(Path("a"), "t", ("model-00001-of-00002.safetensors",))
    assert stage.staged("model.safetensors").parent.name == "new"
