import time

import pytest

from tests.plan.toy import TOY_PLAN, llama_modules
from tpplan.plan import KernelChoice, Plan, Severity, Style, load_plan


def plan_of(**styles: object) -> Plan:
    return load_plan({"version": 1, "modules": styles})


def rules(plan: Plan, *names: str) -> dict[str, Style]:
    return {name: rule.style for name, rule in plan.match(names).rules.items()}


def codes(plan: Plan, *names: str) -> list[str]:
    return [diagnostic.code for diagnostic in plan.match(names).diagnostics]


def test_every_module_gets_its_rule_in_the_model_s_order() -> None:
    matched = load_plan(TOY_PLAN).match(llama_modules())
    assert matched.diagnostics == []
    assert len(matched.rules) == 1 + 2 * 7 + 1
    assert list(matched.rules)[:2] == ["model.embed_tokens", "model.layers.0.self_attn.q_proj"]
    assert matched.rules["model.layers.1.mlp.down_proj"].style is Style.ROWWISE


def test_the_more_specific_rule_wins_whatever_the_order() -> None:
    for plan in (plan_of(**{"a.*": "colwise", "a.b": "rowwise"}), plan_of(**{"a.b": "rowwise", "a.*": "colwise"})):
        assert rules(plan, "a.b", "a.c") == {"a.b": "rowwise", "a.c": "colwise"}


def test_none_carves_an_exception_out_of_a_wider_pattern() -> None:
    plan = plan_of(**{"**.norm": "sequence", "head.norm": "none"})
    assert rules(plan, "a.norm", "head.norm") == {"a.norm": "sequence"}
    assert codes(plan, "a.norm", "head.norm") == []


def test_one_name_outweighs_the_same_name_among_alternatives() -> None:
    plan = plan_of(**{"{q,k,v}_proj": "colwise", "q_proj": "replicate"})
    assert rules(plan, "q_proj", "k_proj") == {"q_proj": "replicate", "k_proj": "colwise"}
    assert codes(plan, "q_proj", "k_proj") == []


def test_equally_specific_rules_that_differ_are_reported_once_with_both_places() -> None:
    plan = load_plan("version: 1\nmodules:\n  a.*.c: colwise\n  '*.b.c': rowwise\n  a.b.*: colwise\n")
    (finding,) = [finding for finding in plan.match(["a.b.c", "a.x.c", "a.b.d"]).diagnostics if finding.code == "TP013"]
    assert str(finding.span) == "<text>:4:3"
    assert "`a.b.c`" in finding.message
    assert finding.notes == ("the other rule is at <text>:3",)


def test_equally_specific_rules_that_agree_are_no_conflict() -> None:
    plan = plan_of(**{"a.*": "colwise", "*.b": "colwise"})
    assert codes(plan, "a.b", "a.c", "x.b") == []


def test_a_rule_that_never_wins_is_a_warning() -> None:
    plan = plan_of(**{"a.*": "colwise", "a.b": "rowwise"})
    (finding,) = plan.match(["a.b"]).diagnostics
    assert (finding.code, finding.severity) == ("TP014", Severity.WARNING)
    assert "`a.b`" in finding.notes[0]


def test_a_none_rule_that_matches_nothing_is_only_a_warning() -> None:
    (finding,) = plan_of(a="none").match(["b"]).diagnostics
    assert (finding.code, finding.severity) == ("TP012", Severity.WARNING)


@pytest.mark.parametrize(
    ("pattern", "suggestion"),
    [
        ("model.layers.*.self_atn.q_proj", "model.layers.*.self_attn.q_proj"),
        ("layers.*.mlp.up_proj", "model.layers.*.mlp.up_proj"),
        ("norm", "model.norm"),
        ("base.model.norm", "model.norm"),
        ("model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj"),
        ("lmhead", "lm_head"),
        ("model.layers.*.mlp.{gat,upp}_proj", "model.layers.*.mlp.gate_proj"),
        ("model.layers.*.self_attn.{q,k,v}_prj", "model.layers.*.self_attn.{q,k,v}_proj"),
        ("model.layer.0.self_atn.{q,k,v}_proj", "model.layers.0.self_attn.{q,k,v}_proj"),
    ],
)
def test_a_pattern_that_matches_nothing_gets_the_nearest_one(pattern: str, suggestion: str) -> None:
    (finding,) = plan_of(**{pattern: "colwise"}).match(llama_modules()).diagnostics
    assert finding.code == "TP012"
    assert finding.help == f"did you mean `{suggestion}`?"


def test_layers_that_another_model_has_as_one_are_found_under_their_joined_name() -> None:
    modules = [f"layers.{i}.{name}" for i in range(2) for name in ("q_norm", "o_proj", "qkv_proj", "gate_up_proj")]
    for pattern, suggestion in (("{q,k,v}_proj", "qkv_proj"), ("{gate,up}_proj", "gate_up_proj")):
        (finding,) = plan_of(**{f"layers.*.{pattern}": "colwise"}).match(modules).diagnostics
        assert finding.help == f"did you mean `layers.*.{suggestion}`?"


def test_a_kernel_pattern_that_matches_nothing_is_reported_once() -> None:
    kernels = {"x.y": {"gelu": "torch", "swiglu": "torch"}}
    plan = load_plan({"version": 1, "modules": {"a": "colwise"}, "kernels": kernels})
    assert codes(plan, "a") == ["TP012"]


def test_a_large_model_is_matched_quickly() -> None:
    plan = load_plan(TOY_PLAN)
    names = llama_modules(166)
    assert len(names) > 1990
    patterns = {f"model.layers.{layer}.mlp.{{gate,up}}_proj": "colwise" for layer in range(25)}
    wide = load_plan({**plan.to_dict(), "modules": {**patterns, **plan.to_dict()["modules"]}})  # type: ignore[dict-item]
    best = min(timed(wide, names) for _ in range(5))
    assert len(wide.rules) >= 30
    assert best < 0.05


def timed(plan: Plan, names: list[str]) -> float:
    started = time.process_time()
    plan.match(names)
    return time.process_time() - started


def test_kernel_choices_hold_inside_the_named_module_and_the_nearest_counts() -> None:
    kernels = {"gelu": "torch", "a.*": {"gelu": "triton"}, "a.b": {"gelu": "auto"}, "a.b.c.d": {"gelu": "torch"}}
    plan = load_plan({"version": 1, "modules": {"a": "colwise"}, "kernels": kernels})
    assert plan.kernel_choice("gelu") is KernelChoice.TORCH
    assert plan.kernel_choice("gelu", "z") is KernelChoice.TORCH
    assert plan.kernel_choice("gelu", "a.x.y") is KernelChoice.TRITON
    assert plan.kernel_choice("gelu", "a.b.c") is KernelChoice.AUTO
    assert plan.kernel_choice("gelu", "a.b.c.d.e") is KernelChoice.TORCH
    assert plan.kernel_choice("rms_norm", "a.b") is KernelChoice.AUTO


@pytest.mark.parametrize(
    ("pattern", "suggestion"),
    [
        ("mlp.experts.gate_up_prj", "mlp.experts.gate_up_proj"),
        ("mlp.ruoter", "mlp.router"),
        ("mlp.expert", "mlp.experts"),
    ],
)
def test_a_misspelt_parameter_gets_the_nearest_one(pattern: str, suggestion: str) -> None:
    modules, parameters = ["mlp", "mlp.router", "mlp.experts"], ["mlp.router.weight", "mlp.experts.gate_up_proj"]
    (found,) = plan_of(**{pattern: "colwise"}).match(modules, parameters).diagnostics
    assert found.help == f"did you mean `{suggestion}`?"
