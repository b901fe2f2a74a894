"""Models of diffusers, tiny: transformers and U-Nets that remove noise, and autoencoders."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from tests.zoo.subject import Inputs, Subject, numbers, steady, tokens

_HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}


def _diffusers(maker: str, inputs: Inputs, /, **settings: Any) -> Subject:
    return Subject(lambda: getattr(import_module("diffusers"), maker)(**settings), steady(inputs), "diffusers")


def _noisy(channels: int = 4, side: int = 8, batch: int = 2) -> dict[str, Any]:
    return {"hidden_states": numbers(batch, channels, side, side), "timestep": torch.tensor([3.0, 7.0])[:batch]}


_TEXT = {"encoder_hidden_states": numbers(2, 6, 32, seed=2)}
_BLOCKS: dict[str, Any] = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
_sample: dict[str, Any] = {"sample": numbers(2, 4, 16, 16), "timestep": torch.tensor([3, 7])}

DIFFUSING: dict[str, Subject] = {
    "flux": _diffusers(
        "FluxTransformer2DModel",
        {"hidden_states": numbers(2, 16, 16), **_TEXT, "pooled_projections": numbers(2, 24, seed=3),
         "timestep": torch.tensor([0.3, 0.7]), "guidance": torch.tensor([3.5, 3.5]), "img_ids": numbers(16, 3).abs(),
         "txt_ids": torch.zeros(6, 3)},
        in_channels=16, **_HEADS, num_single_layers=2, joint_attention_dim=32, pooled_projection_dim=24,
        guidance_embeds=True, axes_dims_rope=(4, 2, 2),
    ),
    "sd3": _diffusers(
        "SD3Transformer2DModel",
        {**_noisy(), "encoder_hidden_states": numbers(2, 8, 32, seed=2), "pooled_projections": numbers(2, 24, seed=3)},
        sample_size=8, patch_size=2, in_channels=4, **_HEADS, joint_attention_dim=32, caption_projection_dim=32,
        pooled_projection_dim=24, out_channels=4, pos_embed_max_size=8,
    ),
    "sd3_qk_norm": _diffusers(
        "SD3Transformer2DModel", {**_noisy(), **_TEXT, "pooled_projections": numbers(2, 24, seed=3)}, sample_size=8,
        patch_size=2, in_channels=4, **_HEADS, joint_attention_dim=32, caption_projection_dim=32,
        pooled_projection_dim=24, out_channels=4, pos_embed_max_size=8, qk_norm="rms_norm", dual_attention_layers=(0,),
    ),
    "dit": _diffusers(
        "DiTTransformer2DModel", {**_noisy(), "timestep": torch.tensor([3, 7]), "class_labels": torch.tensor([1, 2])},
        in_channels=4, out_channels=8, sample_size=8, patch_size=2, **_HEADS, num_embeds_ada_norm=20,
    ),
    "pixart": _diffusers(
        "PixArtTransformer2DModel",
        {**_noisy(), **_TEXT, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}, sample_size=8,
        in_channels=4, out_channels=8, **_HEADS, cross_attention_dim=32, caption_channels=32,
        use_additional_conditions=False,
    ),
    "sana": _diffusers(
        "SanaTransformer2DModel", {**_noisy(), **_TEXT}, in_channels=4, out_channels=4, **_HEADS,
        num_cross_attention_heads=4, cross_attention_head_dim=8, cross_attention_dim=32, caption_channels=32,
        sample_size=8, patch_size=1, mlp_ratio=2.0,
    ),
    "auraflow": _diffusers(
        "AuraFlowTransformer2DModel", {**_noisy(), **_TEXT}, sample_size=8, in_channels=4, num_mmdit_layers=1,
        num_single_dit_layers=2, num_attention_heads=4, attention_head_dim=8, joint_attention_dim=32,
        caption_projection_dim=32, out_channels=4, pos_embed_max_size=16,
    ),
    "hunyuan_dit": _diffusers(
        "HunyuanDiT2DModel",
        {**_noisy(), **_TEXT, "text_embedding_mask": torch.ones(2, 6), "encoder_hidden_states_t5": numbers(2, 5, 24),
         "text_embedding_mask_t5": torch.ones(2, 5), "image_meta_size": numbers(2, 6).abs(),
         "style": torch.zeros(2, dtype=torch.long),
         "image_rotary_emb": (numbers(16, 8), numbers(16, 8, seed=2))},
        in_channels=4, sample_size=8, patch_size=2, **_HEADS, hidden_size=32, activation_fn="gelu-approximate",
        cross_attention_dim=32, cross_attention_dim_t5=24, pooled_projection_dim=16, text_len=6, text_len_t5=5,
    ),
    "cogvideox": _diffusers(
        "CogVideoXTransformer3DModel",
        {"hidden_states": numbers(2, 1, 4, 8, 8), **_TEXT, "timestep": torch.tensor([3, 7])}, **_HEADS, in_channels=4,
        out_channels=4, time_embed_dim=8, text_embed_dim=32, sample_width=8, sample_height=8, sample_frames=4,
        patch_size=2, temporal_compression_ratio=4, max_text_seq_length=6,
    ),
    "cogview4": _diffusers(
        "CogView4Transformer2DModel",
        {**_noisy(), **_TEXT, "original_size": torch.full((2, 2), 8.0), "target_size": torch.full((2, 2), 8.0),
         "crop_coords": torch.zeros(2, 2)},
        patch_size=2, in_channels=4, out_channels=4, **_HEADS, text_embed_dim=32, time_embed_dim=16, condition_dim=8,
        rope_axes_dim=(8, 8),
    ),
    "chroma": _diffusers(
        "ChromaTransformer2DModel",
        {"hidden_states": numbers(2, 16, 16), **_TEXT, "timestep": torch.tensor([0.3, 0.7]),
         "img_ids": numbers(16, 3).abs(), "txt_ids": torch.zeros(6, 3)},
        in_channels=16, **_HEADS, num_single_layers=2, joint_attention_dim=32, axes_dims_rope=(4, 2, 2),
        approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1,
    ),
    "wan": _diffusers(
        "WanTransformer3DModel",
        {"hidden_states": numbers(2, 4, 1, 8, 8), **_TEXT, "timestep": torch.tensor([3, 7])}, patch_size=(1, 2, 2),
        num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=32, freq_dim=16,
        ffn_dim=64, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    ),
    "ltx": _diffusers(
        "LTXVideoTransformer3DModel",
        {"hidden_states": numbers(2, 16, 4), **_TEXT, "timestep": torch.tensor([3.0, 7.0]),
         "encoder_attention_mask": torch.ones(2, 6), "num_frames": 1, "height": 4, "width": 4},
        in_channels=4, out_channels=4, **_HEADS, cross_attention_dim=32, caption_channels=32,
        qk_norm="rms_norm_across_heads",
    ),
    "mochi": _diffusers(
        "MochiTransformer3DModel",
        {"hidden_states": numbers(2, 4, 1, 8, 8), **_TEXT, "timestep": torch.tensor([3, 7]),
         "encoder_attention_mask": torch.ones(2, 6, dtype=torch.bool)},
        patch_size=2, **_HEADS, pooled_projection_dim=16, in_channels=4, out_channels=4, text_embed_dim=32,
        time_embed_dim=16, max_sequence_length=6,
    ),
    "hunyuan_video": _diffusers(
        "HunyuanVideoTransformer3DModel",
        {"hidden_states": numbers(2, 4, 1, 8, 8), **_TEXT, "timestep": torch.tensor([3, 7]),
         "encoder_attention_mask": torch.ones(2, 6, dtype=torch.long), "pooled_projections": numbers(2, 16),
         "guidance": torch.tensor([3.0, 3.0])},
        in_channels=4, out_channels=4, **_HEADS, num_single_layers=1, num_refiner_layers=1, patch_size=2,
        patch_size_t=1,
        text_embed_dim=32, pooled_projection_dim=16, rope_axes_dim=(4, 2, 2),
    ),

    "lumina2": _diffusers(
        "Lumina2Transformer2DModel", {**_noisy(), **_TEXT, "encoder_attention_mask": torch.ones(2, 6,
        dtype=torch.bool)},
        sample_size=8, patch_size=2, in_channels=4, hidden_size=32, num_layers=2, num_refiner_layers=1,
        num_attention_heads=4, num_kv_heads=2, multiple_of=16, cap_feat_dim=32, axes_dim_rope=(4, 2, 2),
        axes_lens=(32, 32, 32),
    ),
    "qwen_image": _diffusers(
        "QwenImageTransformer2DModel",
        {"hidden_states": numbers(2, 16, 16), **_TEXT, "timestep": torch.tensor([0.3, 0.7]),
         "encoder_hidden_states_mask": torch.ones(2, 6, dtype=torch.long), "img_shapes": [[(1, 4, 4)]] * 2},
        patch_size=2, in_channels=16, out_channels=4, **_HEADS, joint_attention_dim=32, axes_dims_rope=(4, 2, 2),
    ),
    "stable_audio": _diffusers(
        "StableAudioDiTModel",
        {"hidden_states": numbers(2, 4, 12), "timestep": torch.tensor([3.0, 7.0]), **_TEXT,
         "global_hidden_states": numbers(2, 1, 24)},
        sample_size=12, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        num_key_value_attention_heads=2, cross_attention_dim=32, time_proj_dim=8, global_states_input_dim=24,
        cross_attention_input_dim=32,
    ),
    "transformer_2d": _diffusers(
        "Transformer2DModel", {"hidden_states": numbers(2, 16, 8, 8), **_TEXT}, in_channels=16, norm_num_groups=4,
        **_HEADS, cross_attention_dim=32,
    ),
    "prior": _diffusers(

        "PriorTransformer",
        {"hidden_states": numbers(2, 16), "timestep": torch.tensor([3, 7]), "proj_embedding": numbers(2, 16, seed=2),
         "encoder_hidden_states": numbers(2, 6, 16)}, **_HEADS, embedding_dim=16, num_embeddings=6,
         additional_embeddings=4,
    ),
    "uvit": _diffusers(
        "UVit2DModel",
        {"input_ids": tokens(20, 2, 8, 8, least=0), "encoder_hidden_states": numbers(2, 6, 32),
         "pooled_text_emb": numbers(2, 16), "micro_conds": numbers(2, 5)},
        hidden_size=32, cond_embed_dim=16, micro_cond_encode_dim=8, micro_cond_embed_dim=40, encoder_hidden_size=32,
        vocab_size=24, codebook_size=20, in_channels=32, block_out_channels=32, num_res_blocks=1, block_num_heads=4,
        num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, sample_size=8,
    ),
    "unet_2d": _diffusers(
        "UNet2DModel", _sample, in_channels=4, out_channels=4, sample_size=16, **_BLOCKS, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "unet_2d_condition": _diffusers(
        "UNet2DConditionModel", {**_sample, **_TEXT}, sample_size=16, **_BLOCKS, cross_attention_dim=32,
        attention_head_dim=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ),
    "unet_sdxl": _diffusers(
        "UNet2DConditionModel",
        {**_sample, **_TEXT, "added_cond_kwargs": {"text_embeds": numbers(2, 16), "time_ids": numbers(2, 6).abs()}},
        sample_size=16, **_BLOCKS, cross_attention_dim=32, attention_head_dim=(2, 4), use_linear_projection=True,
        transformer_layers_per_block=(1, 2), addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=64, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ),
    "unet_3d_condition": _diffusers(
        "UNet3DConditionModel", {**_sample, "sample": numbers(2, 4, 3, 16, 16), **_TEXT}, **_BLOCKS,
        cross_attention_dim=32, attention_head_dim=4, down_block_types=("DownBlock3D", "CrossAttnDownBlock3D"),
        up_block_types=("CrossAttnUpBlock3D", "UpBlock3D"), sample_size=16,
    ),
    "controlnet": _diffusers(
        "ControlNetModel", {**_sample, **_TEXT, "controlnet_cond": numbers(2, 3, 128, 128)}, **_BLOCKS,
        cross_attention_dim=32, attention_head_dim=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        conditioning_embedding_out_channels=(8, 16, 16, 16),
    ),
    "autoencoder_kl": _diffusers(
        "AutoencoderKL", {"sample": numbers(2, 3, 16, 16)}, **_BLOCKS, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4,
    ),
    "vq_model": _diffusers(
        "VQModel", {"sample": numbers(2, 3, 16, 16)}, **_BLOCKS, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, num_vq_embeddings=16,
    ),
    "autoencoder_dc": _diffusers(
        "AutoencoderDC", {"sample": numbers(2, 3, 16, 16)}, latent_channels=4, attention_head_dim=8,
        encoder_block_types=("ResBlock", "EfficientViTBlock"), decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(16, 32), decoder_block_out_channels=(16, 32), encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1), encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)),
    ),
}  # fmt: skip
