"""DeepSpeed's AutoTP configs in tpplan's words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tpplan
from tests.models.tiny import tiny_model
from tpplan.cli.main import main
from tpplan.plan import CompileError
from tpplan.suggest import import_deepspeed

LLAMA = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.layers\.1\.mlp\..*"], "partition_type": "skip"},
        {"patterns": [r".*\.o_proj\.weight$", r".*\.down_proj\.weight$"], "partition_type": "row"},
        {"patterns": [r".*\.[qkv]_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.(up|gate)_proj\.weight$"], "model_types": ["Llama"]},
        {"patterns": [r"lm_head\.weight$"], "partition_type": "column", "gather_output": True},
    ],
}


def imported(folder: Path, settings: Any, name: str = "llama") -> str:
    file = folder / "ds.json"
    file.write_text(settings if isinstance(settings, str) else json.dumps(settings))
    return import_deepspeed(tiny_model(name, device="meta")[0], file, name)


def test_layer_specs_become_rules_the_first_that_matches(tmp_path: Path) -> None:
    text = imported(tmp_path, {"tensor_parallel": {"autotp_size": 2, "partition_config": LLAMA}})
    plan = tpplan.load_plan(text)
    assert plan.to_dict()["modules"] == {
        "model.layers.*.self_attn.{q,k,v}_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.0.mlp.{gate,up}_proj": "colwise",
        "model.layers.0.mlp.down_proj": "rowwise",
        "lm_head": {"style": "colwise", "output": "replicate"},
    }
    model, inputs = tiny_model("llama", device="meta")
    tpplan.compile_plan(model, plan, 2, inputs)
    assert "for 2 ranks" in text


@pytest.mark.parametrize(
    ("shape", "packs"), [([3, -1], ["p0", "p1", "p2"]), ([[48, 24, 24], -1], {"p0": 48, "p1": 24, "p2": 24})]
)
def test_shapes_are_packs(shape: Any, packs: Any, tmp_path: Path) -> None:
    spec = {"patterns": [r".*qkv_proj\.weight"], "partition_type": "column", "shape": shape, "partition_dim": 0}
    plan = tpplan.load_plan(
        imported(tmp_path, {"tensor_parallel": {"partition_config": {"layer_specs": [spec]}}}, "phi3")
    )
    assert plan.to_dict()["modules"] == {"model.layers.*.self_attn.qkv_proj": {"style": "colwise", "packed": packs}}


def test_an_injection_policy_names_the_rows(tmp_path: Path) -> None:
    policy = {"LlamaDecoderLayer": ["self_attn.o_proj", "mlp.down_proj"]}
    plan = tpplan.load_plan(imported(tmp_path, {"injection_policy": policy, "tensor_parallel": {"tp_size": 2}}))
    assert plan.to_dict()["modules"] == {
        "model.layers.*.self_attn.{q,k,v}_proj": "colwise", "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.{gate,up}_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise",
    }  # fmt: skip


def test_a_tp_plan_and_the_models_own(tmp_path: Path) -> None:
    plan = {"layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
    found = tpplan.load_plan(imported(tmp_path, {"tensor_parallel": {"tp_plan": plan}}))
    assert [rule.pattern.text for rule in found.rules] == [
        "model.layers.*.mlp.{gate,up}_proj",
        "model.layers.*.mlp.down_proj",
    ]
    assert "model.layers.*.self_attn.o_proj: rowwise" in imported(tmp_path, {"tensor_parallel": {"autotp_size": 4}})


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ("{", "TP215"), ("[]", "TP215"), ({}, "TP215"), ({"tensor_parallel": {"partition_config": {}}}, "TP215"),
        ({"tensor_parallel": {"preset_model": "llama"}, "tp_plan": {"x": "colwise"}}, "TP216"),
        ({"injection_policy": {"Nowhere": ["x"]}}, "TP216"),
        ({"injection_policy": {"LlamaDecoderLayer": ["x"]}}, "TP216"),
        ({"tp_plan": {"layers.*.mlp.up_proj": "magic"}}, "TP216"),
        *(({"partition_config": {"layer_specs": [spec]}}, "TP216") for spec in (
            {"patterns": ["("]}, {"patterns": [], "partition_type": "diagonal"}, {"patterns": [], "new": 1}, "x",
            {"patterns": ["x"], "shape": [8, -1, 48], "partition_dim": 1}, {"patterns": ["x"], "shape": [0, -1]},
            {"patterns": ["x"], "partition_dim": 1}, {"patterns": ["x"], "shape": [[3, "a"], -1]},
        )),
    ],
)  # fmt: skip
def test_what_cant_be_said_is_an_error(settings: Any, code: str, tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        imported(tmp_path, settings)
    assert {diagnostic.code for diagnostic in caught.value.diagnostics} == {code}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"tensor_parallel": {"autotp_size": 2}}))
    model = ["--model", "hf:gpt2", "--set", "n_layer=1"]
    assert main(["suggest", *model, "--from-deepspeed", str(file)]) == 1
    assert "TP215" in capsys.readouterr().err
    assert main(["suggest", *model, "--from-deepspeed", str(tmp_path / "no.json")]) == 2
    assert main(["suggest", *model, "--from-deepspeed", str(file), "--from-hf"]) == 2
