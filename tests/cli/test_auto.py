"""`auto` is a plan in every command that takes one for a model, and is explained where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import nn

from tpplan.cli.main import main

MODEL = """
import torch
from torch import nn

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

def make():
    return MLP(), (torch.zeros(2, 8),)
"""
FOR_A_MODEL = ["--model", "mlp.py:make", "--tp", "2"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.chdir(tmp_path)
    Path("mlp.py").write_text(MODEL)
    layers = {"up": nn.Linear(8, 32), "down": nn.Linear(32, 8)}
    save_file(dict(nn.ModuleDict(layers).state_dict()), "mlp.safetensors")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["validate", "auto"], "The plan is valid for mlp.py:make at tp=2."),
        (["explain", "auto"], "colwise"),
        (["verify", "auto"], "module calls"),
        (["diff", "auto", "auto"], "no change for MLP on 2 ranks"),
        (["checkpoint", "check", "mlp.safetensors", "auto"], "would load"),
        (["checkpoint", "inspect", "mlp.safetensors", "--plan", "auto"], "Each of 2 ranks reads"),
        (["export", "auto", "--to", "transformers"], '"down": "rowwise"'),
        (["env", "--plan", "auto"], "(auto for MLP at tp=2)"),
    ],
)
def test_a_plan_is_found_for_the_model(command: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, *FOR_A_MODEL]) == 0
    assert says in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", [["validate", "auto"], ["export", "auto", "--to", "transformers"]])
def test_without_a_model_none_is_found(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    assert "`auto` is found for a model" in "".join(capsys.readouterr())
