"""`tpplan explain` on a real architecture, kept small: text, reasons, JSON, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from tpplan.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
PLAN = """\
version: 1
name: tiny
modules:
  model.layers.*.self_attn.{q,k,v}_proj: colwise
  model.layers.*.self_attn.o_proj: rowwise
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
"""
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_hidden_layers": 3,
    "vocab_size": 128,
}
MODEL = [
    "--model",
    "hf:llama",
    "--tp",
    "4",
    *(part for item in SIZES.items() for part in ("--set", "{}={}".format(*item))),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.yaml").write_text(PLAN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["explain", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_block_of_llama_costs_two_all_reduces_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, chatter = explain(capsys, "tiny.yaml", *MODEL, "--batch", "2", "--sequence", "16")
    # On a machine without a GPU a word on the kernels, and otherwise nothing.
    assert code == 0 and chatter in ("", "Here every module keeps its own operations: no GPU.\n")
    assert text.startswith("LlamaForCausalLM with plan tiny on 4 ranks")
    assert "input_ids (2, 16) int64" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    # 2 · 16 · 64 float32 are 8 KiB, of which a ring of 4 sends 3/4 twice.
    assert "model.layers.* × 3" in lines and "each 2 all-reduce 24.0 KiB 2 all-reduce 24.0 KiB" in lines
    assert "a step 6 all-reduce 72.0 KiB 6 all-reduce 72.0 KiB" in lines
    assert "self_attn.k_proj colwise weight (32, 64) → (8, 64) S(0)" in lines


def test_a_pipe_gets_100_columns_of_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = explain(capsys, "tiny.yaml", *MODEL)
    assert 80 < max(map(len, text.splitlines())) <= 100 and "\x1b" not in text


def test_the_width_is_that_of_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, text, _ = explain(capsys, "tiny.yaml", *MODEL)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("last", [True, False], ids=["behind", "before"])
def test_a_module_s_reasons_name_the_plan_s_lines(last: bool, capsys: pytest.CaptureFixture[str]) -> None:
    module = "model.layers.1.mlp"
    arguments = ["tiny.yaml", *MODEL, module] if last else ["tiny.yaml", module, *MODEL]
    code, text, _ = explain(capsys, *arguments)
    assert code == 0 and text.startswith("model.layers.1.mlp  LlamaMLP, inferred\n")
    assert re.search(r"why: for gate_proj, up_proj \(tiny.yaml:6", text)
    assert "self_attn" not in text


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("model.layers.0.mpl", "the model has no module `model.layers.0.mpl`; did you mean `model.layers.0.mlp`?"),
        ("model..mlp", "'model..mlp' is neither a module nor a pattern: `model..mlp` has an empty segment"),
    ],
)
def test_a_module_that_isn_t_there_is_refused(module: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(capsys, "tiny.yaml", *MODEL, module) == (2, "", f"tpplan explain: {message}\n")


def test_json_is_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    from tpplan.compiler.ir.program import Program

    code, text, _ = explain(capsys, "tiny.yaml", *MODEL, "--format", "json")
    program = Program.from_dict(json.loads(text))
    assert code == 0 and program.to_json() + "\n" == text
    assert (program.plan, program.size) == ("tiny", 4)


def test_json_of_one_module_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, message = explain(capsys, "tiny.yaml", *MODEL, "model", "--format", "json")
    assert (code, text) == (2, "") and "leave out MODULE" in message


def test_a_plan_that_doesn_t_fit_is_reported_at_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("tiny.yaml").write_text(PLAN.replace("o_proj: rowwise", "out_proj: rowwise"))
    code, text, findings = explain(capsys, "tiny.yaml", *MODEL)
    assert (code, text) == (1, "") and findings.startswith("tiny.yaml:5:3: TP012")


def test_a_plan_with_mistakes_loads_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    Path("tiny.yaml").write_text(PLAN.replace("rowwise", "rowwize"))
    code, text, findings = explain(capsys, "tiny.yaml", "--model", "hf:nonsense")
    assert (code, text) == (1, "") and "TP005" in findings and "TP122" not in findings


def test_warnings_are_chatter_beside_json(capsys: pytest.CaptureFixture[str]) -> None:
    Path("tiny.yaml").write_text(f"{PLAN}  lm_head: colwise\n")
    code, text, chatter = explain(capsys, "tiny.yaml", *MODEL, "--format", "json")
    assert code == 0 and json.loads(text)["plan"] == "tiny"
    assert chatter == "" or "warning" in chatter


@pytest.mark.parametrize("command", ["explain", "demo"])
def test_every_option_is_on_the_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    options = set(re.findall(r"(?<!\w)--[a-z]+", capsys.readouterr().out)) - {"--help"}
    assert [option for option in sorted(options) if option not in PAGE] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2], ids=["training", "inference", "diff"])
def test_the_example_on_the_page_is_real(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = re.findall(r"\n`tpplan ((?:explain|diff) llama [^`]*)`:\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert len(found) == 3
    command, shown = found[number]
    code = main(command.split())
    assert code == 0 and shown in capsys.readouterr().out


def test_premises_are_listed_with_the_lines_that_make_them(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = explain(capsys, "tiny.yaml", *MODEL, "--premises", "--format", "json")
    told = [(premise["kind"], premise["text"]) for premise in json.loads(text)]
    assert code == 0
    assert ("argument", "input_ids is an int64 tensor of 2 dims") in told
    assert ("size", "input_ids.shape[1] <= attention_mask.shape[1]") in told
    assert {"argument", "size", "branch", "mode", "state"} <= {kind for kind, _ in told}
    (line,) = {p["line"] for p in json.loads(text) if p["text"].startswith("input_ids.shape[1] <=")}
    assert "masking_utils.py" in line and "padding_length" in line
    shown = explain(capsys, "tiny.yaml", *MODEL, "--premises")[1]
    assert "input_ids is an int64 tensor of 2 dims" in shown and "masking_utils.py" in shown


def test_premises_are_of_the_whole_call(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, chatter = explain(capsys, "tiny.yaml", "model.norm", *MODEL, "--premises")
    assert code == 2 and not text and "leave out MODULE" in chatter
