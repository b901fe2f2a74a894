"""The tutorials run as they say, and learn what the unsharded model learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.processes]

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
DIFFERENCE = 1e-4  # of losses of 2 to 6 nats in float32, over some steps of AdamW


def _run(script: str, processes: int, folder: Path, *options: str) -> str:
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), str(FOLDER / script)]
    ran = subprocess.run(
        [sys.executable, "-m", *command, *options], cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def _check(said: str, folder: Path, name: str) -> None:
    apart = re.search(r"the two losses differ by (\S+) at most", said)
    assert apart is not None and float(apart[1]) < DIFFERENCE, said
    assert (folder / "out" / f"{name}.svg").read_text().startswith("<?xml")


def test_finetune_and_then_lora(tmp_path: Path) -> None:
    _check(_run("finetune.py", 2, tmp_path, "--steps", "16"), tmp_path, "finetune")
    _check(_run("lora.py", 2, tmp_path, "--steps", "8"), tmp_path, "lora")
    assert (tmp_path / "out" / "lora" / "adapter_model.safetensors").is_file()


def test_fsdp_around_tensor_parallelism(tmp_path: Path) -> None:
    _check(_run("fsdp.py", 4, tmp_path, "--steps", "8"), tmp_path, "fsdp")
    assert (tmp_path / "out" / "fsdp" / "model.safetensors").is_file()


def test_serving_answers_as_the_unsharded_model_does(tmp_path: Path) -> None:
    assert "5 of 5 answers are those of the unsharded model" in _run("serve.py", 2, tmp_path)
