"""Rows of a table that peft trains: the table stays whole, as the refusal of `vocab` says."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import tpplan


def test_the_table_is_to_stay_whole() -> None:
    peft: Any = pytest.importorskip("peft")
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [1, 2]})
    model = peft.get_peft_model(LlamaForCausalLM(config), adapter)
    with pytest.raises(tpplan.CompileError, match=r"write `model\.embed_tokens: replicate`") as caught:
        tpplan.compile_plan(model, "llama", 2)
    assert caught.value.code == "TP101"
    plan = {"version": 1, "extends": "llama", "modules": {"model.embed_tokens": "replicate"}}
    assert tpplan.compile_plan(model, plan, 2).count_collectives()["all-reduce"]
