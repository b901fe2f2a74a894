"""Models of other packages, tiny: timm, torchvision, open_clip, esm, torchtune, litgpt, x-transformers."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from tests.zoo.subject import Subject, numbers, steady, tokens

_SMALL: dict[str, Any] = {"img_size": 32, "num_classes": 10}
_VIT: dict[str, Any] = {**_SMALL, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
_pictures = steady((numbers(3, 3, 32, 32),))
_larger = steady((numbers(3, 3, 64, 64),))
_ids = steady((tokens(88, 3, 12),))


def _timm(name: str, /, inputs: Any = _pictures, **settings: Any) -> Subject:
    return Subject(lambda: import_module("timm").create_model(name, **settings), inputs, "timm")


def _timm_class(place: str, /, inputs: Any = _pictures, **settings: Any) -> Subject:
    module, _, name = place.rpartition(".")
    return Subject(
        lambda: getattr(import_module(f"timm.models.{module}"), name)(num_classes=10, **settings), inputs, "timm"
    )


def _vision(name: str, /, inputs: Any = _larger, **settings: Any) -> Subject:
    def make() -> nn.Module:
        return getattr(import_module("torchvision").models, name)(num_classes=10, **settings)

    return Subject(make, inputs, "torchvision")


def _litgpt(**settings: Any) -> Subject:
    usual: dict[str, Any] = {
        "block_size": 32, "vocab_size": 88, "padded_vocab_size": 88, "n_layer": 2, "n_head": 4, "n_embd": 32,
        "intermediate_size": 64,
    }  # fmt: skip
    return Subject(
        lambda: import_module("litgpt").GPT(import_module("litgpt").Config(**usual | settings)), _ids, "litgpt"
    )


def _torchtune(family: str, maker: str, /, **settings: Any) -> Subject:
    usual: dict[str, Any] = {
        "vocab_size": 88, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 32,
    }  # fmt: skip

    def make() -> nn.Module:
        return getattr(import_module(f"torchtune.models.{family}"), maker)(**usual | settings)

    return Subject(make, _ids, "torchtune")


def _x(make: Callable[[Any], nn.Module], inputs: Any = _ids) -> Subject:
    return Subject(lambda: make(import_module("x_transformers")), inputs, "x_transformers")


def _x_decoder(**settings: Any) -> Subject:
    return _x(
        lambda x: x.TransformerWrapper(
            num_tokens=88, max_seq_len=32, attn_layers=x.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **settings)
        )
    )


def _clip(**settings: Any) -> Subject:
    def make() -> nn.Module:
        vision = {"image_size": 32, "layers": 2, "width": 32, "patch_size": 8, "head_width": 8} | settings
        text = {"context_length": 12, "vocab_size": 88, "width": 32, "heads": 4, "layers": 2}
        return import_module("open_clip").CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text)

    return Subject(make, steady((numbers(3, 3, 32, 32), tokens(88, 3, 12))), "open_clip")


def _coca() -> Subject:
    def make() -> nn.Module:
        text = {"context_length": 12, "vocab_size": 88, "width": 32, "heads": 4, "layers": 2, "embed_cls": True,
                "output_tokens": True, "pad_id": 0}  # fmt: skip
        model = import_module("open_clip").CoCa(
            embed_dim=32, text_cfg=text,
            multimodal_cfg={"context_length": 12, "vocab_size": 88, "width": 32, "heads": 4, "layers": 2},
            vision_cfg={"image_size": 32, "layers": 2, "width": 32, "patch_size": 8, "head_width": 8,
                        "attentional_pool": True, "attn_pooler_heads": 4, "output_tokens": True},
        )  # fmt: skip
        nn.init.normal_(model.text_decoder.text_projection, std=0.1)  # which it leaves as memory happens to be
        return model

    return Subject(make, steady((numbers(3, 3, 32, 32), tokens(88, 3, 12))), "open_clip")


def _esm2() -> nn.Module:
    return import_module("esm").ESM2(num_layers=2, embed_dim=32, attention_heads=4)


PACKAGES: dict[str, Subject] = {
    "timm_vit": _timm("vit_tiny_patch16_224", **_VIT),
    "timm_vit_swiglu": _timm("vit_giant_patch14_reg4_dinov2", **_VIT | {"mlp_ratio": 2.0}),
    "timm_deit3": _timm("deit3_small_patch16_224", **_VIT),
    "timm_eva02": _timm("eva02_tiny_patch14_224", **_VIT, inputs=_pictures),
    "timm_cait": _timm("cait_xxs24_224", **_VIT),
    "timm_xcit": _timm("xcit_nano_12_p16_224", **_VIT),
    "timm_beit": _timm("beit_base_patch16_224", **_VIT),
    "timm_naflexvit": _timm("naflexvit_base_patch16_gap", num_classes=10, patch_size=8, embed_dim=32, depth=2,
                            num_heads=4),
    "timm_swin": _timm("swin_tiny_patch4_window7_224", **_SMALL, embed_dim=16, depths=(2, 2), num_heads=(4, 4),
                       window_size=4),
    "timm_swinv2": _timm("swinv2_tiny_window8_256", **_SMALL, embed_dim=16, depths=(2, 2), num_heads=(4, 4),
                         window_size=4),
    "timm_mixer": _timm_class("mlp_mixer.MlpMixer", img_size=32, patch_size=8, num_blocks=2, embed_dim=32),
    "timm_gmlp": Subject(
        lambda: import_module("timm").models.mlp_mixer.MlpMixer(
            img_size=32, patch_size=8, num_blocks=2, embed_dim=32, num_classes=10, mlp_ratio=2,
            block_layer=import_module("timm").models.mlp_mixer.SpatialGatingBlock,
            mlp_layer=import_module("timm").layers.GatedMlp,
        ), _pictures, "timm",
    ),
    "timm_convnext": _timm("convnext_atto", num_classes=10, depths=(1, 1, 2, 1), dims=(8, 16, 24, 32), inputs=_larger),
    "timm_convmixer": _timm_class("convmixer.ConvMixer", dim=16, depth=2, patch_size=4),
    "timm_pvt_v2": _timm("pvt_v2_b0", num_classes=10, depths=(1, 1, 1, 1), embed_dims=(16, 16, 32, 32),
                         num_heads=(2, 2, 4, 4), inputs=_larger),
    "timm_coat": _timm_class("coat.CoaT", _larger, img_size=64, patch_size=4, embed_dims=(32, 32, 32, 32),
    serial_depths=(1, 1, 1, 1),
                             parallel_depth=1, num_heads=8),
    "timm_tnt": _timm("tnt_s_legacy_patch16_224", num_classes=10, img_size=32, patch_size=16, embed_dim=32,
                      inner_dim=16, depth=2, num_heads_inner=4, num_heads_outer=4),
    "timm_crossvit": _timm_class(
        "crossvit.CrossVit", steady((numbers(3, 3, 48, 48),)), img_size=48, img_scale=(1.0, 1.0), patch_size=(8, 16),
        embed_dim=(16, 32), depth=((1, 2, 0),), num_heads=(4, 4), mlp_ratio=(2.0, 2.0, 1.0),
    ),
    "timm_davit": _timm("davit_tiny", num_classes=10, depths=(1, 1), embed_dims=(16, 32), num_heads=(4, 4),
                        window_size=4),
    "timm_edgenext": _timm("edgenext_xx_small", num_classes=10, dims=(16, 16, 32, 32), depths=(1, 1, 2, 1),
                           heads=(4, 4, 4, 4), inputs=_larger),
    "timm_fastvit": _timm("fastvit_t8", num_classes=10, inputs=_larger),
    "timm_volo": _timm_class("volo.VOLO", img_size=64, layers=(1, 1, 1, 1), embed_dims=(16, 32, 32, 32), inputs=_larger,
                             num_heads=(2, 4, 4, 4), mlp_ratio=2.0, downsamples=(True, False, False, False),
                             outlook_attention=(True, False, False, False)),
    "timm_poolformer": _timm_class("metaformer.MetaFormer", _larger, depths=(1, 1, 1, 1), dims=(16, 16, 32, 32)),
    "timm_caformer": Subject(
        lambda: import_module("timm").models.metaformer.MetaFormer(
            depths=(1, 1, 1, 1), dims=(16, 16, 64, 64), num_classes=10,
            token_mixers=[import_module("timm").models.metaformer.SepConv] * 2
            + [import_module("timm").models.metaformer.Attention] * 2,
            norm_layers=[import_module("timm").models.metaformer.LayerNorm2dNoBias] * 2
            + [import_module("timm").models.metaformer.LayerNormNoBias] * 2,
        ), _larger, "timm",
    ),
    "timm_hiera": _timm("hiera_tiny_224", num_classes=10, img_size=64, embed_dim=16, stages=(1, 1), q_pool=1,
                        num_heads=2, mask_unit_size=(4, 4), inputs=_larger),
    "timm_resnet": _timm("resnet18", num_classes=10, channels=(8, 8, 16, 16), inputs=_larger),
    "timm_sequencer": _timm("sequencer2d_s", num_classes=10, img_size=32, layers=(1, 1), patch_sizes=(8, 1),
                            embed_dims=(16, 32), hidden_sizes=(8, 16), mlp_ratios=(2.0, 2.0)),
    "torchvision_vit": Subject(
        lambda: import_module("torchvision").models.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=10), _pictures,
        "torchvision",
    ),
    "torchvision_swin": Subject(
        lambda: import_module("torchvision").models.SwinTransformer([4, 4], 16, [2, 2], [4, 4], [4, 4], num_classes=10),
        _pictures, "torchvision",
    ),
    "torchvision_swin_v2": Subject(
        lambda: import_module("torchvision").models.SwinTransformer(
            [4, 4], 16, [2, 2], [4, 4], [4, 4], num_classes=10,
            block=import_module("torchvision").models.swin_transformer.SwinTransformerBlockV2,
            downsample_layer=import_module("torchvision").models.swin_transformer.PatchMergingV2,
        ), _pictures, "torchvision",
    ),
    "torchvision_maxvit": Subject(
        lambda: import_module("torchvision").models.MaxVit(
            input_size=(64, 64), stem_channels=16, partition_size=4, block_channels=[16, 32], block_layers=[1, 1],
            head_dim=8, stochastic_depth_prob=0.0, num_classes=10,
        ), _larger, "torchvision",
    ),
    "torchvision_convnext": Subject(
        lambda: import_module("torchvision").models.ConvNeXt(
            [import_module("torchvision").models.convnext.CNBlockConfig(16, 32, 1),
             import_module("torchvision").models.convnext.CNBlockConfig(32, None, 2)], num_classes=10,
        ), _pictures, "torchvision",
    ),
    "torchvision_resnet18": _vision("resnet18"),
    "torchvision_mobilenet_v3": _vision("mobilenet_v3_small"),
    "torchvision_vgg": _vision("vgg11_bn"),
    "torchvision_r3d": Subject(
        lambda: import_module("torchvision").models.video.r3d_18(num_classes=10),
        steady((numbers(2, 3, 4, 16, 16),)), "torchvision",
    ),
    "open_clip": _clip(),
    "open_clip_pooled": _clip(attentional_pool=True, attn_pooler_heads=4),
    "open_clip_coca": _coca(),
    "esm2": Subject(_esm2, steady((tokens(30, 3, 12, least=4),)), "esm"),
    "esm1b_msa": Subject(
        lambda: import_module("esm").model.msa_transformer.MSATransformer(
            import_module("argparse").Namespace(
                layers=2, embed_dim=32, logit_bias=True, ffn_embed_dim=64, attention_heads=4, dropout=0.0,
                attention_dropout=0.0, activation_dropout=0.0, max_tokens=1024, embed_positions_msa=False,
                max_positions=64,
            ),
            import_module("esm").data.Alphabet.from_architecture("msa_transformer"),
        ), steady((tokens(24, 2, 3, 12, least=4),)), "esm",
    ),
    "torchtune_llama3": _torchtune("llama3", "llama3", intermediate_dim=64),
    "torchtune_llama3_1": _torchtune("llama3_1", "llama3_1", intermediate_dim=64),
    "torchtune_llama3_lora": _torchtune(
        "llama3", "lora_llama3", intermediate_dim=64, lora_attn_modules=["q_proj", "v_proj"], apply_lora_to_mlp=True,
        apply_lora_to_output=False, lora_rank=4, lora_alpha=8.0,
    ),
    "torchtune_gemma": _torchtune("gemma", "gemma", intermediate_dim=64, head_dim=8, num_kv_heads=1),
    "torchtune_qwen2": _torchtune("qwen2", "qwen2", intermediate_dim=64),
    "torchtune_phi3": _torchtune("phi3", "phi3", intermediate_dim=64),
    "litgpt_gpt": _litgpt(),
    "litgpt_llama": _litgpt(
        n_query_groups=2, bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", rotary_percentage=1.0,
        parallel_residual=False,
    ),
    "litgpt_moe": _litgpt(
        n_query_groups=2, bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMoE", rotary_percentage=1.0,
        parallel_residual=False, n_expert=4, n_expert_per_token=2, moe_intermediate_size=64,
    ),
    "litgpt_gemma2": _litgpt(
        n_query_groups=2, bias=False, norm_class_name="RMSNorm", mlp_class_name="GemmaMLP", rotary_percentage=1.0,
        parallel_residual=False, post_attention_norm=True, post_mlp_norm=True, head_size=8,
        attention_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window_size=8,
        sliding_window_indices=[0, 1],
    ),
    "x_decoder": _x_decoder(),
    "x_decoder_rotary": _x_decoder(rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True),
    "x_decoder_alibi": _x_decoder(alibi_pos_bias=True, alibi_num_heads=4),
    "x_decoder_t5": _x_decoder(rel_pos_bias=True, attn_qk_norm=True),
    "x_decoder_flash": _x_decoder(attn_flash=True, attn_kv_heads=2),
    "x_encoder": _x(
        lambda x: x.TransformerWrapper(
            num_tokens=88, max_seq_len=32, attn_layers=x.Encoder(dim=32, depth=2, heads=4, attn_dim_head=8)
        )
    ),
    "x_vit": _x(
        lambda x: x.ViTransformerWrapper(
            image_size=32, patch_size=8, num_classes=10,
            attn_layers=x.Encoder(dim=32, depth=2, heads=4, attn_dim_head=8),
        ), _pictures,
    ),
}  # fmt: skip
