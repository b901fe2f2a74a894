"""Tiny models for every shipped plan: two layers, sizes that differ from each other, an odd batch, nothing symmetric.

`tiny_model("llama")` gives a stock model and the keywords of a call. Every parameter is random, norms and biases too,
so that a wrong gradient shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.torch_transformer import TorchTransformer

BATCH = 3
SEQUENCE = 12
VOCABULARY = 88


@dataclass(frozen=True)
class Architecture:
    """How to build a tiny model of one kind.

    Attributes:
        kind: transformers' model type; "" for a model of our own.
        headed: whether it's a causal language model, or the base model.
        settings: fields of the config, beyond the common ones.
        coarsest: the coarsest floating-point type that the model computes in, whatever the dtype of its parameters.
    """

    kind: str
    headed: bool = True
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    coarsest: torch.dtype = torch.float64


_COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 80,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "use_cache": False,
}
_GROUPED = {"num_key_value_heads": 4}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

# transformers' RMSNorms compute in float32 whatever comes in.
ARCHITECTURES: dict[str, Architecture] = {
    "bert": Architecture("bert", headed=False, settings=_NO_DROPOUT),
    "roberta": Architecture("roberta", headed=False, settings=_NO_DROPOUT),
    "llama": Architecture("llama", settings=_GROUPED, coarsest=torch.float32),
    "mistral": Architecture("mistral", settings=_GROUPED | {"sliding_window": 5}, coarsest=torch.float32),
    "qwen2": Architecture("qwen2", settings=_GROUPED, coarsest=torch.float32),
    "qwen3": Architecture("qwen3", settings=_GROUPED | {"head_dim": 14}, coarsest=torch.float32),
    "gpt_neox": Architecture("gpt_neox"),
    "opt": Architecture("opt", settings={"ffn_dim": 80, "word_embed_proj_dim": 48, "dropout": 0.0}),
    "gpt2": Architecture("gpt2", settings={"n_inner": 80, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "phi3": Architecture("phi3", settings=_GROUPED | {"pad_token_id": 0}, coarsest=torch.float32),
    "torch_transformer": Architecture(""),
}


def tiny_model(
    name: str, *, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0, **settings: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """A stock model in training mode, without dropout unless `settings` ask for it, and the keywords of a call.

    Args:
        name: of a plan in plans/.
        dtype: of the parameters.
        device: where it's built; on "meta" it has no numbers.
        seed: of the parameters and inputs.
        settings: fields of the config to change, or for `torch_transformer` arguments of its constructor.
    """
    architecture = ARCHITECTURES[name]
    with torch.device(device):
        model = _build(architecture, settings)
    model = model.to(dtype).train()
    if device != "meta":
        _randomise(model, seed)
    return model, example_keywords(name, seed=seed)


def _build(architecture: Architecture, settings: dict[str, Any]) -> nn.Module:
    if not architecture.kind:
        return TorchTransformer(vocabulary=VOCABULARY, **settings)
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = AutoConfig.for_model(architecture.kind, **{**_COMMON, **architecture.settings, **settings})
    return (AutoModelForCausalLM if architecture.headed else AutoModel).from_config(config)


def _randomise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() == 1:
                parameter.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def example_keywords(name: str, *, batch: int = BATCH, sequence: int = SEQUENCE, seed: int = 0) -> dict[str, Any]:
    """Token ids of a call, with a mask that hides the end of the first row where the model takes one."""
    generator = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(VOCABULARY, (batch, sequence), generator=generator)
    if not ARCHITECTURES[name].kind:
        return {"ids": ids}
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def first_output(result: Any) -> Tensor:
    """The tensor to look at: logits, or the last hidden states."""
    return result if isinstance(result, Tensor) else result[0]


def output_tensors(result: Any) -> list[Tensor]:
    """Every tensor of a result."""
    if isinstance(result, Tensor):
        return [result]
    items = result.values() if isinstance(result, dict) else result
    return [tensor for item in items if item is not None for tensor in output_tensors(item)]
