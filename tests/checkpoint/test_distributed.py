"""Folders of torch.distributed.checkpoint are loaded as safetensors are, and nothing in them is run."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

import tpplan
from tests.checkpoint.subjects import Packs
from tests.checkpoint.test_load import PLAN as WIDE_PLAN
from tests.checkpoint.test_load import Wide
from tests.checkpoint.test_round_trip import PLAN
from tests.marking import slow_but
from tests.runtime.world import Member, world
from tpplan import load_weights
from tpplan.checkpoint.assembled import assembled, reads
from tpplan.checkpoint.files import CheckpointError
from tpplan.checkpoint.loading import load
from tpplan.checkpoint.meter import Meter
from tpplan.checkpoint.reading import Files
from tpplan.checkpoint.sketch import Sketch
from tpplan.checkpoint.stored import read_checkpoint
from tpplan.compat.dtensors import local_of
from tpplan.runtime.parameters.pieces import Box

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage is deprecated")
METADATA, DATA = ".metadata", "__0_0.distcp"


def stock(more: int) -> Packs:
    torch.manual_seed(5)
    return Packs(more)


def parallel(member: Member, more: int, meta: bool, shape: tuple[int, ...] = ()) -> nn.Module:
    with torch.device("meta" if meta else "cpu"):
        model = Packs(more)
    mesh = member.mesh(*shape, names=("dp", "tp"))["tp"] if shape else member.mesh()
    return tpplan.parallelize(model, PLAN, mesh, inputs=(torch.zeros(2, 8),))


def _saved(member: Member, folder: str, more: int) -> None:
    model = parallel(member, more, meta=False)
    model.load_state_dict(stock(more).state_dict())
    save(model.state_dict(), checkpoint_id=folder)


def _loaded(member: Member, folder: str, more: int, shape: tuple[int, ...]) -> None:
    model = parallel(member, more, meta=True, shape=shape)
    load_weights(model, folder)
    for name, tensor in stock(more).state_dict().items():
        ours: Any = model.state_dict()[name]
        assert torch.equal(ours.full_tensor() if hasattr(ours, "full_tensor") else ours, tensor), name


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("more", slow_but([1], [0, 1]))
def test_what_one_degree_has_saved_another_loads(tmp_path: Path, more: int) -> None:
    world(2).run(_saved, str(tmp_path), more)
    world(2).run(_loaded, str(tmp_path), more, ())
    world(4).run(_loaded, str(tmp_path), more, ())
    world(4).run(_loaded, str(tmp_path), more, (2, 2))
    one = load_weights(Packs(more), tmp_path)  # a stock model, without processes
    assert all(torch.equal(tensor, one.state_dict()[name]) for name, tensor in stock(more).state_dict().items())


def _shares(member: Member, folder: str) -> tuple[int, int]:
    with torch.device("meta"):
        model = Wide(1)
    tpplan.parallelize(model, WIDE_PLAN, member.mesh(), inputs=(torch.zeros(2, 96),))
    model.to_empty(device="cpu")
    state = model.state_dict()
    save(state, checkpoint_id=folder)
    return load(model, folder).bytes_read, sum(local_of(p).nbytes for p in model.parameters())


@pytest.mark.processes
def test_of_the_same_degree_a_rank_reads_its_share(tmp_path: Path) -> None:
    for read, share in world(2).run(_shares, str(tmp_path)):
        assert share < read < share + 40_000  # the table, and a header of torch.save for each chunk


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save({"model": stock(0).state_dict(), "step": 3}, checkpoint_id=tmp_path / "ck", no_dist=True)
    return tmp_path / "ck"


def test_names_with_a_prefix_are_renamed_and_the_way_is_told(folder: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        load_weights(Packs(), folder)
    hint = next(n for n in raised.value.diagnostics[0].notes if "rename=" in n)
    assert r"""rename={"^model\\.": ""}""" in hint, hint
    model = load_weights(Packs(), folder, rename={r"^model\.": ""})
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in stock(0).state_dict().items())


def test_numbers_are_cast_and_lie_as_the_model_has_them(tmp_path: Path) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6, 4))

    numbers = torch.randn(4, 6).t()
    save({"weight": numbers}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(load_weights(Turned().bfloat16(), tmp_path).weight, numbers.bfloat16())  # pyright: ignore
    shutil.rmtree(tmp_path)
    save({"weight": torch.ones(6, 4, dtype=torch.int8)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match="quantised"):
        load_weights(Turned(), tmp_path)


def test_tensors_that_the_model_stacks_are_read_in_pieces(tmp_path: Path) -> None:
    whole = {f"expert{number}": torch.rand(4, 6) for number in range(3)}
    save(whole, checkpoint_id=tmp_path, no_dist=True)
    tensors = read_checkpoint(tmp_path).tensors
    sketch: Any = torch.stack([Sketch.of(tensors[name]) for name in whole], 1)  # pyright: ignore
    part = torch.zeros(2, 2, 6)
    with Files(Meter()) as files:
        boxes = (Box((1, 1, 0), (0, 0, 0), (2, 2, 6), True),)
        assert files.fill_by(part, reads(assembled("all", sketch.shape, sketch.pieces), boxes))
    assert torch.equal(part, torch.stack([*whole.values()], 1)[1:3, 1:])


class Runs:
    """A pickle that runs a command when it is read."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, ("touch ran",)


def _cut(folder: Path) -> None:
    data = (folder / DATA).read_bytes()
    (folder / DATA).write_bytes(data[:-100])


def _changed(folder: Path, change: Callable[[Any], object]) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def _outside(metadata: Any) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = f"../ck/{place.relative_path}"


def _in_two(metadata: Any, offset: int, sizes: tuple[int, int]) -> None:
    """Say of a matrix that it is in two chunks of `sizes` rows, the second one from row `offset`."""
    name, held = next((n, h) for n, h in metadata.state_dict_metadata.items() if len(getattr(h, "size", ())) == 2)
    columns = held.size[1]
    held.chunks = [
        ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((sizes[0], columns))),
        ChunkStorageMetadata(torch.Size((offset, 0)), torch.Size((sizes[1], columns))),
    ]
    place = metadata.storage_data.pop(MetadataIndex(name, torch.Size((0, 0))))
    for chunk in held.chunks:
        metadata.storage_data[MetadataIndex(name, chunk.offsets)] = place


def _rows(metadata: Any) -> int:
    return next(h.size[0] for h in metadata.state_dict_metadata.values() if len(getattr(h, "size", ())) == 2)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (_cut, "it was cut off"),
    "empty": (lambda folder: (folder / DATA).write_bytes(b""), "has 0 bytes, and should have"),
    "missing": (lambda folder: (folder / DATA).unlink(), f"`{DATA}` can't be read: No such file"),
    "runs something": (lambda folder: (folder / METADATA).write_bytes(pickle.dumps(Runs())), "posix.system"),
    "no pickle": (lambda folder: (folder / METADATA).write_bytes(b"{}"), "can't be read"),
    "another pickle": (lambda folder: (folder / METADATA).write_bytes(pickle.dumps([1])), "holds something else"),
    "outside": (lambda folder: _changed(folder, _outside), "isn't in the folder"),
    "a chunk less": (lambda folder: _changed(folder, lambda m: m.storage_data.popitem()), "isn't there as a whole"),
    "chunks that overlap": (
        lambda folder: _changed(folder, lambda m: _in_two(m, 1, (2, _rows(m) - 2))),
        "has chunks that overlap",
    ),
    "a chunk outside": (
        lambda folder: _changed(folder, lambda m: _in_two(m, 3, (2, _rows(m) - 2))),
        "aren't within its shape",
    ),
    "other bytes": (lambda folder: (folder / DATA).write_bytes(b"x" * (folder / DATA).stat().st_size), "can't be read"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_and_the_model_stays(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    spoil, expected = FAULTS[name]
    spoil(folder)
    model = Packs()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as raised:
        load_weights(model, folder, rename={r"^model\.": ""})
    assert expected in str(raised.value) and "TP121" in str(raised.value)
    assert not (folder.parent / "ran").exists()
    if name != "other bytes":  # seen only when numbers are read
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
