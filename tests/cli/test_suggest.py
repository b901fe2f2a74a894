"""`tpplan suggest` writes plans that `tpplan validate` takes."""

import json
from pathlib import Path

import pytest

from tpplan.cli.main import main

SIZES = "hidden_size=64 intermediate_size=128 num_attention_heads=8 num_key_value_heads=4 head_dim=8 vocab_size=128"
MODEL = [
    "--model", "hf:llama", "--tp", "2", "--set", "num_hidden_layers=2",
    *(part for item in SIZES.split() for part in ("--set", item)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("options", [[], ["--sequence-parallel"], ["--from-hf"]])
@pytest.mark.one_in(3)
def test_what_it_writes_validates(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["suggest", *MODEL, *options, "-o", "found.yaml"]) == 0
    assert capsys.readouterr() == ("", "tpplan suggest: wrote found.yaml\n")
    assert main(["validate", "found.yaml", *MODEL]) == 0
    assert "error" not in capsys.readouterr().out


def test_without_a_file_the_plan_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["suggest", *MODEL]) == 0
    text, chatter = capsys.readouterr()
    assert chatter == "" and "  model.layers.*.mlp.{gate,up}_proj: colwise\n" in text
    assert "# LlamaForCausalLM over 2 ranks" in text


@pytest.mark.one_in(5)
@pytest.mark.parametrize("command", [["verify"], ["explain"], ["explain", "--inference"]])
def test_auto_is_the_plan_that_it_finds(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "auto", *MODEL]) == 0
    assert "llama-for-causal-lm" in capsys.readouterr().out


def test_one_rank_has_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["suggest", *(word for word in MODEL if word not in ("--tp", "2")), "--tp", "1"]) == 0
    text = capsys.readouterr().out
    assert "# LlamaForCausalLM over 1 rank, which has all of it" in text and "mlp.down_proj: rowwise" in text
    assert "single head" not in text and "Left whole" not in text and "1 ranks" not in text


def test_nothing_to_import_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["suggest", "--model", "hf:gpt2", "--set", "n_layer=1", "--from-hf"]) == 1
    assert "TP123" in capsys.readouterr().err


def test_a_plan_for_several_numbers_of_ranks_is_proved_at_each(capsys: pytest.CaptureFixture[str]) -> None:
    model = [word for word in MODEL if word not in ("--tp", "2")]
    assert main(["suggest", *model, "--tp", "2", "16"]) == 0  # more ranks than heads: these stay whole
    text = capsys.readouterr().out
    assert "over 16 ranks" in text and "self_attn.{q" not in text


@pytest.mark.one_in(3)
@pytest.mark.parametrize("set_to", ["", "https://example.org/plan.json"])
def test_editors_are_told_of_a_schema_that_there_is(
    set_to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TPPLAN_SCHEMA", set_to)
    assert main(["schema"]) == 0
    schema = capsys.readouterr().out
    found = []
    for folder in (tmp_path / "without", tmp_path / "with"):
        folder.mkdir()
        if folder.name == "with":
            (folder / "plan.schema.json").write_text(schema)
        assert main(["suggest", *MODEL, "-o", str(folder / "x.yaml")]) == 0
        found.append((folder / "x.yaml").read_text().splitlines()[0].removeprefix("# yaml-language-server: $schema="))
    assert found == ([set_to] * 2 if set_to else [json.loads(schema)["$id"], "plan.schema.json"])
    capsys.readouterr()
    assert main(["plans", "--show", "llama"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(f"={set_to or 'urn:tpplan:plan:1'}")


def test_a_folder_that_isn_t_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["suggest", *MODEL, "-o", "nowhere/x.yaml"]) == 2
    assert "can't write nowhere/x.yaml" in capsys.readouterr().err
