"""`tpplan plans`, and what is said of shipped plans where another is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpplan.cli.main import main
from tpplan.plan import CompileError, Diagnostic, check_plan, shipped_plan_names
from tpplan.plan.shipped import naming_shipped, shipped_plans


def test_every_plan_is_listed_with_a_model_and_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plans"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_plan_names())
    assert all(plan.model and plan.summary for plan in shipped_plans())
    models = {plan.name: plan.model for plan in shipped_plans()}
    assert models["llama"] == models["llama-sequence"] == "LlamaForCausalLM" and models["gpt2"] == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("phi3", ["phi3", "phi3-sequence"]),
        ("PHI3", ["phi3", "phi3-sequence"]),
        ("phi*", ["phi", "phi-sequence", "phi3", "phi3-sequence"]),
        ("GPTNeoX", ["gpt_neox", "gpt_neox-sequence"]),
        ("ll[ao]ma", ["llama"]),
    ],
)
def test_a_pattern_chooses(pattern: str, names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plans", pattern]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == names


def test_show_prints_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "phi3.yaml").write_text("a file of one's own isn't the shipped one")
    for name in ("phi3", "phi3.yaml"):
        assert main(["plans", "--show", name]) == 0
        assert "qkv_proj: {style: colwise, packed: [q, k, v]}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "hint"), [("zzz", "`tpplan plans`"), ("--show lama", "`llama`"), ("llama --show llama", "not both")]
)
def test_what_leads_nowhere_exits_with_2(words: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plans", *words.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and hint in captured.err


def test_a_missing_plan_names_at_most_three() -> None:
    for name, near in (("qwen4", 3), ("xyz", 0), ("", 0), ("plans/phi4.yaml", 2)):
        _, (finding,) = check_plan(name)
        assert finding.code == "TP019" and "`tpplan plans`" in (finding.help or "")
        assert (finding.help or "").count("`") == 2 * (near + 1), finding.help


def test_an_unmatched_pattern_names_the_plans_that_ship_for_the_model() -> None:
    found = [Diagnostic("TP014", "no"), Diagnostic("TP012", "no"), Diagnostic("TP012", "no")]
    for kind, architecture in (("Phi3ForCausalLM", None), ("Other", "phi3")):
        _, first, second = naming_shipped(found, kind, architecture, "llama")
        assert first.notes == (f"for {kind} tpplan ships `phi3` and `phi3-sequence`",) and second.notes == ()
    assert naming_shipped(found, "Other", None, "llama") == naming_shipped(found, "VitModel", "vit", "vit") == found


def test_the_compiler_says_which_plan_ships() -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    import tpplan

    config = transformers.Phi3Config(num_hidden_layers=1, hidden_size=32, intermediate_size=32, pad_token_id=None)
    with torch.device("meta"):
        model = transformers.Phi3ForCausalLM(config)
    with pytest.raises(CompileError, match="for Phi3ForCausalLM tpplan ships `phi3` and `phi3-sequence`"):
        tpplan.compile_plan(model, "llama", tp=2)
