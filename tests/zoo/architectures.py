"""Stock architectures in tiny configurations: two layers, sizes that differ from each other, an odd batch.

Heads are divisible by 4 and vocabularies too; grouped-query attention has 2 key and value heads, so that 4 ranks are
more than there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.torch_models import NanoGPT, mixture_of_experts, torch_decoder, torch_encoder

BATCH = 3
VOCABULARY = 88
LENGTH = 16
HIDDEN, HEADS, FEED = 48, 8, 80


@dataclass(frozen=True)
class Architecture:
    """How to build a tiny model.

    Attributes:
        kind: transformers' model type; "" if `maker` is a callable.
        maker: the name of transformers' auto class, or what makes the model.
        settings: the config's fields.
        inputs: makes the keywords of a call.
    """

    kind: str
    maker: str | Callable[[], nn.Module]
    settings: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]]


def tokens() -> dict[str, Tensor]:
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def only_tokens() -> dict[str, Tensor]:
    return {"input_ids": tokens()["input_ids"]}


def both_tokens() -> dict[str, Tensor]:
    shorter = torch.zeros(BATCH, LENGTH - 4, dtype=torch.long, device="meta")
    return tokens() | {"decoder_input_ids": shorter}


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.zeros(BATCH, 3, 32, 32, device="meta")}


def tokens_and_pixels() -> dict[str, Tensor]:
    return tokens() | pixels()


def siglip_inputs() -> dict[str, Tensor]:
    return only_tokens() | pixels()


def sound() -> dict[str, Tensor]:
    features = torch.zeros(BATCH, 20, 2 * LENGTH, device="meta")
    return {"input_features": features, "decoder_input_ids": tokens()["input_ids"][:, :12]}


_STOCK: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": FEED,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_GROUPED = {"num_key_value_heads": 2}
_ENCODER = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2: dict[str, Any] = {
    "n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS, "n_inner": FEED, "n_positions": 64, "vocab_size": VOCABULARY,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROWS = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
_BART: dict[str, Any] = {
    "d_model": HIDDEN, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": 4, "encoder_ffn_dim": FEED, "decoder_ffn_dim": 112, "use_cache": False,
    "vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3,
}  # fmt: skip
_TOWER = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": FEED}
_VISION = _TOWER | {"image_size": 32, "patch_size": 8}
_TEXT = _TOWER | {"hidden_size": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "projection_size": 24}
_SPECIAL = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}


def _masked(kind: str, /, **settings: Any) -> Architecture:
    return Architecture(kind, "AutoModelForMaskedLM", _STOCK | _ENCODER | settings, tokens)


def _causal(kind: str, /, **settings: Any) -> Architecture:
    return Architecture(kind, "AutoModelForCausalLM", _STOCK | settings, tokens)


def _named_otherwise(kind: str, /, **settings: Any) -> Architecture:
    """A causal language model whose config's fields have names of their own."""
    return Architecture(kind, "AutoModelForCausalLM", settings, tokens)


ARCHITECTURES: dict[str, Architecture] = {
    "bert": _masked("bert"),
    "roberta": _masked("roberta"),
    "electra": _masked("electra", embedding_size=32),
    "albert": _masked("albert", embedding_size=32),
    "deberta-v2": _masked(
        "deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, share_att_key=True,
        norm_rel_ebd="layer_norm", type_vocab_size=0, pooler_hidden_size=HIDDEN,
    ),
    "gpt2": _named_otherwise("gpt2", **_GPT2),
    "gpt_neox": _causal("gpt_neox", hidden_dropout=0.0, attention_dropout=0.0),
    "gpt_neo": _causal(
        "gpt_neo", hidden_size=HIDDEN, num_layers=2, num_heads=HEADS, attention_types=[[["global", "local"], 1]],
        intermediate_size=FEED, max_position_embeddings=64, window_size=5,
    ),
    "gptj": _named_otherwise("gptj", **_GPT2, rotary_dim=4),
    "gpt_bigcode": _named_otherwise("gpt_bigcode", **_GPT2, multi_query=True),
    "gpt_bigcode_mha": _named_otherwise("gpt_bigcode", **_GPT2, multi_query=False),
    "codegen": _named_otherwise("codegen", **_GPT2 | {"n_head": HEADS, "rotary_dim": 4}),
    "opt": _causal("opt", ffn_dim=FEED, word_embed_proj_dim=HIDDEN, dropout=0.0),
    "bloom": _causal("bloom", hidden_size=HIDDEN, n_layer=2, n_head=HEADS),
    "falcon_old": _causal("falcon", alibi=False, multi_query=True, parallel_attn=True, new_decoder_architecture=False),
    "falcon_alibi": _causal(
        "falcon", alibi=True, multi_query=False, parallel_attn=False, new_decoder_architecture=False, bias=True
    ),
    "falcon_new": _causal("falcon", alibi=False, new_decoder_architecture=True, num_kv_heads=2),
    "mpt": _named_otherwise(
        "mpt", d_model=HIDDEN, n_heads=HEADS, n_layers=2, expansion_ratio=2, max_seq_len=64,
        vocab_size=VOCABULARY, use_cache=False,
    ),
    "phi": _causal("phi", partial_rotary_factor=0.67, resid_pdrop=0.0, embd_pdrop=0.0),
    "phi3": _causal("phi3", resid_pdrop=0.0, embd_pdrop=0.0, **_GROUPED),
    "llama": _causal("llama", **_GROUPED),
    "mistral": _causal("mistral", **_GROUPED, sliding_window=5),
    "mixtral": _causal("mixtral", **_GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": _causal("qwen2", **_GROUPED),
    "qwen2_moe": _causal("qwen2_moe", **_GROUPED, **_EXPERTS, num_experts=4, shared_expert_intermediate_size=40),
    "qwen3": _causal("qwen3", **_GROUPED, head_dim=14),
    "qwen3_moe": _causal("qwen3_moe", **_GROUPED, **_EXPERTS, num_experts=4, head_dim=14),
    "gemma": _causal("gemma", num_key_value_heads=1, head_dim=14),
    "gemma2": _causal("gemma2", **_GROUPED, head_dim=14, sliding_window=5),
    "gemma3_text": _causal("gemma3_text", **_GROUPED, head_dim=14, sliding_window=5),
    "olmo2": _causal("olmo2", **_GROUPED),
    "cohere": _causal("cohere", **_GROUPED),
    "stablelm": _causal("stablelm", **_GROUPED, partial_rotary_factor=0.67),
    "starcoder2": _causal("starcoder2", **_GROUPED, residual_dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0),
    "diffllama": _causal("diffllama", num_key_value_heads=8),
    "glm4": _causal("glm4", **_GROUPED, head_dim=12, partial_rotary_factor=0.5),
    "granite": _causal("granite", **_GROUPED),
    "gpt_oss": _causal("gpt_oss", **_GROUPED, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": _causal("olmoe", num_key_value_heads=4, num_experts=4, num_experts_per_tok=2),
    "jetmoe": _causal("jetmoe", num_key_value_heads=4, kv_channels=8, num_local_experts=4, num_experts_per_tok=2),
    "granitemoe": _causal("granitemoe", **_GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": _causal(
        "deepseek_v3", **_EXPERTS, num_key_value_heads=8, n_routed_experts=4, n_group=2, topk_group=1, q_lora_rank=20,
        kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=10, v_head_dim=12, first_k_dense_replace=1,
    ),
    "t5": Architecture(
        "t5", "AutoModelForSeq2SeqLM",
        {"d_model": HIDDEN, "d_kv": 6, "d_ff": FEED, "num_layers": 2, "num_heads": HEADS, "vocab_size": VOCABULARY,
         "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0}, both_tokens,
    ),
    "switch_transformers": Architecture(
        "switch_transformers", "AutoModelForSeq2SeqLM",
        {"d_model": HIDDEN, "d_kv": 6, "d_ff": FEED, "num_layers": 2, "num_decoder_layers": 2, "num_heads": HEADS,
         "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4, "vocab_size": VOCABULARY,
         "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0}, both_tokens,
    ),
    "bart": Architecture("bart", "AutoModelForSeq2SeqLM", _BART | _ROWS | {"max_position_embeddings": 64}, both_tokens),
    "whisper": Architecture(
        "whisper", "AutoModelForSpeechSeq2Seq",
        _BART | _ROWS | {"num_mel_bins": 20, "max_source_positions": LENGTH, "max_target_positions": 24}, sound,
    ),
    "vit": Architecture("vit", "AutoModel", _VISION | _ENCODER, pixels),
    "clip": Architecture(
        "clip", "AutoModel",
        {"text_config": _TEXT | _SPECIAL, "vision_config": _VISION | {"projection_dim": 24}, "projection_dim": 24},
        tokens_and_pixels,
    ),
    "siglip": Architecture(
        "siglip", "AutoModel", {"text_config": _TEXT | {"hidden_size": HIDDEN, "projection_size": HIDDEN} | _SPECIAL,
                                "vision_config": _VISION}, siglip_inputs,
    ),
    "mamba": Architecture(
        "mamba", "AutoModelForCausalLM",
        {"hidden_size": HIDDEN, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 6, "time_step_rank": 4,
         "use_cache": False}, only_tokens,
    ),
    "mamba2": _named_otherwise(
        "mamba2", hidden_size=HIDDEN, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=6, num_heads=12,
        head_dim=8, n_groups=4, chunk_size=8, use_cache=False,
    ),
    "falcon_h1": _causal(
        "falcon_h1", **_GROUPED, head_dim=6, mamba_n_heads=16, mamba_d_head=6, mamba_d_ssm=96, mamba_d_state=6,
        mamba_n_groups=1, mamba_chunk_size=8,
    ),
    "qwen3_next": _causal(
        "qwen3_next", **_GROUPED, **_EXPERTS, num_experts=4, shared_expert_intermediate_size=40, head_dim=12,
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=4, linear_num_value_heads=8,
        linear_key_head_dim=6, linear_value_head_dim=10,
    ),
    "jamba": _causal(
        "jamba", **_GROUPED, num_experts=4, num_experts_per_tok=2, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1, mamba_d_state=6, mamba_dt_rank=4, use_mamba_kernels=False,
    ),
    "lfm2": _causal("lfm2", **_GROUPED, layer_types=["conv", "full_attention"]),
    "seed_oss": _causal("seed_oss", **_GROUPED, head_dim=14),
    "nanogpt": Architecture("", lambda: NanoGPT(VOCABULARY, HIDDEN, HEADS), {}, lambda: {"ids": tokens()["input_ids"]}),
    "experts_in_lists": Architecture(
        "", lambda: mixture_of_experts(VOCABULARY, HIDDEN, HEADS, FEED), {}, lambda: {"ids": tokens()["input_ids"]}
    ),
    "torch_encoder": Architecture("", lambda: torch_encoder(HIDDEN, HEADS, FEED), {}, lambda: _stream("src")),
    "torch_decoder": Architecture("", lambda: torch_decoder(HIDDEN, HEADS, FEED), {}, lambda: _stream("tgt", "memory")),
}  # fmt: skip


def _stream(*names: str) -> dict[str, Tensor]:
    return {name: torch.zeros(BATCH, LENGTH - 4 * i, HIDDEN, device="meta") for i, name in enumerate(names)}


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of this name and the keywords of a call, both without numbers."""
    architecture = ARCHITECTURES[name]
    with torch.device("meta"):
        return model_of(architecture), architecture.inputs()


def model_of(architecture: Architecture) -> nn.Module:
    """The model, on the default device."""
    if callable(architecture.maker):
        return architecture.maker()
    import transformers

    config = transformers.AutoConfig.for_model(architecture.kind, **architecture.settings)
    return getattr(transformers, architecture.maker).from_config(config)
