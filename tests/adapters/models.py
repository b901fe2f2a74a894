"""Small models with peft's adapters, in float64; the reference and the one to shard are equal."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

IDS = torch.arange(48).reshape(3, 16) % 61
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}


def llama(**fields: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    given: dict[str, Any] = {**_SIZES, "vocab_size": 64, "num_key_value_heads": 4, **fields}
    config = LlamaConfig(**given)
    return LlamaForCausalLM(config).double()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    still: dict[str, Any] = {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=64, n_positions=64, **still)
    return GPT2LMHeadModel(config).double()


def phi3() -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    config = Phi3Config(**_SIZES, vocab_size=64, num_key_value_heads=4, pad_token_id=0, bos_token_id=0, eos_token_id=1)
    return Phi3ForCausalLM(config).double()


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    still: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**_SIZES, vocab_size=64, max_position_embeddings=64, **still)).double()


def adapted(make: Callable[[], nn.Module], *configs: Any, **options: Any) -> Any:
    """A model with adapters that change its results; the further configs are of adapters `b`, `c` …"""
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = get_peft_model(make(), configs[0] if configs else lora(**options))
        for name, config in zip("bcd", configs[1:], strict=False):
            model.add_adapter(name, config)
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "base_layer" not in name and any(kind in name for kind in ("lora_", "ia3_", "prompt")):
                parameter.copy_(torch.randn(parameter.shape, generator=numbers, dtype=torch.float64) * 0.1)
    return model.double()


def lora(**options: Any) -> Any:
    from peft import LoraConfig

    given: dict[str, Any] = {"r": 4, "target_modules": ALL, **options}
    return LoraConfig(**given)


def stepped(model: Any, keywords: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The logits of a call, and the gradients of all parameters that require one, whole."""
    model.zero_grad()
    logits = model(**keywords).logits
    if logits.requires_grad:  # transformers' own loss would be in float32
        functional.cross_entropy(logits[:, :-1].flatten(0, 1), keywords["input_ids"][:, 1:].flatten()).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return whole(logits), {name: None if p.grad is None else whole(p.grad) for name, p in trained.items()}


def assert_same_step(ours: Any, stock: Any, keywords: Mapping[str, Any] | None = None) -> None:
    """Hold a sharded model against the unsharded one."""
    keywords = {"input_ids": IDS} if keywords is None else keywords
    logits, gradients = stepped(ours, keywords)
    wanted, wanted_gradients = stepped(stock, keywords)
    assert_near(logits, wanted, "logits")
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in wanted_gradients.items():
        held = gradients[name]
        assert (held is None) == (gradient is None), name
        if gradient is not None and held is not None:
            assert_near(held, gradient, name)


def assert_near(ours: Tensor, wanted: Tensor, name: str) -> None:
    """Equal but for the rounding to float32, in which transformers' norms compute whatever the model's dtype is."""
    error, scale = (ours - wanted).abs().max(), wanted.abs().max()
    assert ours.shape == wanted.shape and error <= 100 * torch.finfo(torch.float32).eps * scale, (name, error, scale)


def whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
