"""A transformers model's own plan in tpplan's words."""

from types import SimpleNamespace

import pytest
from torch import nn

import tpplan
from tests.models.tiny import tiny_model
from tests.zoo.architectures import build
from tpplan.suggest import import_plan


class Brings(nn.Module):
    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8), "norm": nn.LayerNorm(8)})
        self.config = SimpleNamespace(base_model_tp_plan=plan)
        self.base_model_prefix = "model"


def test_llama_s_own_plan_validates() -> None:
    model, inputs = tiny_model("llama", device="meta")
    plan = tpplan.load_plan(import_plan(model, "llama"))
    found = {rule.pattern.text: rule for rule in plan.rules}
    assert found["model.layers.*.self_attn.q_proj"].style == "colwise"
    assert found["model.embed_tokens"].style == "vocab"
    assert (found["lm_head"].style, found["lm_head"].output) == ("colwise", "replicate")
    tpplan.compile_plan(model, plan, 2, inputs)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("colwise_rep", {"style": "colwise", "output": "replicate"}),
        ("colwise_gather_output", {"style": "colwise", "output": "replicate"}),
        ("rowwise_split_input", {"style": "rowwise", "input": "shard"}),
        ("packed_colwise", {"style": "colwise", "packed": ["gate", "up"]}),
        ("local_rowwise", "rowwise"),
    ],
)
def test_styles_map_to_ours(theirs: str, ours: object) -> None:
    plan = tpplan.load_plan(import_plan(Brings({"up": theirs}), "x"))
    assert plan.to_dict()["modules"] == {"model.up": ours}


def test_what_has_no_counterpart_is_a_comment_with_the_reason() -> None:
    brought = {"up": "colwise", "norm": "replicated_with_grad_allreduce", "experts.up": "colwise", "down": "magic"}
    text = import_plan(Brings(brought), "x")
    assert [rule.pattern.text for rule in tpplan.load_plan(text).rules] == ["model.up"]
    assert "# model.norm: replicated_with_grad_allreduce    needs no rule" in text
    assert "# model.experts.up: colwise    matches no module" in text
    assert "# model.down: magic    has no counterpart" in text


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "granitemoe", "deepseek_v3"])
def test_experts_that_are_parameters_are_split(name: str) -> None:
    model, inputs = build(name)
    left_out: list[str] = []
    plan = tpplan.load_plan(import_plan(model, name, left_out))
    assert left_out == []
    program = tpplan.compile_plan(model, plan, 2, inputs)
    split = [held for held in program.parameters if held.shape != held.local_shape]
    assert any("experts" in held.names[0] for held in split), split


def test_what_is_left_out_is_told_apart_from_what_is_needless() -> None:
    left_out: list[str] = []
    brought = {"up": "colwise", "norm": "replicated_with_grad_allreduce", "experts.up": "colwise", "down": "magic"}
    import_plan(Brings(brought | {"model": "rowwise"}), "x", left_out)
    assert left_out == ["model.down: magic (has no counterpart among the styles)"]


def test_a_model_without_a_plan_of_its_own_is_refused() -> None:
    with pytest.raises(tpplan.CompileError, match="brings no tensor-parallel plan along"):
        import_plan(Brings({}), "x")
