"""What fails on one rank while a checkpoint is loaded fails on all, and no rank has changed its model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import tpplan
from tests.checkpoint.subjects import Packs, subject
from tests.runtime.world import Member, WorldError, world
from tpplan.checkpoint.files import SINGLE
from tpplan.compat.dtensors import local_of
from tpplan.plan import PlanError

pytestmark = pytest.mark.processes


def _model(member: Member, meta: bool) -> nn.Module:
    with torch.device("meta" if meta else "cpu"):
        model = Packs()
    two = member.size == 4
    mesh = member.mesh(2, 2, names=("dp", "tp")) if two else member.mesh()
    tpplan.parallelize(model, subject("packs").plan, mesh, inputs=(torch.zeros(2, 8),))
    if two:
        fully_shard(model, mesh=mesh["dp"])
    return model


def _tries(member: Member, folder: str, faults: dict[int, str], meta: bool) -> str:
    """Load, with a fault on some ranks; what is said, with the model as it was."""
    model = _model(member, meta)
    before = {name: local_of(t).clone() for name, t in model.state_dict().items()}
    fault = faults.get(member.rank, "")
    source = f"{folder}/{fault}" if fault in ("nowhere", "other") else folder
    rename = {"^down": "down"} if fault == "rename" else None
    stock = os.preadv
    if fault == "breaks":
        os.preadv = lambda *_: 0  # pyright: ignore
    try:
        tpplan.load_weights(model, source, rename=rename)
    except PlanError as error:
        for name, tensor in model.state_dict().items():
            local = local_of(tensor)
            assert local.is_meta == before[name].is_meta, name
            assert meta or "breaks" in faults.values() or torch.equal(local, before[name]), name
        return str(error)
    finally:
        os.preadv = stock
    return ""


def _checkpoint(folder: Path, seed: int = 3) -> str:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    save_file(Packs().state_dict(), folder / SINGLE)
    return str(folder)


@pytest.mark.parametrize("meta", [True, False])
def test_a_folder_that_one_rank_has_not(tmp_path: Path, meta: bool) -> None:
    ours, theirs = world(2).run(_tries, _checkpoint(tmp_path), {1: "nowhere"}, meta)
    assert ours == theirs
    assert "TP121" in ours and f"there is no checkpoint at `{tmp_path}/nowhere`" in ours and "on rank 1 of 2" in ours


def test_a_fault_of_all_ranks_is_said_once(tmp_path: Path) -> None:
    ours, theirs = world(2).run(_tries, str(tmp_path / "nowhere"), {}, True)
    assert ours == theirs and ours.count("TP121") == 1 and "on rank" not in ours


def test_other_numbers_under_the_same_header(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "other", 4)
    ours, theirs = world(2).run(_tries, _checkpoint(tmp_path), {1: "other"}, False)
    assert ours == theirs
    assert "rank 0 and rank 1 would load different checkpoints" in ours and f"rank 1 reads `{tmp_path}/other`" in ours


def test_the_same_checkpoint_in_two_places(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "other")
    assert world(2).run(_tries, _checkpoint(tmp_path), {1: "other"}, True) == ["", ""]


def test_a_file_that_breaks_on_one_rank_while_it_is_read(tmp_path: Path) -> None:
    ours, theirs = world(2).run(_tries, _checkpoint(tmp_path), {0: "breaks"}, True)
    assert ours == theirs and "become shorter" in ours and "on rank 0 of 2" in ours
    assert "in part" not in ours
    ours, theirs = world(2).run(_tries, _checkpoint(tmp_path), {0: "breaks"}, False)
    assert ours == theirs and "become shorter" in ours and "loaded in part" in ours


def test_patterns_that_one_rank_has_are_no_matter_if_they_change_nothing(tmp_path: Path) -> None:
    assert world(2).run(_tries, _checkpoint(tmp_path), {1: "rename"}, True) == ["", ""]


def _holds_all(member: Member, folder: str) -> bool:
    model = _model(member, False)
    torch.manual_seed(member.rank)
    torch.nn.init.uniform_(model.get_parameter("up.bias"))
    tpplan.load_weights(model, folder)
    torch.manual_seed(3)
    state = model.state_dict()
    return all(torch.equal(state[name].full_tensor(), tensor) for name, tensor in Packs().named_parameters())


def test_on_a_mesh_of_two_axes(tmp_path: Path) -> None:
    assert world(4).run(_holds_all, _checkpoint(tmp_path)) == [True] * 4
    said = world(4).run(_tries, str(tmp_path), {3: "nowhere"}, False)
    assert len(set(said)) == 1 and "on rank 3 of 4" in said[0]


def _warned(member: Member, folder: str) -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tpplan.load_weights(_model(member, True), folder)
    return [str(one.message) for one in caught if "TP121" in str(one.message)]


def test_the_first_rank_warns_for_all(tmp_path: Path) -> None:
    torch.manual_seed(3)
    state: dict[str, Any] = Packs().state_dict()
    state["down.weight"][0, -1] = torch.nan  # the second rank's
    save_file(state | {"head": torch.zeros(1)}, tmp_path / SINGLE)
    ours, theirs = world(2).run(_warned, str(tmp_path))
    assert not theirs and len(ours) == 2
    assert any("infinite: `down.weight`" in text and "on rank 1 of 2" in text for text in ours)
    assert any("`head`" in text and "on rank" not in text for text in ours)


def _bug(member: Member, folder: str) -> str:
    model = _model(member, True)
    try:
        tpplan.load_weights(model, folder, rename={3: ""} if member.rank else None)  # pyright: ignore
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return ""


def test_an_error_of_another_kind_does_not_let_the_others_wait(tmp_path: Path) -> None:
    ours, theirs = world(2).run(_bug, _checkpoint(tmp_path))
    assert theirs.startswith("ArgumentError") and "`rename` takes" in theirs
    assert ours.startswith("CheckpointError TP121") and "loading failed with ArgumentError" in ours and "rank 1" in ours


def _dies(member: Member, folder: str) -> None:
    model = _model(member, True)
    if member.rank:
        os.preadv = lambda *_: os._exit(1)  # pyright: ignore
    try:
        tpplan.load_weights(model, folder)
    finally:
        assert all(local_of(tensor).is_meta for tensor in model.state_dict().values())


def test_a_rank_that_is_killed_while_it_reads(tmp_path: Path) -> None:
    held = world(2)
    try:
        with pytest.raises(WorldError) as caught:
            held.run(_dies, _checkpoint(tmp_path))
    finally:
        held.close()
    text = str(caught.value)
    assert "rank 1:\nthe process died" in text and "TP121" in text and "a rank was lost" in text
