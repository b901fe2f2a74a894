"""Shipped plans for models with adapters: proved, with the stock model's collectives, equal to the unsharded model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.adapters.models import ALL, adapted, bert, gpt2, llama, lora, phi3
from tests.marking import in_thirds, sweep_but
from tests.plans.parity import PLANS
from tpplan.plan import CompileError
from tpplan.suggest.sharded_share import block_share

pytest.importorskip("peft", reason="peft isn't installed; it is in the `dev` extra")

_CONV = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
_BIASED = {"attention_bias": True, "mlp_bias": True}
CASES: dict[str, tuple[str, Callable[[], nn.Module], dict[str, Any]]] = {
    "llama": ("llama", llama, {"use_rslora": True}),
    "key-value heads": ("llama", lambda: llama(num_key_value_heads=2), {}),
    "bias of B": ("llama", lambda: llama(**_BIASED), {"lora_bias": True}),
    "biases of the base": ("llama", lambda: llama(**_BIASED), {"bias": "lora_only"}),
    "tables and heads": ("llama", llama, {"target_modules": [*ALL, "embed_tokens", "lm_head"]}),
    "kept modules": ("llama", llama, {"modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    "gpt2": ("gpt2", gpt2, _CONV),
    "phi3": ("phi3", phi3, {"target_modules": "all-linear"}),
    "bert": ("bert", bert, {"target_modules": ["query", "key", "value", "dense"]}),
}
_RUNS = [(name, sequence, tp) for name in CASES for sequence in ("", "-sequence") for tp in (2, 4)]
_QUICK = [("gpt2", "-sequence", 2)]
_SLOW = (
    [("key-value heads", "-sequence", 4)]
    + [(name, "", 2) for name in [*CASES][::2]]
    + [(name, "-sequence", 4) for name in [*CASES][1::2]]
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sequence", "tp"), in_thirds(_QUICK, _SLOW, _RUNS))
def test_a_shipped_plan_holds_for_the_model_with_adapters(name: str, sequence: str, tp: int) -> None:
    plan, make, options = CASES[name]
    report = tpplan.verify(adapted(make, **options), PLANS / f"{plan}{sequence}.yaml", tp)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [pytest.param("llama", marks=pytest.mark.slow), "llama-sequence"])
def test_adapters_cost_no_collective(plan: str) -> None:
    with_adapters = tpplan.compile_plan(adapted(llama), PLANS / f"{plan}.yaml", 2)
    stock = tpplan.compile_plan(llama(), PLANS / f"{plan}.yaml", 2)
    for kind, count in with_adapters.count_collectives().items():
        assert count <= stock.count_collectives()[kind], kind
    assert not with_adapters.diagnostics
    assert all(not p.trainable for p in with_adapters.parameters if "lora_" not in p.name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "make", "options"),
    [("llama", llama, {}), pytest.param("gpt2", gpt2, _CONV, marks=pytest.mark.sweep)],
    ids=["llama", "gpt2"],
)
def test_a_suggested_plan_splits_what_the_shipped_one_does(
    plan: str, make: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    model = adapted(make, **options)
    suggested = tpplan.compile_plan(model, tpplan.suggest_plan(model, 2), 2)
    shipped = tpplan.compile_plan(model, PLANS / f"{plan}.yaml", 2)
    assert block_share(suggested).percent >= block_share(shipped).percent > 75


def _peft(kind: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import peft

        return adapted(llama, getattr(peft, kind)(**options))

    return make


OTHERS = {
    "IA3": _peft("IA3Config", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "AdaLora": _peft("AdaLoraConfig", total_step=9, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM"),
    "VeRA": _peft("VeraConfig", r=4, target_modules=["q_proj", "o_proj"]),
    "DeLoRA": _peft("DeloraConfig", r=4, target_modules=["q_proj", "o_proj"]),
    "prompt": _peft("PromptTuningConfig", task_type="CAUSAL_LM", num_virtual_tokens=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", sweep_but(["llama-sequence"], ["llama", "llama-sequence"]))
@pytest.mark.parametrize("kind", OTHERS)
def test_other_adapters_are_right(kind: str, plan: str) -> None:
    report = tpplan.verify(OTHERS[kind](), PLANS / f"{plan}.yaml", 2)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LoHaConfig", "LoKrConfig"])
def test_what_reads_the_shape_of_a_split_weight_is_refused_with_the_way_out(kind: str) -> None:
    """They run beside a branch on a random number, whose other side doesn't use them."""
    model = _peft(kind, r=4, target_modules=["up_proj", "down_proj"])()
    with pytest.raises(CompileError, match=r"TP107(.|\n)*remove the rules for the modules inside `.*up_proj`"):
        tpplan.compile_plan(model, PLANS / "llama.yaml", 2)
    rules = tpplan.load_plan(PLANS / "llama.yaml").to_dict()["modules"]
    plan = {"version": 1, "modules": {name: rule for name, rule in rules.items() if "mlp" not in name}}  # pyright: ignore
    assert tpplan.verify(model, plan, 2).ok


def test_a_prefix_of_keys_and_values_is_refused() -> None:
    model = _peft("PrefixTuningConfig", task_type="CAUSAL_LM", num_virtual_tokens=4)()
    with pytest.raises(CompileError, match=r"TP160(.|\n)*prompt tuning"):
        tpplan.compile_plan(model, PLANS / "llama.yaml", 2)


# -- written by hand --------------------------------------------------------------------------------------------------
class Beside(nn.Module):
    """An adapter of bare parameters around a layer."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.a = nn.Parameter(torch.randn(4, inner.in_features, dtype=torch.float64) * 0.1)
        self.b = nn.Parameter(torch.randn(inner.out_features, 4, dtype=torch.float64) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + (x @ self.a.T @ self.b.T) * 0.5


class Within(nn.Linear):
    """A layer that has the parameters of its adapter."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__(inner.in_features, inner.out_features, bias=False, dtype=torch.float64)
        self.a = nn.Parameter(torch.randn(4, inner.in_features, dtype=torch.float64) * 0.1)
        self.b = nn.Parameter(torch.randn(inner.out_features, 4, dtype=torch.float64) * 0.1)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + (input @ self.a.T @ self.b.T) * 0.5


def _by_hand(wrap: Callable[[nn.Linear], nn.Module]) -> Any:
    model: Any = llama()
    for layer in model.model.layers:
        for holder, names in ((layer.self_attn, ("q_proj", "k_proj", "o_proj")), (layer.mlp, ("up_proj", "down_proj"))):
            for name in names:
                setattr(holder, name, wrap(getattr(holder, name)))
    return model


@pytest.mark.parametrize("wrap", [Beside, Within])
@pytest.mark.parametrize("plan", ["llama", pytest.param("llama-sequence", marks=pytest.mark.slow)])
def test_adapters_written_by_hand_are_split_with_their_layers(
    wrap: Callable[[nn.Linear], nn.Module], plan: str
) -> None:
    model = _by_hand(wrap)
    report = tpplan.verify(model, PLANS / f"{plan}.yaml", 2)
    assert report.ok, str(report)
    placed = {p.name.partition("layers.0.")[2]: str(p.layout) for p in _parameters(model, plan)}
    assert [placed[f"self_attn.q_proj.{leaf}"] for leaf in ("a", "b")] == ["R", "S(0)"]
    assert [placed[f"mlp.down_proj.{leaf}"] for leaf in ("a", "b")] == ["S(1)", "R"]


def _parameters(model: nn.Module, plan: str) -> Iterable[Any]:
    return tpplan.compile_plan(model, PLANS / f"{plan}.yaml", 2).parameters


def test_names_that_match_nothing_are_told_by_the_names_of_the_wrapped_model() -> None:
    plan = {
        "version": 1,
        "modules": {"model.layers.*.self_attn.q_prj": "colwise", "model.layers.*.mlp.up_proj": "colwise"},
    }
    with pytest.raises(CompileError, match=r"TP012(.|\n)*did you mean `model\.layers\.\*\.self_attn\.q_proj`"):
        tpplan.compile_plan(adapted(llama, lora()), plan, 2)


def test_a_module_that_holds_several_layers_is_no_layer() -> None:
    plan = {"version": 1, "modules": {"model.layers.*.mlp": "colwise"}}
    with pytest.raises(CompileError, match=r"TP101(.|\n)*name the linear layers inside it"):
        tpplan.compile_plan(llama(), plan, 2)
