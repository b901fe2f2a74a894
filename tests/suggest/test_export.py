"""A plan in transformers' words: what transformers computes with it, what it can't be told, and the way back."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tpplan
from tests.runtime.world import Member, world
from tests.zoo.architectures import build
from tpplan.cli.main import main
from tpplan.plan import CompileError, Plan
from tpplan.suggest import Exported, export_program, export_rules, import_plan

# Of those that transformers can be told: a mixture of experts, norms of heads, an encoder–decoder.
FAMILIES = ("llama", "llama-sequence", "mixtral", "qwen3", "bart")


def exported(family: str, plan: Plan | None = None) -> tuple[nn.Module, Exported]:
    model, inputs = build(family.removesuffix("-sequence"))
    plan = plan or tpplan.load_plan(family)
    return model, export_program(tpplan.compile_plan(model, plan.with_whole_sequences(), 2, inputs), plan, model)


def codes(plan: object, family: str = "llama") -> list[str]:
    with pytest.raises(CompileError) as caught:
        exported(family, tpplan.load_plan(plan))  # pyright: ignore[reportArgumentType]
    return [diagnostic.code for diagnostic in caught.value.diagnostics]


def test_a_plan_is_written_for_the_base_model_and_for_the_whole() -> None:
    _, plan = exported("llama-sequence")
    assert plan.base["embed_tokens"] == "embedding_rowwise" and "lm_head" not in plan.base
    assert plan.whole["model.layers.*.self_attn.o_proj"] == "rowwise" and plan.whole["lm_head"] == "colwise_rep"
    assert [note.code for note in plan.notes] == ["TP212", "TP212"]


@pytest.mark.slow
def test_the_way_back_is_the_same_plan() -> None:
    """Exported, brought along by a config, imported: the program is the one before."""
    model, plan = exported("llama")
    model.config.base_model_tp_plan, model._tp_plan = dict(plan.base), dict(plan.whole)  # pyright: ignore
    inputs = build("llama")[1]
    back = tpplan.compile_plan(model, tpplan.load_plan(import_plan(model, "llama")), 2, inputs)
    before = tpplan.compile_plan(model, "llama", 2, inputs)
    assert {p.name: p.layout for p in back.parameters} == {p.name: p.layout for p in before.parameters}
    assert back.count_collectives() == before.count_collectives()


def test_what_the_model_brings_along_and_the_plan_leaves_whole_is_said() -> None:
    _, plan = exported("llama", tpplan.load_plan({"version": 1, "modules": {"model.embed_tokens": "vocab"}}))
    assert plan.whole["model.layers.*.mlp.up_proj"] == plan.whole["lm_head"] == "replicate"


@pytest.mark.parametrize(
    ("plan", "family", "code"),
    [
        pytest.param("gpt2", "gpt2", "TP210", marks=pytest.mark.slow),  # another class, three packs, attributes
        pytest.param("t5", "t5", "TP210", marks=pytest.mark.slow),  # a bias by heads
        pytest.param("gpt_oss", "gpt_oss", "TP210", marks=pytest.mark.slow),  # a bias that is added once
        ({"version": 1, "modules": {"model.layers.0.mlp.{gate,up}_proj": "colwise",
                                    "model.layers.0.mlp.down_proj": "rowwise"}}, "llama", "TP211"),
    ],
)  # fmt: skip
def test_what_no_style_does_is_an_error(plan: object, family: str, code: str) -> None:
    assert set(codes(plan, family)) == {code}


def test_a_packed_layer_is_not_for_vllm() -> None:
    rules = {"model.layers.*.mlp.gate_up_proj": {"style": "colwise", "packed": ["gate", "up"]}}
    rules |= {"model.layers.*.mlp.down_proj": "rowwise"}  # pyright: ignore
    _, plan = exported("phi3", tpplan.load_plan({"version": 1, "modules": rules}))
    assert plan.whole["model.layers.*.mlp.gate_up_proj"] == "packed_colwise"
    assert [note.code for note in plan.notes] == ["TP214"]


def test_without_a_model_rules_are_exported_word_by_word() -> None:
    plan = export_rules(tpplan.load_plan("llama"))
    _, proved = exported("llama")
    assert plan.base == proved.base and plan.whole == proved.whole
    assert [note.code for note in plan.notes] == ["TP213"]
    for pattern, style, code in [
        ("**.up", "colwise", "TP210"), ("h.0.up", "colwise", "TP211"), ("h.c_*", "colwise", "TP210"),
        ("up", {"style": "colwise", "packed": ["q", "k", "v"]}, "TP210"),
        ("up", {"style": "colwise", "local": ["n"]}, "TP210"),
    ]:  # fmt: skip
        with pytest.raises(CompileError) as caught:
            export_rules(tpplan.load_plan({"version": 1, "modules": {pattern: style}}))
        assert [diagnostic.code for diagnostic in caught.value.diagnostics] == [code], pattern


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "hidden_size=64 intermediate_size=128 num_attention_heads=8 num_key_value_heads=4 num_hidden_layers=2"
    model = ["--model", "hf:llama", *(part for item in sizes.split() for part in ("--set", item))]
    target = tmp_path / "plan.json"
    assert main(["export", "llama-sequence", "--to", "transformers", "--out", str(target), *model]) == 0
    assert json.loads(target.read_text())["base_model_tp_plan"]["layers.*.mlp.up_proj"] == "colwise"
    assert "TP212" in capsys.readouterr().err
    own = tmp_path / "own.yaml"
    own.write_text("version: 1\nmodules:\n  '**.up': colwise\n")
    assert main(["export", str(own), "--to", "transformers"]) == 1
    assert main(["export", "llama", "--to", "transformers", "--out", str(tmp_path / "no" / "x"), *model]) == 2


# -- transformers' own tensor parallelism -----------------------------------------------------------------------------
def loaded(member: Member, folder: str, plan: dict[str, str] | None, inputs: dict[str, Any]) -> torch.Tensor:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.distributed.configuration_utils import DistributedConfig

    kind = AutoModelForSeq2SeqLM if AutoConfig.from_pretrained(folder).is_encoder_decoder else AutoModelForCausalLM
    config = DistributedConfig(tp_size=member.size, tp_plan=plan)
    with torch.no_grad():
        return kind.from_pretrained(folder, distributed_config=config).eval()(**inputs).logits


def in_transformers(member: Member, cases: list[tuple[str, dict[str, str] | None, dict[str, Any]]]) -> list[Any]:
    import os

    os.environ |= {"RANK": str(member.rank), "LOCAL_RANK": str(member.rank), "WORLD_SIZE": str(member.size)}
    return [loaded(member, *case) for case in cases]


@pytest.mark.slow
@pytest.mark.processes
def test_transformers_computes_what_the_stock_model_computes() -> None:
    cases, expected = [], []
    with tempfile.TemporaryDirectory() as root:
        for family in FAMILIES:
            torch.manual_seed(0)
            meta, plan = exported(family)
            stock = type(meta)(meta.config).eval()  # pyright: ignore
            folder = f"{root}/{family}"
            stock.save_pretrained(folder)  # pyright: ignore
            ids = torch.arange(24).view(2, 12) % 80 + 2
            inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if family == "bart" else {})
            with torch.no_grad():
                expected.append(stock(**inputs).logits)
            cases.append((folder, dict(plan.whole), inputs))
            if family == "llama":  # and by the config's field, which vLLM reads as well
                config = Path(folder, "config.json")
                config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_tp_plan": dict(plan.base)}))
        for found in world(2).run(in_transformers, cases):
            for case, logits, whole in zip(cases, found, expected, strict=True):
                assert logits.shape == whole.shape, case[0]
                torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-5, msg=case[0])
