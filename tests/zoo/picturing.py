"""transformers' models of text together with pictures or sounds, tiny."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.zoo.subject import Subject, numbers, of_transformers, steady, tokens

PICTURE = 7
_LAYERS: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip
_SPECIAL: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
_TEXT: dict[str, Any] = {**_LAYERS, "vocab_size": 88, "max_position_embeddings": 64, "use_cache": False, **_SPECIAL}
_VISION: dict[str, Any] = {**_LAYERS, "image_size": 32, "patch_size": 8}
_LLAMA: dict[str, Any] = {"model_type": "llama", **_TEXT, "num_key_value_heads": 2}
_CLIP: dict[str, Any] = {"model_type": "clip_vision_model", **_VISION, "projection_dim": 16}
_SIGLIP: dict[str, Any] = {"model_type": "siglip_vision_model", **_VISION, "vision_use_head": False}


def _ids(length: int = 12, pictures: int = 0, batch: int = 3) -> dict[str, Tensor]:
    """Tokens, of which some from the second on stand for a picture."""
    ids = tokens(88, batch, length)
    ids[:, 1 : 1 + pictures] = PICTURE
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _pixels(side: int = 32, batch: int = 3) -> dict[str, Tensor]:
    return {"pixel_values": numbers(batch, 3, side, side)}


_both = steady(_ids() | _pixels())
_boxes = torch.tensor([10, 20, 30, 40]).expand(3, 12, 4).contiguous()

# With 1, the default, layers without a rule of their own get weights of size 1: a softmax is saturated, and what comes
# back through it is rounding.
_FACTOR = 0.5

PICTURING: dict[str, Subject] = {
    "clipseg": of_transformers(
        "clipseg", "CLIPSegForImageSegmentation", _both, projection_dim=16, text_config={**_TEXT, "projection_dim": 16},
        vision_config={**_VISION}, reduce_dim=16, extract_layers=[0, 1], decoder_num_attention_heads=4,
        decoder_intermediate_size=32, initializer_factor=_FACTOR,
    ),
    "chinese_clip": of_transformers(
        "chinese_clip", "ChineseCLIPModel", _both, projection_dim=16, text_config=_TEXT, vision_config=_VISION
    ),
    "altclip": of_transformers(
        "altclip", "AltCLIPModel", _both, projection_dim=16, text_config={**_TEXT, "project_dim": 32},
        vision_config=_VISION,
    ),
    "owlvit": of_transformers(
        "owlvit", "OwlViTModel", _both, projection_dim=16, text_config=_TEXT, vision_config=_VISION
    ),
    "groupvit": of_transformers(
        "groupvit", "GroupViTModel", _both, projection_dim=16, projection_intermediate_dim=32, text_config=_TEXT,
        vision_config={**_VISION, "depths": [1, 1], "num_group_tokens": [4, 0], "num_output_groups": [4, 4],
                       "hidden_size": 32},
    ),
    "xclip": of_transformers(
        "xclip", "XCLIPModel",
        steady(_ids(batch=3) | {"pixel_values": numbers(2, 4, 3, 32, 32)}), projection_dim=32, text_config=_TEXT,
        vision_config={**_VISION, "num_frames": 4, "mit_hidden_size": 32, "mit_intermediate_size": 64,
                       "mit_num_attention_heads": 4}, prompt_num_attention_heads=4, initializer_factor=_FACTOR,
    ),
    "blip": of_transformers(
        "blip", "BlipForConditionalGeneration", _both,
        text_config={**_TEXT, "encoder_hidden_size": 32, "projection_dim": 16, "bos_token_id": 2, "sep_token_id": 3},
        vision_config=_VISION, projection_dim=16,
    ),
    "blip_retrieval": of_transformers(
        "blip", "BlipForImageTextRetrieval", _both, text_config={**_TEXT, "encoder_hidden_size": 32},
        vision_config=_VISION, projection_dim=16, image_text_hidden_size=16,
    ),
    "blip2": of_transformers(
        "blip-2", "Blip2ForConditionalGeneration", steady(_ids(16, 4) | _pixels()), vision_config=_VISION,
        num_query_tokens=4, image_token_index=PICTURE,
        qformer_config={**_LAYERS, "vocab_size": 88, "encoder_hidden_size": 32},
        text_config={"model_type": "opt", **_TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32},
    ),
    "instructblip": of_transformers(
        "instructblip", "InstructBlipForConditionalGeneration",
        steady(_ids(16, 4) | _pixels() | {"qformer_input_ids": tokens(88, 3, 8)}), vision_config=_VISION,
        num_query_tokens=4, image_token_index=PICTURE,
        qformer_config={**_LAYERS, "vocab_size": 88, "encoder_hidden_size": 32, "max_position_embeddings": 64},
        text_config={"model_type": "opt", **_TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32},
    ),
    "vilt": of_transformers(
        "vilt", "ViltModel", steady(_ids() | _pixels() | {"pixel_mask": torch.ones(3, 32, 32).long()}),
        **{**_VISION, "vocab_size": 88, "max_position_embeddings": 64},
    ),
    "git": of_transformers("git", "GitForCausalLM", _both, **_TEXT, vision_config=_VISION),
    "flava": of_transformers(
        "flava", "FlavaModel", _both, text_config=_TEXT, image_config=_VISION, multimodal_config=_LAYERS,
        hidden_size=32, projection_dim=16,
    ),
    "bridgetower": of_transformers(
        "bridgetower", "BridgeTowerModel", steady(_ids() | _pixels() | {"pixel_mask": torch.ones(3, 32, 32).long()}),
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2,
        text_config={**_LAYERS, "vocab_size": 88, "max_position_embeddings": 64},
        vision_config={"hidden_size": 64, "num_hidden_layers": 3, "image_size": 32, "patch_size": 8},
    ),
    "lxmert": of_transformers(
        "lxmert", "LxmertModel",
        steady(_ids() | {"visual_feats": numbers(3, 5, 20), "visual_pos": numbers(3, 5, 4).abs()}), vocab_size=88,
        hidden_size=32, num_attention_heads=4, intermediate_size=64, l_layers=2, x_layers=2, r_layers=2,
        visual_feat_dim=20, max_position_embeddings=64,
    ),
    "visual_bert": of_transformers(
        "visual_bert", "VisualBertModel",
        steady(_ids() | {"visual_embeds": numbers(3, 4, 20), "visual_attention_mask": torch.ones(3, 4)}),
        **_TEXT, visual_embedding_dim=20,
    ),
    "layoutlm": of_transformers(
        "layoutlm", "LayoutLMModel", steady(_ids() | {"bbox": _boxes}), **_TEXT, max_2d_position_embeddings=64
    ),
    "layoutlmv3": of_transformers(
        "layoutlmv3", "LayoutLMv3Model", steady(_ids() | {"bbox": _boxes} | _pixels()), **_TEXT, coordinate_size=5,
        shape_size=6, max_2d_position_embeddings=64, input_size=32, patch_size=8, visual_embed=True,
    ),
    "lilt": of_transformers("lilt", "LiltModel", steady(_ids() | {"bbox": _boxes}),
                            **{**_TEXT, "hidden_size": 48}, max_2d_position_embeddings=64),
    "udop": of_transformers(
        "udop", "UdopForConditionalGeneration",
        steady(_ids() | {"bbox": _boxes / 100.0, "decoder_input_ids": tokens(88, 3, 8)} | _pixels()), vocab_size=88,
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, image_size=32, patch_size=8, dropout_rate=0.0,
        use_cache=False, max_2d_position_embeddings=64,
    ),
    "pix2struct": of_transformers(
        "pix2struct", "Pix2StructForConditionalGeneration",
        steady({"flattened_patches": numbers(3, 8, 14).abs(), "decoder_input_ids": tokens(88, 3, 8)}),
        text_config={"hidden_size": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 88,
                     "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0},
        vision_config={"hidden_size": 32, "patch_embed_hidden_size": 12, "d_ff": 64, "d_kv": 8, "num_hidden_layers": 2,
                       "num_attention_heads": 4, "seq_len": 32, "dropout_rate": 0.0},
    ),
    "kosmos2": of_transformers(
        "kosmos-2", "Kosmos2Model",
        steady(_ids(16) | _pixels() | {"image_embeds_position_mask": torch.eye(16)[1:5].sum(0).expand(3, 16).long()}),
        text_config={"vocab_size": 88, "embed_dim": 32, "layers": 2, "ffn_dim": 64, "attention_heads": 4,
                     "max_position_embeddings": 64, "dropout": 0.0, "use_cache": False, **_SPECIAL},
        vision_config=_VISION, latent_query_num=4,
    ),
    "paligemma": of_transformers(
        "paligemma", "PaliGemmaForConditionalGeneration", steady(_ids(24, 16) | _pixels()), vision_config=_SIGLIP,
        text_config={"model_type": "gemma", **_TEXT, "num_key_value_heads": 1, "head_dim": 8},
        image_token_index=PICTURE, projection_dim=32,
    ),
    "aya_vision": of_transformers(
        "aya_vision", "AyaVisionForConditionalGeneration", steady(_ids(24, 4) | _pixels()), vision_config=_SIGLIP,
        text_config={"model_type": "cohere2", **_TEXT, "num_key_value_heads": 2, "layer_types": ["full_attention"] * 2},
        image_token_index=PICTURE, downsample_factor=2, vision_feature_layer=-1, alignment_intermediate_size=64,
    ),
    "llava_next": of_transformers(
        "llava_next", "LlavaNextForConditionalGeneration",
        steady(_ids(64, 52, 2) | {"pixel_values": numbers(2, 3, 3, 32, 32),
                                  "image_sizes": torch.tensor([[32, 64], [32, 64]])}),
        vision_config=_CLIP, text_config={**_LLAMA, "max_position_embeddings": 128}, image_token_index=PICTURE,
        vision_feature_layer=-1, image_grid_pinpoints=[[32, 64], [64, 32]],
    ),
    "vipllava": of_transformers(
        "vipllava", "VipLlavaForConditionalGeneration", steady(_ids(24, 16) | _pixels()), vision_config=_CLIP,
        text_config=_LLAMA, image_token_index=PICTURE, vision_feature_layers=[-1, -2],
    ),
    "video_llava": of_transformers(
        "video_llava", "VideoLlavaForConditionalGeneration",
        steady(_ids(24, 17) | {"pixel_values_images": numbers(3, 3, 32, 32)}), vision_config=_CLIP, text_config=_LLAMA,
        image_token_index=PICTURE, video_token_index=8, vision_feature_layer=-1,
        image_seq_length=17, vision_feature_select_strategy="full",
    ),
    "mistral3": of_transformers(
        "mistral3", "Mistral3ForConditionalGeneration",
        steady(_ids(24, 4) | _pixels() | {"image_sizes": torch.tensor([[32, 32]] * 3)}),
        vision_config={"model_type": "pixtral", **_VISION, "head_dim": 8},
        text_config={"model_type": "mistral", **_TEXT, "num_key_value_heads": 2, "head_dim": 8},
        image_token_index=PICTURE, spatial_merge_size=2, vision_feature_layer=-1,
    ),
    "idefics2": of_transformers(
        "idefics2", "Idefics2ForConditionalGeneration", steady(_ids(24, 4) | {"pixel_values": numbers(3, 1, 3, 32,
        32)}),
        vision_config=_VISION, text_config={"model_type": "mistral", **_TEXT, "num_key_value_heads": 2, "head_dim": 8},
        perceiver_config={"resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4,
                          "resampler_head_dim": 8, "num_key_value_heads": 2, "hidden_size": 32}, image_token_id=PICTURE,
    ),
    "smolvlm": of_transformers(
        "smolvlm", "SmolVLMForConditionalGeneration", steady(_ids(24, 4) | {"pixel_values": numbers(3, 1, 3, 32, 32)}),
        vision_config=_VISION, text_config=_LLAMA, scale_factor=2, image_token_id=PICTURE,
    ),
    "mllama": of_transformers(
        "mllama", "MllamaForConditionalGeneration",
        steady(_ids(16, 1, 2) | {
            "pixel_values": numbers(2, 1, 1, 3, 32, 32), "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(2, 1, 1, dtype=torch.long),
            "cross_attention_mask": torch.ones(2, 16, 1, 1, dtype=torch.long)}),
        vision_config={"hidden_size": 32, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 4,
                       "intermediate_size": 64, "image_size": 32, "patch_size": 8, "max_num_tiles": 1,
                       "vision_output_dim": 64, "intermediate_layers_indices": [0], "num_channels": 3,
                       "supported_aspect_ratios": [[1, 1]]},
        text_config={**_TEXT, "num_key_value_heads": 2, "cross_attention_layers": [1],
                     "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, image_token_index=PICTURE,
    ),
    "florence2": of_transformers(
        "florence2", "Florence2ForConditionalGeneration",
        steady(_ids(32, 17) | _pixels(64) | {"decoder_input_ids": tokens(88, 3, 8)}), image_token_id=PICTURE,
        vision_config={"depths": [1, 1], "embed_dim": [16, 32], "num_heads": [4, 4], "num_groups": [4, 4],
                       "window_size": 4, "patch_size": [7, 3], "patch_stride": [4, 4], "patch_padding": [3, 1],
                       "patch_prenorm": [False, True], "projection_dim": 32, "image_size": 64},
        text_config={"model_type": "bart", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
                     "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
                     "decoder_ffn_dim": 64, "vocab_size": 88, "max_position_embeddings": 64, "use_cache": False,
                     "decoder_start_token_id": 3, **_SPECIAL},
    ),
    "chameleon": of_transformers(
        "chameleon", "ChameleonForConditionalGeneration", steady(_ids()), **_TEXT, num_key_value_heads=2,
        vq_config={"embed_dim": 16, "num_embeddings": 16, "latent_channels": 16, "resolution": 16, "base_channels": 32,
                   "channel_multiplier": [1, 1], "num_res_blocks": 1},
        vocabulary_map={"<image>": PICTURE, "IMGIMGA": 5},
    ),
    "got_ocr2": of_transformers(
        "got_ocr2", "GotOcr2ForConditionalGeneration", steady(_ids(24, 4, 2) | {"pixel_values": numbers(2, 3, 64, 64)}),
        vision_config={**_VISION, "image_size": 64, "output_channels": 16, "window_size": 4, "global_attn_indexes": [1],
                       "mlp_dim": 64, "num_pos_feats": 8},
        text_config={"model_type": "qwen2", **_TEXT, "num_key_value_heads": 2}, image_token_index=PICTURE,
    ),
    "qwen2_audio": of_transformers(
        "qwen2_audio", "Qwen2AudioForConditionalGeneration",
        steady(_ids(24, 8, 2) | {"input_features": numbers(2, 20, 64),
                                 "feature_attention_mask": torch.tensor([[1] * 32 + [0] * 32] * 2)}),
        audio_config={"model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 2,
                      "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "num_mel_bins": 20,
                      "max_source_positions": 32, "encoder_layerdrop": 0.0},
        text_config={"model_type": "qwen2", **_TEXT, "num_key_value_heads": 2}, audio_token_index=PICTURE,
    ),
    "voxtral": of_transformers(
        "voxtral", "VoxtralForConditionalGeneration",
        steady(_ids(24, 8, 2) | {"input_features": numbers(2, 20, 64)}),
        audio_config={"model_type": "voxtral_encoder", **_LAYERS, "intermediate_size": 128, "num_mel_bins": 20,
                      "max_source_positions": 32, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4,
                      "encoder_ffn_dim": 128},
        text_config={**_LLAMA, "head_dim": 8}, audio_token_id=PICTURE,
    ),
    "grounding_dino": of_transformers(
        "grounding-dino", "GroundingDinoModel",
        steady(_ids(12, 0, 2) | {"pixel_values": numbers(2, 3, 64, 64)}), d_model=32, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        num_queries=8, num_feature_levels=3, text_config={"model_type": "bert", **_TEXT}, dropout=0.0,
        backbone_config={"model_type": "swin", "image_size": 64, "patch_size": 4, "embed_dim": 16,
                         "depths": [1, 1, 1, 1], "num_heads": [4, 4, 4, 4], "window_size": 2,
                         "out_features": ["stage2", "stage3", "stage4"]},
    ),
    "vision_text_dual": Subject(
        lambda: _dual(), _both
    ),
}  # fmt: skip


def _dual() -> Any:
    import transformers

    text = transformers.BertConfig(**_TEXT)
    vision = transformers.ViTConfig(**_VISION)
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(vision, text, projection_dim=16)
    return transformers.VisionTextDualEncoderModel(config)
