"""Which bodies a kernel may take the place of: by what they compute, not by their names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

import tpplan
from tests.compiler.toys import HIDDEN, MLP, compiled, plan_of, x_BSH
from tests.models.tiny import tiny_model
from tpplan.compiler.ir.program import KernelUse, Program


def uses(program: Program) -> dict[str, KernelUse]:
    return {use.module: use for use in program.kernels}


class Around(nn.Module):
    """A body between two linear layers."""

    def __init__(self, body: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.up, self.body, self.down = nn.Linear(HIDDEN, 32, bias), body, nn.Linear(32, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.body(self.up(x)))


class Spelled(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def by_hand(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


ACTIVATIONS = [
    (nn.GELU(), "none"),
    (nn.GELU("tanh"), "tanh"),
    (ACT2FN["gelu"], "none"),
    (ACT2FN["gelu_new"], "tanh"),
    (ACT2FN["gelu_fast"], "tanh"),
    (ACT2FN["gelu_python"], "none"),
    (ACT2FN["gelu_pytorch_tanh"], "tanh"),
    (ACT2FN["gelu_accurate"], "tanh"),
    (Spelled(by_hand), "none"),
    (ACT2FN["quick_gelu"], None),
    (ACT2FN["gelu_10"], None),
    (ACT2FN["relu"], None),
    (ACT2FN["mish"], None),
    (nn.SiLU(), None),
    (Spelled(lambda x: by_hand(x) + 1e-5 * x), None),
]


@pytest.mark.parametrize(("activation", "form"), ACTIVATIONS, ids=lambda held: type(held).__name__)
@pytest.mark.one_in(5)
def test_gelu_is_known_in_every_spelling_and_nothing_else_is(activation: nn.Module, form: str | None) -> None:
    use = uses(compiled(Around(activation, bias=False), MLP)).get("body")
    assert (use and (use.kind, use.approximate, use.refused)) == (form and ("gelu", form, ""))


class LlamaNorm(nn.Module):
    def __init__(self, offset: float = 0.0, wide: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.offset, self.wide = offset, wide

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() if self.wide else x
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 3e-6)
        return (self.offset + self.scale) * y.to(x.dtype) if self.offset == 0 else (y * (1 + self.scale.float())).to(x)


class Centred(nn.Module):
    """LayerNorm by its definition; `unbiased` makes it another function."""

    def __init__(self, unbiased: bool = False) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.zeros(HIDDEN))
        self.unbiased = unbiased

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=self.unbiased, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-6) * self.gain + self.shift


NORMS = [
    (nn.LayerNorm(HIDDEN), ("layer_norm", 1e-5, 0.0, "weight", "bias")),
    (nn.LayerNorm(HIDDEN, elementwise_affine=False), ("layer_norm", 1e-5, 0.0, None, None)),
    (nn.RMSNorm(HIDDEN, eps=1e-6), ("rms_norm", 1e-6, 0.0, "weight", None)),
    (LlamaNorm(), ("rms_norm", 3e-6, 0.0, "scale", None)),
    (LlamaNorm(wide=False), ("rms_norm", 3e-6, 0.0, "scale", None)),
    (LlamaNorm(offset=1.0), ("rms_norm", 3e-6, 1.0, "scale", None)),
    (Centred(), ("layer_norm", 1e-6, 0.0, "gain", "shift")),
    (Centred(unbiased=True), None),
    (nn.Softmax(-1), None),
    (Spelled(lambda x: functional.normalize(x, dim=-1)), None),
]


@pytest.mark.parametrize(("norm", "expected"), NORMS, ids=lambda held: type(held).__name__)
def test_norms_are_known_in_every_spelling_and_nothing_else_is(
    norm: nn.Module, expected: tuple[object, ...] | None
) -> None:
    model = nn.Sequential(norm, nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN))
    use = uses(compiled(model, {"1": "colwise", "2": "rowwise"})).get("0")
    # torch's own RMSNorm rounds its eps to float32.
    found = use and (use.kind, float(f"{use.eps:.6g}"), use.offset, use.weight, use.bias)
    assert found == expected


@pytest.mark.parametrize("name", ["llama", "gemma", "gemma2", "qwen3", "olmo2", "t5"])
@pytest.mark.one_in(5)
def test_the_norms_of_transformers_are_known(name: str) -> None:
    common: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 32}
    common["use_cache"] = False
    common |= {} if name == "t5" else {"num_key_value_heads": 4, "head_dim": 12}
    common |= {"d_model": 48, "d_kv": 12} if name == "t5" else {}
    config = transformers.CONFIG_MAPPING[name](**common)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    norms = {n for n, m in model.named_modules() if "norm" in type(m).__name__.lower()}
    plan = tpplan.load_plan("version: 1\nmodules:\n  '**': none\n")
    found = uses(tpplan.compile_plan(model, plan, 2))
    assert norms <= set(found), sorted(norms - set(found))
    offset = 1.0 if name in ("gemma", "gemma2") else 0.0
    assert {use.offset for use in found.values() if use.kind.endswith("norm")} == {offset}


@pytest.mark.parametrize(("dtype", "cast"), [(torch.float32, "after"), (torch.bfloat16, "before")])
def test_where_a_norm_rounds_is_seen_in_low_precision(dtype: torch.dtype, cast: str) -> None:
    model = nn.Sequential(LlamaNorm(), nn.Linear(HIDDEN, 32)).to(dtype)
    x = torch.empty(3, 12, HIDDEN, dtype=dtype, device="meta", requires_grad=True)
    program = tpplan.compile_plan(model, plan_of({"1": {"style": "colwise", "output": "shard"}}), 2, (x,))
    assert (uses(program)["0"].cast, uses(program)["0"].dtype) == (cast, str(dtype).removeprefix("torch."))


def test_a_biased_linear_and_its_gelu_become_one() -> None:
    use = uses(compiled(Around(nn.GELU()), MLP))["body"]
    assert (use.kind, use.parts, use.approximate) == ("bias_gelu", ("up",), "none")


def test_a_bias_that_is_added_after_the_sum_stays_where_it_is() -> None:
    model = nn.Sequential(nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN), nn.GELU())
    use = uses(compiled(model, {"0": "colwise", "1": "rowwise"}))["2"]
    assert use.kind == "gelu" and use.note == "not fused with the bias of `1`: it is added after the ranks' sum"


class Twice(Around):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(self.body(y) + y)


def test_a_result_with_a_second_reader_keeps_its_bias() -> None:
    assert uses(compiled(Twice(nn.GELU()), MLP))["body"].kind == "gelu"


class GatedMlp(nn.Module):
    def __init__(self, act: nn.Module, swapped: bool = False, extra: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)
        self.act, self.swapped, self.extra = act, swapped, extra

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.act(self.gate(x)), self.up(x)
        y = b * a if self.swapped else a * b
        return self.down(y + self.extra if self.extra else y)


GATED = {"gate": "colwise", "up": "colwise", "down": "rowwise"}


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (GatedMlp(nn.SiLU()), ("swiglu", None)),
        (GatedMlp(nn.SiLU(), swapped=True), ("swiglu", None)),
        (GatedMlp(nn.GELU("tanh")), ("geglu", "tanh")),
        (GatedMlp(ACT2FN["gelu_new"]), ("geglu", "tanh")),
        (GatedMlp(ACT2FN["quick_gelu"]), None),
        (GatedMlp(nn.SiLU(), extra=1.0), None),
    ],
)
def test_a_body_that_is_a_gated_mlp_and_nothing_else_is_fused(
    model: nn.Module, expected: tuple[str, str | None] | None
) -> None:
    use = uses(compiled(model, GATED)).get("")
    assert (use and (use.kind, use.approximate)) == expected
    assert use is None or use.parts == ("gate", "up", "down")


def test_phi3_gates_the_halves_of_one_projection() -> None:
    common: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.Phi3Config(**common, intermediate_size=64, vocab_size=32, pad_token_id=0, use_cache=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    rules = {
        "model.layers.*.mlp.gate_up_proj": {"style": "colwise", "packed": ["gate", "up"]},
        "model.layers.*.mlp.down_proj": "rowwise",
    }
    use = uses(tpplan.compile_plan(model, plan_of(rules), 2))["model.layers.0.mlp"]
    assert (use.kind, use.parts, use.halves) == ("swiglu", ("gate_up_proj", "down_proj"), 0)


def test_the_plan_decides_by_kind_and_by_module() -> None:
    model, keywords = tiny_model("llama", device="meta")
    kernels = {"swiglu": "torch", "rms_norm": "triton", "model.layers.1": {"rms_norm": "torch"}}
    plan = tpplan.load_plan({"version": 1, "modules": {"model.layers.*.mlp.up_proj": "replicate"}, "kernels": kernels})
    found = uses(tpplan.compile_plan(model, plan, 2, keywords))
    assert found["model.layers.0.mlp"].refused == "the plan says `torch`"
    assert (found["model.norm"].choice, found["model.norm"].refused) == ("triton", "")
    assert found["model.layers.1.input_layernorm"].refused == "the plan says `torch`"


def test_equal_layers_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpplan.compiler.emit import substitute

    seen: list[int] = []
    stock = substitute.recognise
    monkeypatch.setattr(substitute, "recognise", lambda region: (seen.append(1), stock(region))[1])
    counts: list[int] = []
    for layers in (2, 6):
        seen.clear()
        model = nn.Sequential(*(Around(nn.GELU()) for _ in range(layers)))
        compiled(model, {"*.up": "colwise", "*.down": "rowwise"})
        counts.append(len(seen))
    assert counts[0] == counts[1]


def test_a_program_with_kernels_reads_back_equal() -> None:
    program = compiled(Around(nn.GELU()), MLP, x_BSH().requires_grad_())
    assert Program.from_dict(program.to_dict()).kernels == program.kernels != ()
