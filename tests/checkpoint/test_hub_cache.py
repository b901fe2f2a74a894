"""`from_pretrained` finds a model by its name in the cache of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tpplan
from tests.runtime.world import Member, world


def loaded(member: Member, cache: str) -> list[float]:
    from huggingface_hub import constants

    constants.HF_HUB_CACHE = cache
    model: Any = tpplan.from_pretrained("owner/small", "llama", member.mesh())
    return model(input_ids=torch.arange(6)[None]).logits.flatten().tolist()


@pytest.mark.processes
def test_a_model_s_name_is_enough(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    stock: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)).eval()
    cached = tmp_path / "models--owner--small"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0123")
    stock.save_pretrained(cached / "snapshots" / "0123")
    expected = stock(input_ids=torch.arange(6)[None]).logits.flatten().detach()
    for logits in world(2).run(loaded, str(tmp_path)):
        torch.testing.assert_close(torch.tensor(logits), expected)
