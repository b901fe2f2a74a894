"""Models of transformers, built of their config: every rank's parts, and what their configs and dtypes change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tpplan
from tests.initialize.compare import SEED, differences, on_meta, parts, stock_of, unlike, without_numbers
from tests.marking import slow_but, sweep_but
from tests.plans.parity import PLANS
from tests.zoo.architectures import ARCHITECTURES, model_of
from tpplan.hf.build import build_stock
from tpplan.initialize import InitializationError

ALL = [name for name, held in ARCHITECTURES.items() if held.kind]


def _make(name: str) -> nn.Module:
    return model_of(ARCHITECTURES[name])


def _cpu(name: str) -> dict[str, Any]:
    return {key: torch.ones_like(held, device="cpu") for key, held in ARCHITECTURES[name].inputs().items()}


@pytest.mark.parametrize("name", sweep_but(["llama", "gpt2", "bert", "mamba", "vit", "t5"], ALL))
def test_on_meta_without_a_plan(name: str) -> None:
    assert differences(lambda: _make(name), on_meta(lambda: _make(name))) == []


SHARDED = ["gpt2", "phi3", "mixtral", "albert", "gpt_oss", "qwen3_next", "falcon_h1", "clip", "whisper", "gpt_bigcode"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rank", sweep_but([1], [0, 1]))
@pytest.mark.parametrize("name", slow_but(["gpt2", "mixtral"], SHARDED))
def test_a_ranks_parts(name: str, rank: int) -> None:
    model = parts(lambda: _make(name), str(PLANS / f"{name}.yaml"), _cpu(name), rank)
    assert differences(lambda: _make(name), model) == []


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in ALL if (PLANS / f"{name}.yaml").exists()])
def test_parts_of_every_plan(name: str) -> None:
    for rank in range(2):
        model = parts(lambda: _make(name), str(PLANS / f"{name}.yaml"), _cpu(name), rank)
        assert differences(lambda: _make(name), model) == [], rank


def _llama(**settings: Any) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**{**ARCHITECTURES["llama"].settings, **settings})


@pytest.mark.parametrize("tied", [True, False])
def test_ties_follow_the_config(tied: bool) -> None:
    config = _llama(tie_word_embeddings=tied)

    def make() -> nn.Module:
        return transformers.LlamaForCausalLM(config)

    model: Any = on_meta(make)
    assert differences(make, model) == []
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_made_in_a_dtype(dtype: torch.dtype) -> None:
    def make() -> nn.Module:
        return transformers.AutoModelForCausalLM.from_config(_llama(), dtype=dtype)

    model = on_meta(make)
    assert differences(make, model) == [] and model.dtype == dtype
    assert torch.get_default_dtype() == torch.float32


def test_a_config_in_another_dtype_than_the_model() -> None:
    config = _llama(dtype="bfloat16")
    assert (
        differences(
            lambda: transformers.LlamaForCausalLM(config), on_meta(lambda: transformers.LlamaForCausalLM(config))
        )
        == []
    )


def test_a_model_that_was_cast_is_built_by_build() -> None:
    def make() -> nn.Module:
        return transformers.LlamaForCausalLM(_llama()).half()

    model = without_numbers(make())
    with pytest.raises(InitializationError, match=r"TP144(.|\n)*`model.rotary_emb.inv_freq` is float16, and float32"):
        tpplan.init_weights(model)
    assert all(held.is_meta for held in model.parameters())
    assert differences(make, model, make) == []


def test_a_changed_model_is_built_by_build() -> None:
    def make() -> nn.Module:
        model = transformers.LlamaForCausalLM(_llama())
        model.lm_head = nn.Linear(model.config.hidden_size, 3)
        return model

    model = without_numbers(make())
    with pytest.raises(InitializationError) as raised:
        tpplan.init_weights(model)
    text = str(raised.value)
    assert "`lm_head.bias` is in the model alone" in text
    assert "`lm_head.weight` has shape [3, 48], and [88, 48] in the stock model" in text
    assert differences(make, model, make) == []


def test_the_models_own_config_is_left_alone() -> None:
    model: Any = on_meta(lambda: _make("t5"))
    before = model.config.to_dict()
    tpplan.init_weights(model)
    assert model.config.to_dict() == before


def test_parts_train_as_the_model_does() -> None:
    """What is initialised is usable: parameters that require a gradient, and are leaves."""
    model = parts(lambda: _make("llama"), str(PLANS / "llama.yaml"), _cpu("llama"), 0)
    torch.manual_seed(SEED)
    tpplan.init_weights(model)
    assert all(p.requires_grad and p.is_leaf and p.grad_fn is None for p in model.parameters())
    assert unlike(model, stock_of(lambda: _make("llama"))[0]) == []


@pytest.mark.parametrize("missing", [False, True])
def test_parameters_that_the_library_keeps_in_float32(missing: bool) -> None:
    config = transformers.T5Config(**ARCHITECTURES["t5"].settings)
    model = build_stock(transformers.T5ForConditionalGeneration, config, torch.float16)
    assert {held.dtype for held in model.parameters()} == {torch.float16, torch.float32}

    def make() -> nn.Module:
        torch.set_default_dtype(torch.float16)
        try:
            stock = transformers.T5ForConditionalGeneration(config)
        finally:
            torch.set_default_dtype(torch.float32)
        for name, held in stock.named_parameters():
            held.data = held.data.to(model.get_parameter(name).dtype)
        return stock

    torch.manual_seed(SEED)
    assert unlike(tpplan.init_weights(model, device="cpu", missing=missing), stock_of(make)[0]) == []
