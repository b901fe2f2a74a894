"""Models that see pictures generate by plans that were suggested; two sharded models assist each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tpplan
from tests.generation.ways import subject
from tests.plans.parity import PLANS
from tests.runtime.test_caches import SETTINGS, scatter, tokens
from tests.runtime.world import Member, world

transformers: Any = pytest.importorskip("transformers")
RANKS = 2
SEEING: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
SPECIAL: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}
IMAGE, PLACES = 95, 4
Made = tuple[Any, dict[str, Tensor], dict[str, Tensor]]
"""A model, an example call, and what it generates from."""


def pictures(batch: int) -> Tensor:
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def patches(batch: int) -> Tensor:
    found = torch.rand(batch, 8, 14, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found[..., :2] = torch.arange(1.0, 9.0, dtype=torch.float64)[:, None]
    return found


def with_image(batch: int, length: int) -> dict[str, Tensor]:
    """Tokens in place of an image, and others after them."""
    ids = torch.cat([torch.full((batch, PLACES), IMAGE), tokens(batch, length)], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def described(decoder: Any) -> Made:
    """A picture's encoder, and a decoder of text."""
    vision = transformers.ViTConfig(**SEEING)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, decoder)
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    example = {"pixel_values": pictures(2), "decoder_input_ids": tokens(2, 6)}
    return transformers.VisionEncoderDecoderModel(config), example, {"pixel_values": pictures(3)}


def vision_gpt2() -> Made:
    return described(
        transformers.GPT2Config(
            n_embd=48, n_layer=1, n_head=4, vocab_size=96, n_positions=64, add_cross_attention=True, is_decoder=True,
            **SPECIAL,
        )
    )  # fmt: skip


def trocr() -> Made:
    return described(
        transformers.TrOCRConfig(
            d_model=48, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=64, vocab_size=96,
            max_position_embeddings=64, cross_attention_hidden_size=32,
        )
    )  # fmt: skip


def git() -> Made:
    config = transformers.GitConfig(
        vision_config=dict(SEEING), hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        vocab_size=96, max_position_embeddings=64, **SPECIAL,
    )  # fmt: skip
    mask = torch.ones(2, 6, dtype=torch.long)
    example = {"pixel_values": pictures(2), "input_ids": tokens(2, 6), "attention_mask": mask}
    return transformers.GitForCausalLM(config), example, {"pixel_values": pictures(3), "input_ids": tokens(3, 2)}


def pix2struct() -> Made:
    text = {
        "hidden_size": 48, "d_kv": 12, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 96,
        "decoder_start_token_id": 0,
    }  # fmt: skip
    vision = {
        "hidden_size": 48, "patch_embed_hidden_size": 12, "d_ff": 64, "d_kv": 12, "num_hidden_layers": 1,
        "num_attention_heads": 4, "seq_len": 32,
    }  # fmt: skip
    model = transformers.Pix2StructForConditionalGeneration(
        transformers.Pix2StructConfig(text_config=text, vision_config=vision)
    )
    example = {"flattened_patches": patches(2), "decoder_input_ids": tokens(2, 6)}
    return model, example, {"flattened_patches": patches(3)}


def blip2() -> Made:
    config = transformers.Blip2Config(
        vision_config=dict(SEEING), num_query_tokens=PLACES, image_token_index=IMAGE,
        qformer_config={
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
            "vocab_size": 96, "encoder_hidden_size": 32,
        },
        text_config={
            "model_type": "opt", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64,
            "vocab_size": 96, "word_embed_proj_dim": 48, "max_position_embeddings": 64,
        },
    )  # fmt: skip
    example = {"pixel_values": pictures(2), **with_image(2, 4)}
    return (
        transformers.Blip2ForConditionalGeneration(config),
        example,
        {"pixel_values": pictures(3), **with_image(3, 3)},
    )


MAKERS: dict[str, Callable[[], Made]] = {
    "git": git, "vision gpt2": vision_gpt2, "trocr": trocr, "pix2struct": pix2struct, "blip2": blip2,
}  # fmt: skip
OPTIONS: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"do_sample": True}]


def of_pictures(member: Member, name: str) -> list[dict[str, Any]]:
    """The options with which tokens aren't the stock model's."""
    torch.manual_seed(0)
    stock, example, given = MAKERS[name]()
    stock = stock.double().eval()
    scatter(stock)
    plan = tpplan.suggest_plan(stock, RANKS, inputs=example)
    own: Any = tpplan.parallelize(copy.deepcopy(stock), plan, member.mesh(), example).eval()
    found: list[dict[str, Any]] = []
    for options in OPTIONS:
        both: list[Tensor] = []
        for model in (stock, own):
            torch.manual_seed(5)
            both.append(model.generate(**given, **{**SETTINGS, **options}))
        found += [] if torch.equal(*both) else [options]
    return found


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize("name", MAKERS)
def test_tokens_for_pictures_are_those_of_the_stock_model(name: str) -> None:
    assert world(RANKS).run(of_pictures, name) == [[]] * RANKS


def assisted(member: Member, plan: str) -> list[str]:
    """The ways in which a sharded model that a sharded one assists doesn't give the stock models' tokens."""
    stock, assistant, example = subject(plan)
    own, helper = (
        tpplan.parallelize(copy.deepcopy(model), PLANS / f"{plan}.yaml", member.mesh(), example).eval()
        for model in (stock, assistant)
    )
    prompts = {"greedy": tokens(1, 8), "again": tokens(1, 4, 2).repeat(1, 3), "sampled": tokens(1, 8)}
    found: list[str] = []
    for name, ids in prompts.items():
        both: list[Tensor] = []
        for model, other in ((stock, assistant), (own, helper)):
            torch.manual_seed(5)
            options: dict[str, Any] = {**SETTINGS, "max_new_tokens": 8, "do_sample": name == "sampled"}
            generate: Any = model.generate
            both.append(generate(ids, attention_mask=torch.ones_like(ids), assistant_model=other, **options))
        found += [] if torch.equal(*both) else [name]
    return found


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("plan", ["llama", "llama-sequence"])
@pytest.mark.sweep
def test_a_sharded_model_assists_a_sharded_one(plan: str) -> None:
    assert world(RANKS).run(assisted, plan) == [[]] * RANKS
