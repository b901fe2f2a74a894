"""The tutorials run as they say, and learn what the unsharded model learns."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.runtime.torchrun import torchrun
from tests.runtime.world import Member, world
from tpplan.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.processes]

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
DIFFERENCE = 1e-4  # of losses of 2 to 6 nats in float32, over some steps of AdamW


def _check(said: str, folder: Path, name: str) -> None:
    apart = re.search(r"the two losses differ by (\S+) at most", said)
    assert apart is not None and float(apart[1]) < DIFFERENCE, said
    assert (folder / "out" / f"{name}.svg").read_text().startswith("<?xml")


def test_finetune_and_then_lora(tmp_path: Path) -> None:
    _check(torchrun(FOLDER / "finetune.py", 2, "--steps", "8", folder=tmp_path).stdout, tmp_path, "finetune")
    _check(torchrun(FOLDER / "lora.py", 2, "--steps", "4", folder=tmp_path).stdout, tmp_path, "lora")
    assert (tmp_path / "out" / "lora" / "adapter_model.safetensors").is_file()


def test_fsdp_around_tensor_parallelism(tmp_path: Path) -> None:
    _check(torchrun(FOLDER / "fsdp.py", 4, "--steps", "4", folder=tmp_path).stdout, tmp_path, "fsdp")
    assert (tmp_path / "out" / "fsdp" / "model.safetensors").is_file()


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    said = torchrun(FOLDER / "own.py", 2, "--steps", "8", folder=tmp_path).stdout
    _check(said, tmp_path, "own")
    assert "loaded again, the model computes the same" in said
    assert (
        main(["suggest", "--model", f"{FOLDER / 'own.py'}:example", "--tp", "2", "4", "-o", str(tmp_path / "own.yaml")])
        == 0
    )
    assert (tmp_path / "own.yaml").read_text() == (FOLDER / "own.yaml").read_text()


def test_precision_is_that_of_the_unsharded_model(tmp_path: Path) -> None:
    for ranks in ("1", "2"):
        said = torchrun(FOLDER / "precision.py", 2, "--steps", "3", "--ranks", ranks, folder=tmp_path).stdout
        assert re.search(rf"autocast, {ranks} ranks: loss \d\.\d+, \d+ MiB a rank at the peak", said), said


def test_serving_answers_as_the_unsharded_model_does(tmp_path: Path) -> None:
    assert "5 of 5 answers are those of the unsharded model" in torchrun(FOLDER / "serve.py", 2, folder=tmp_path).stdout


def _axes(member: Member, *axes: int) -> tuple[list[float], float, tuple[int, ...]]:
    sys.path.insert(0, str(FOLDER))
    import scale_out  # pyright: ignore[reportMissingImports]

    return scale_out.compared(*axes)


def test_all_axes_of_a_mesh_on_sixteen_processes() -> None:
    ranks = world(16)
    try:
        for errors, again, mesh in ranks.run(_axes, 2, 2, 2, 2):
            assert max(errors[:2]) < 1e-14 and max(errors[2], again) < 1e-10 and mesh == (4, 4)
    finally:
        ranks.close()


def test_a_pipeline_of_sharded_stages(tmp_path: Path) -> None:
    said = torchrun(FOLDER / "scale_out.py", 4, "--pp", "2", "--tp", "2", folder=tmp_path).stdout
    assert len(re.findall(r"differ by \d\.\de-1\d at most|differ by 0\.0e\+00 at most", said)) == 4, said
