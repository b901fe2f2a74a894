"""`tpplan env` prints what a report of a bug needs."""

from __future__ import annotations

import pytest
import torch

from tpplan.cli.main import main


def test_versions_and_devices_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPPLAN_DEBUG", "1")
    assert main(["env"]) == 0
    facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert facts["torch"] == str(torch.__version__) and facts["TPPLAN_DEBUG"] == "1"
    assert {"python", "platform", "cuda", "transformers"} <= set(facts)


def test_the_program_has_a_digest(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    sizes = ("num_hidden_layers=1", "hidden_size=64", "intermediate_size=96", "num_attention_heads=4")
    settings = [f"--set={size}" for size in (*sizes, "num_key_value_heads=4", "vocab_size=96")]
    assert main(["env", "--plan", "llama", "--model", "hf:llama", *settings]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("program") and last.endswith("(llama for LlamaForCausalLM at tp=2)")


@pytest.mark.parametrize("words", ["--plan llama", "--model hf:llama", "--tp 2"])
def test_a_program_takes_a_plan_and_a_model(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", *words.split()]) == 2
    assert "--model" in capsys.readouterr().err
