"""What can go wrong while saving: one TP121 with the same words on every rank, and what was there before stays."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.checkpoint.cells import Bench
from tests.checkpoint.subjects import subject
from tests.checkpoint.test_save import assert_holds
from tests.runtime.world import Member, WorldError, world
from tpplan import CheckpointError, save_weights
from tpplan.checkpoint import blocks, stream

pytestmark = pytest.mark.processes


class NoSpace:
    """`os.write` on a disk on which there is room for some calls."""

    def __init__(self, calls: int) -> None:
        self.left, self.write = calls, os.write

    def __call__(self, *arguments: Any) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.write(*arguments)


def _no_memory(*_: Any) -> torch.Tensor:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")


def _failing(member: Member, folder: str, rank: int, calls: int | None) -> str:
    model = Bench(member, "packs", (2,), Path(folder)).sharded()
    patch: Any = mock.patch.object(os, "write", NoSpace(calls or 0))
    if calls is None:
        patch = mock.patch.object(blocks, "narrowed", _no_memory)
    if member.rank == rank:
        patch.start()
    try:
        with mock.patch.object(stream, "ROUND_BYTES", 256):
            save_weights(model, folder, file_bytes=500)
    except CheckpointError as error:
        return str(error)
    finally:
        if member.rank == rank:
            patch.stop()
    return "saved"


@pytest.mark.one_in(5)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("calls", "words"),
    [(0, "No space left on device"), (9, "No space left on device"), (None, "can't allocate memory")],
    ids=["disk full", "disk full later", "an error"],
)
def test_what_fails_on_one_rank_fails_on_all(rank: int, calls: int | None, words: str, tmp_path: Path) -> None:
    stock = subject("packs", 1).model
    save_weights(stock, tmp_path, file_bytes=300)
    before = sorted(tmp_path.iterdir())
    texts = world(2).run(_failing, str(tmp_path), rank, calls)
    assert texts[0] == texts[1]
    assert texts[0].count("TP121") == 1 and words in texts[0] and f"on rank {rank} of 2" in texts[0]
    assert_holds(tmp_path, stock)
    assert sorted(tmp_path.iterdir()) == before


def _dying(member: Member, folder: str) -> None:
    model = Bench(member, "packs", (2,), Path(folder)).sharded()
    patch = mock.patch.object(os, "write", lambda *_: os._exit(9))
    if member.rank == 1:
        patch.start()
    try:
        save_weights(model, folder, file_bytes=500)
    except CheckpointError as error:
        Path(folder, f"outcome-{member.rank}").write_text(str(error))


def test_a_rank_that_dies_is_a_finding_on_the_other(tmp_path: Path) -> None:
    stock = subject("packs", 1).model
    save_weights(stock, tmp_path, file_bytes=300)
    with pytest.raises(WorldError, match="rank 1:\nthe process died"):
        world(2).run(_dying, str(tmp_path))
    text = (tmp_path / "outcome-0").read_text()
    assert "TP121" in text and "another rank has ended" in text
    assert_holds(tmp_path, stock)


def _different(member: Member, folder: str) -> str:
    try:
        save_weights(nn.Linear(2, 2 + member.rank), folder)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_ranks_with_different_models_write_nothing(tmp_path: Path) -> None:
    texts = world(2).run(_different, str(tmp_path / "new"))
    assert texts[0] == texts[1] and "rank 0 and rank 1 save different models" in texts[0]
    assert not (tmp_path / "new").exists()


def _on_meta(member: Member, folder: str) -> str:
    model = nn.Linear(2, 2, device="meta" if member.rank else "cpu")
    try:
        save_weights(model, folder)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_model_without_numbers_on_one_rank_is_a_finding_on_all(tmp_path: Path) -> None:
    texts = world(2).run(_on_meta, str(tmp_path / "new"))
    assert texts[0] == texts[1] and "`weight` and 1 more have no numbers yet" in texts[0]
    assert not (tmp_path / "new").exists()


def test_a_file_in_the_place_of_the_folder_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(CheckpointError, match=r"TP121.*can't be saved(.|\n)*name a folder"):
            save_weights(nn.Linear(2, 2), folder)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_can_not_be_written_is_a_finding(tmp_path: Path) -> None:
    with (
        mock.patch.object(os, "mkdir", side_effect=PermissionError(errno.EACCES, "Permission denied")),
        pytest.raises(CheckpointError, match=r"TP121.*Permission denied(.|\n)*may write to"),
    ):
        save_weights(nn.Linear(2, 2), tmp_path / "new")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_nan_is_saved_with_a_warning(dtype: torch.dtype, tmp_path: Path) -> None:
    model = nn.Module()
    numbers = torch.ones(4)
    numbers[2] = torch.nan
    model.register_buffer("bad", numbers.to(dtype))
    model.register_buffer("good", torch.ones(4))
    model.register_buffer("infinite", torch.tensor([torch.inf, -torch.inf]))
    with pytest.warns(UserWarning, match="^`bad` had NaN in"):
        save_weights(model, tmp_path)
    assert load_file(tmp_path / "model.safetensors")["bad"].to(torch.complex64).isnan().tolist() == [0, 0, 1, 0]


def test_a_size_of_files_that_makes_no_sense_is_a_finding(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a file can't have 0 bytes"):
        save_weights(nn.Linear(2, 2), tmp_path, file_bytes=0)
