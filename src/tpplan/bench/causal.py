"""Tiny models for the shipped plans of causal language models."""

from __future__ import annotations

from typing import Any

from tpplan.bench.subjects import SHIPPED, Architecture

_GROUPED = {"num_key_value_heads": 4}
_EXPERTS = _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}
_SPARSE = _EXPERTS | {"moe_intermediate_size": 32}


def _alike(kind: str, /, **settings: Any) -> Architecture:
    return Architecture(kind, settings=settings)


def _all_global(layers: int) -> list[Any]:
    return [[["global"], layers]]


_OTHERS = (
    _alike("bloom"),
    _alike("cohere", **_GROUPED),
    _alike(
        "deepseek_v3", num_key_value_heads=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        n_group=2, topk_group=1, q_lora_rank=20, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=10,
        v_head_dim=12, first_k_dense_replace=1,
    ),
    _alike("falcon", alibi=False, new_decoder_architecture=True, num_kv_heads=4),
    _alike(
        "falcon_h1", **_GROUPED, head_dim=8, mamba_n_heads=16, mamba_d_head=8, mamba_d_ssm=128, mamba_d_state=6,
        mamba_n_groups=1, mamba_chunk_size=8,
    ),
    _alike("gemma", num_key_value_heads=1, head_dim=8),
    _alike("gemma2", **_GROUPED, head_dim=8, sliding_window=5),
    _alike("gemma3_text", **_GROUPED, head_dim=8, sliding_window=5),
    _alike("glm4", **_GROUPED, head_dim=8, partial_rotary_factor=0.5, pad_token_id=1),
    _alike("gpt_bigcode", n_inner=128, multi_query=True),
    _alike("gpt_neo", attention_types=_all_global, window_size=5),
    _alike("gpt_oss", **_GROUPED, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    _alike("gptj", n_inner=128, rotary_dim=4),
    _alike("granite", **_GROUPED),
    _alike("granitemoe", **_GROUPED, num_local_experts=4, num_experts_per_tok=2),
    _alike("mamba", state_size=6, time_step_rank=4),
    _alike("mixtral", **_GROUPED, num_local_experts=4, num_experts_per_tok=2),
    _alike("mpt", expansion_ratio=2, max_seq_len=64),
    _alike("olmo2", **_GROUPED),
    _alike("olmoe", **_EXPERTS),
    _alike("phi"),
    _alike("phi3", **_GROUPED, pad_token_id=1),
    _alike("qwen2_moe", **_SPARSE, shared_expert_intermediate_size=64),
    _alike("qwen3_moe", **_SPARSE, head_dim=8),
    _alike(
        "qwen3_next", **_SPARSE, shared_expert_intermediate_size=64, head_dim=8, full_attention_interval=2,
        linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=6, linear_value_head_dim=10,
    ),
    _alike("stablelm", **_GROUPED),
    _alike("starcoder2", **_GROUPED),
)  # fmt: skip

CAUSAL: dict[str, Architecture] = dict(
    sorted(
        (
            {name: held for name, held in SHIPPED.items() if held.headed}
            | {held.kind: held for held in _OTHERS}
            | {"falcon-multi-query": _alike("falcon", alibi=False, multi_query=True, new_decoder_architecture=False)}
        ).items()
    )
)
"""By the name of the shipped plan, without `-sequence`."""

__all__ = ["CAUSAL"]
