"""As a new user would: a folder, a plan from the command line, a script under torchrun, again at another degree."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.runtime.torchrun import torchrun
from tpplan.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.processes]

SCRIPT = """
import sys

import torch

import tpplan

folder, plan, target = sys.argv[1:]
model = tpplan.from_pretrained(folder, plan)
ids = torch.arange(24).view(2, 12)
tokens = model.generate(ids, max_new_tokens=6, do_sample=False)

optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
loss = model(input_ids=ids, labels=ids).loss
loss.backward()
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
tpplan.save_weights(model, target)
if torch.distributed.get_rank() == 0:
    print("RESULT", tokens.tolist(), round(float(loss.detach()), 4), round(float(norm.full_tensor()), 3))
"""


def _stock(folder: Path, target: Path) -> str:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(24).view(2, 12)
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model.save_pretrained(target)
    return f"RESULT {tokens.tolist()} {round(float(loss.detach()), 4)} {round(float(norm), 3)}"


def test_from_a_folder_to_a_step_at_another_degree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(7)
    settings: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96}
    settings |= {"num_attention_heads": 8, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**settings, pad_token_id=0, initializer_range=0.2))
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    assert main(["suggest", "--model", "model", "--tp", "2", "-o", "plan.yaml"]) == 0
    assert main(["checkpoint", "check", "model", "plan.yaml", "--model", "model", "--tp", "2"]) == 0
    for ranks, source, plan, target in ((2, "model", "plan.yaml", "first"), (4, "first", "auto", "second")):
        ran = torchrun(tmp_path / "train.py", ranks, source, plan, target, folder=tmp_path)
        assert "Traceback" not in ran.stderr and "TP1" not in ran.stderr, ran.stderr
        (ours,) = [line for line in ran.stdout.splitlines() if line.startswith("RESULT")]
        assert ours == _stock(tmp_path / source, tmp_path / f"stock-{target}")
        ours_, theirs = (AutoModelForCausalLM.from_pretrained(tmp_path / n) for n in (target, f"stock-{target}"))
        for (name, tensor), other in zip(ours_.state_dict().items(), theirs.state_dict().values(), strict=True):
            torch.testing.assert_close(tensor, other, msg=lambda text, name=name: f"{name}: {text}")
    assert sorted(os.listdir(tmp_path / "second")) == ["config.json", "generation_config.json", "model.safetensors"]
