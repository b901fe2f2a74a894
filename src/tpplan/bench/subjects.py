"""The models that are measured, and the plans for them in tpplan's and in torch's own terms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from tpplan.bench.plain_llama import PlainLlama


@dataclass(frozen=True, slots=True)
class ToySizes:
    """Sizes of a toy Llama, so small that what's measured is Python.

    Attributes:
        hidden, intermediate, layers, heads, vocabulary: of the model.
        key_heads: of keys and values; as many as heads where 0.
        batch, sequence: of a call.
    """

    hidden: int = 64
    intermediate: int = 128
    layers: int = 4
    heads: int = 4
    vocabulary: int = 256
    batch: int = 2
    sequence: int = 16
    key_heads: int = 0


def toy_llama(kind: str, sizes: ToySizes) -> nn.Module:
    """A toy Llama in evaluation mode: transformers' own (`transformers`), or the one on plain torch.nn (`plain`)."""
    torch.manual_seed(0)
    if kind == "plain":
        return PlainLlama(
            sizes.vocabulary, sizes.hidden, sizes.intermediate, sizes.layers, sizes.heads, sizes.sequence
        ).eval()
    return tiny_transformer(
        Architecture("llama"),
        layers=sizes.layers,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_heads or sizes.heads,
        vocab_size=sizes.vocabulary,
    )


def toy_call(sizes: ToySizes) -> dict[str, Tensor]:
    """The keywords of a call of a toy Llama."""
    return {"input_ids": torch.arange(sizes.batch * sizes.sequence).view(sizes.batch, -1) % sizes.vocabulary}


def torch_plan(layers: int) -> dict[str, ParallelStyle]:
    """What the shipped plan `llama` says, for `parallelize_module`."""
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"{prefix}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"{prefix}.{name}"] = RowwiseParallel()
    return plan


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of transformers.

    Attributes:
        kind: its model type.
        headed: whether the causal language model is meant, or the bare one.
        settings: fields of a tiny config, beyond the common ones; a function is asked with the number of layers.
    """

    kind: str
    headed: bool = True
    settings: dict[str, Any] = field(default_factory=dict[str, Any])


_GROUPED = {"num_key_value_heads": 4}
SHIPPED: dict[str, Architecture] = {
    "bert": Architecture("bert", headed=False),
    "gpt2": Architecture("gpt2", settings={"n_inner": 128}),
    "gpt_neox": Architecture("gpt_neox"),
    "llama": Architecture("llama", settings=_GROUPED),
    "mistral": Architecture("mistral", settings=_GROUPED),
    "opt": Architecture("opt", settings={"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "qwen2": Architecture("qwen2", settings=_GROUPED),
    "qwen3": Architecture("qwen3", settings=_GROUPED | {"head_dim": 8}),
    "roberta": Architecture("roberta", headed=False),
}
"""By the name of the shipped plan."""


def tiny_transformer(architecture: Architecture, layers: int, device: str = "cpu", **settings: Any) -> nn.Module:
    """A tiny stock model in evaluation mode."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    common: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "intermediate_size": 128,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "use_cache": False,
    }
    own = {name: held(layers) if callable(held) else held for name, held in architecture.settings.items()}
    config: Any = AutoConfig.for_model(architecture.kind, **{**common, **own, **settings})
    maker: Any = AutoModelForCausalLM if architecture.headed else AutoModel
    with torch.device(device):
        return maker.from_config(config).eval()


def llama_405b(layers: int) -> nn.Module:
    """Llama 3.1 405B's shape with `layers` layers (of 126), on `meta`."""
    return tiny_transformer(
        Architecture("llama"),
        layers,
        device="meta",
        hidden_size=16384,
        intermediate_size=53248,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    )


def first_tensor(result: Any) -> Tensor:
    """The logits or hidden states of a call."""
    return result if isinstance(result, Tensor) else result[0]
