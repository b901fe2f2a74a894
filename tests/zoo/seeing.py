"""transformers' models of pictures and videos, tiny."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tests.zoo.subject import Inputs, Subject, numbers, of_transformers, steady

_LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_VISION: dict[str, Any] = {"hidden_size": 32, **_LAYERS, "image_size": 32, "patch_size": 8}
_SWIN: dict[str, Any] = {
    "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [4, 8], "window_size": 4,
}  # fmt: skip
_STAGES: dict[str, Any] = {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2}
_PYRAMID: dict[str, Any] = {
    "hidden_sizes": [16, 32], "depths": [2, 2], "num_encoder_blocks": 2, "num_attention_heads": [4, 4],
    "sr_ratios": [2, 1], "strides": [4, 2], "patch_sizes": [7, 3], "mlp_ratios": [2, 2],
}  # fmt: skip
_QUERIES: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 8, "use_timm_backbone": False,
    "use_pretrained_backbone": False, "backbone": None, "dropout": 0.0,
}  # fmt: skip
_RESNET: dict[str, Any] = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
    "layer_type": "basic", "out_features": ["stage4"],
}  # fmt: skip
_THREE: dict[str, Any] = {**_RESNET, "out_features": ["stage2", "stage3", "stage4"]}


def _lit(subject: Subject) -> Subject:
    """With a last bias of ones, where a ReLU after it would else leave zeros alone."""

    def make() -> nn.Module:
        model = subject.make()
        nn.init.ones_([p for name, p in model.named_parameters() if name.endswith("bias")][-1])
        return model

    return replace(subject, make=make)


def _pictures(side: int = 32, batch: int = 3) -> Callable[[int], Inputs]:
    return steady({"pixel_values": numbers(batch, 3, side, side)})


def _videos(frames: int, side: int = 32) -> Callable[[int], Inputs]:
    return steady({"pixel_values": numbers(3, frames, 3, side, side)})


def _masked(side: int = 64) -> Callable[[int], Inputs]:
    mask = torch.ones(2, side, side, dtype=torch.long)
    mask[1, side // 2 :] = 0
    return steady({"pixel_values": numbers(2, 3, side, side), "pixel_mask": mask})


def _vit(kind: str, maker: str, **settings: Any) -> Subject:
    return of_transformers(kind, maker, _pictures(), **{**_VISION, **settings})


SEEING: dict[str, Subject] = {
    "deit": _vit("deit", "DeiTModel"),
    "dinov2": _vit("dinov2", "Dinov2Model", mlp_ratio=2),
    "dinov2_swiglu": _vit("dinov2", "Dinov2Model", mlp_ratio=2, use_swiglu_ffn=True),
    "dinov2_with_registers": _vit("dinov2_with_registers", "Dinov2WithRegistersModel", mlp_ratio=2),
    "dinov3_vit": _vit("dinov3_vit", "DINOv3ViTModel", num_register_tokens=2),
    "dinov3_convnext": of_transformers(
        "dinov3_convnext", "DINOv3ConvNextModel", _pictures(), hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1]
    ),
    "ijepa": _vit("ijepa", "IJepaModel"),
    "vit_msn": _vit("vit_msn", "ViTMSNModel"),
    "vit_mae": of_transformers(
        "vit_mae", "ViTMAEModel", steady({"pixel_values": numbers(3, 3, 32, 32), "noise": numbers(3, 16, seed=2)}),
        **_VISION, mask_ratio=0.5,
    ),
    "vitdet": _vit("vitdet", "VitDetModel", window_size=2, window_block_indices=[0], mlp_ratio=2,
                   use_relative_position_embeddings=True),
    "yolos": _vit("yolos", "YolosForObjectDetection", num_detection_tokens=4, image_size=[32, 32]),
    "siglip_vision": _vit("siglip_vision_model", "SiglipVisionModel"),
    "beit": _vit("beit", "BeitModel", use_relative_position_bias=True, vocab_size=64),
    "beit_shared": _vit("beit", "BeitModel", use_shared_relative_position_bias=True, layer_scale_init_value=0.1,
                        vocab_size=64),
    "data2vec_vision": _vit("data2vec-vision", "Data2VecVisionModel", use_relative_position_bias=True),
    "swin": of_transformers("swin", "SwinModel", _pictures(), **_SWIN),
    "swinv2": of_transformers("swinv2", "Swinv2Model", _pictures(), **_SWIN),
    "swin2sr": of_transformers(
        "swin2sr", "Swin2SRForImageSuperResolution", _pictures(), **{**_SWIN, "patch_size": 1, "image_size": 32,
                                                                    "num_heads": [4, 4]}
    ),
    "donut_swin": of_transformers("donut-swin", "DonutSwinModel", _pictures(), **_SWIN),
    "maskformer_swin": of_transformers("maskformer-swin", "MaskFormerSwinModel", _pictures(), **_SWIN),
    "convnext": of_transformers("convnext", "ConvNextModel", _pictures(), **_STAGES),
    "convnextv2": of_transformers("convnextv2", "ConvNextV2Model", _pictures(), **_STAGES),
    "segformer": of_transformers(
        "segformer", "SegformerForSemanticSegmentation", _pictures(), **_PYRAMID, decoder_hidden_size=32
    ),
    "pvt": of_transformers("pvt", "PvtModel", _pictures(), **_PYRAMID | {"patch_sizes": [4, 2]},
    sequence_reduction_ratios=[2, 1], image_size=32),
    "pvt_v2": of_transformers("pvt_v2", "PvtV2Model", _pictures(), **_PYRAMID, num_hidden_layers=2),
    "glpn": of_transformers("glpn", "GLPNModel", _pictures(), **_PYRAMID),
    "cvt": of_transformers(
        "cvt", "CvtModel", _pictures(), embed_dim=[16, 32], num_heads=[4, 4], depth=[1, 2], patch_sizes=[7, 3],
        patch_stride=[4, 2], patch_padding=[2, 1], stride_kv=[2, 2], stride_q=[1, 1], mlp_ratio=[2.0, 2.0],
        attention_drop_rate=[0.0, 0.0], drop_rate=[0.0, 0.0], drop_path_rate=[0.0, 0.0], qkv_bias=[True, True],
        cls_token=[False, True], qkv_projection_method=["dw_bn", "dw_bn"], kernel_qkv=[3, 3], padding_kv=[1, 1],
        padding_q=[1, 1],
    ),
    "levit": of_transformers(
        "levit", "LevitModel", _pictures(64), image_size=64, hidden_sizes=[16, 24, 32], num_attention_heads=[4, 4, 4],
        depths=[2, 2, 2], key_dim=[8, 8, 8], mlp_ratio=[2, 2, 2], attention_ratio=[2, 2, 2],
    ),
    "mobilevit": of_transformers(
        "mobilevit", "MobileViTModel", _pictures(64), image_size=64, hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 32], num_attention_heads=4,
    ),
    "mobilevitv2": of_transformers(
        "mobilevitv2", "MobileViTV2Model", _pictures(64), image_size=64, width_multiplier=0.25,
    ),
    "poolformer": of_transformers(
        "poolformer", "PoolFormerModel", _pictures(), hidden_sizes=[16, 32], depths=[2, 2], num_encoder_blocks=2,
        patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1], mlp_ratio=2.0,
    ),
    "focalnet": of_transformers(
        "focalnet", "FocalNetModel", _pictures(), image_size=32, embed_dim=16, hidden_sizes=[16, 32], depths=[2, 2],
        focal_levels=[2, 2], focal_windows=[3, 3],
    ),
    "hiera": of_transformers(
        "hiera", "HieraModel", _pictures(64), image_size=[64, 64], embed_dim=16, num_heads=[2, 4], depths=[1, 2],
        masked_unit_size=[8, 8], query_stride=[2, 2], num_query_pool=1, hidden_size=32,
    ),
    "resnet": of_transformers(
        "resnet", "ResNetModel", _pictures(), embedding_size=8, hidden_sizes=[16, 32], depths=[2, 1],
        layer_type="bottleneck",
    ),
    "regnet": of_transformers(
        "regnet", "RegNetModel", _pictures(), embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], groups_width=4,
    ),
    "bit": of_transformers("bit", "BitModel", _pictures(), embedding_size=8, hidden_sizes=[32, 64], depths=[1, 1],
                           num_groups=4),
    "mobilenet_v2": of_transformers("mobilenet_v2", "MobileNetV2Model", _pictures(64), depth_multiplier=0.35),
    "videomae": of_transformers(
        "videomae", "VideoMAEModel", _videos(4), **_VISION, num_frames=4, tubelet_size=2,
    ),
    "vivit": of_transformers("vivit", "VivitModel", _videos(4), **_VISION, num_frames=4, tubelet_size=[2, 8, 8]),
    "timesformer": of_transformers("timesformer", "TimesformerModel", _videos(4), **_VISION, num_frames=4),
    "vjepa2": of_transformers(
        "vjepa2", "VJEPA2Model", steady({"pixel_values_videos": numbers(3, 4, 3, 32, 32)}), **_VISION,
        crop_size=32, frames_per_clip=4, tubelet_size=2, mlp_ratio=2, pred_hidden_size=24, pred_num_hidden_layers=1,
        pred_num_attention_heads=4, pred_num_mask_tokens=2, pred_mlp_ratio=2,
    ),
    "detr": of_transformers("detr", "DetrForObjectDetection", _masked(), **_QUERIES, backbone_config=_RESNET),
    "conditional_detr": of_transformers(
        "conditional_detr", "ConditionalDetrForObjectDetection", _masked(), **_QUERIES, backbone_config=_RESNET
    ),
    "deformable_detr": of_transformers(
        "deformable_detr", "DeformableDetrForObjectDetection", _masked(), **_QUERIES, backbone_config=_THREE,
        num_feature_levels=3,
    ),
    "table_transformer": of_transformers(
        "table-transformer", "TableTransformerForObjectDetection", _masked(), **_QUERIES, backbone_config=_RESNET
    ),
    "dab_detr": of_transformers(
        "dab-detr", "DabDetrForObjectDetection", _masked(), **{**_QUERIES, "hidden_size": 32},
        backbone_config=_RESNET,
    ),
    "rt_detr": of_transformers(
        "rt_detr", "RTDetrForObjectDetection", _pictures(64), d_model=32, encoder_hidden_dim=32, encoder_ffn_dim=64,
        encoder_attention_heads=4, decoder_attention_heads=4, decoder_layers=2, decoder_ffn_dim=64, num_queries=8,
        encoder_in_channels=[16, 24, 32], decoder_in_channels=[32, 32, 32], num_denoising=0, anchor_image_size=None,
        backbone_config={**_THREE, "model_type": "rt_detr_resnet"},
    ),
    "dpt": _lit(_vit("dpt", "DPTForDepthEstimation", backbone_out_indices=[0, 1, 2, 3], num_hidden_layers=4,
                     neck_hidden_sizes=[8, 16, 24, 32], fusion_hidden_size=16)),
    "depth_anything": _lit(of_transformers(
        "depth_anything", "DepthAnythingForDepthEstimation", _pictures(), patch_size=8, reassemble_hidden_size=32,
        neck_hidden_sizes=[8, 16], reassemble_factors=[2, 1], fusion_hidden_size=16,
        backbone_config={"model_type": "dinov2", **_VISION, "mlp_ratio": 2, "out_features": ["stage1", "stage2"],
                         "reshape_hidden_states": False},
    )),
    "vitpose": of_transformers(
        "vitpose", "VitPoseForPoseEstimation", _pictures(), num_labels=5,
        backbone_config={"model_type": "vitpose_backbone", **_VISION, "image_size": [32, 32], "patch_size": [8, 8],
                         "mlp_ratio": 2, "out_features": ["stage2"]},
    ),
    "vitmatte": of_transformers(
        "vitmatte", "VitMatteForImageMatting", steady({"pixel_values": numbers(3, 4, 32, 32)}), hidden_size=32,
        fusion_hidden_sizes=[16, 8, 8], convstream_hidden_sizes=[8, 8],
        backbone_config={"model_type": "vitdet", **_VISION, "num_channels": 4, "mlp_ratio": 2,
                         "out_features": ["stage2"]},
    ),
    "upernet": of_transformers(
        "upernet", "UperNetForSemanticSegmentation", _pictures(64), hidden_size=32, use_auxiliary_head=False,
        pool_scales=[1, 2],
        backbone_config={"model_type": "convnext", "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
                         "out_features": ["stage1", "stage2", "stage3", "stage4"]},
    ),
    "sam": of_transformers(
        "sam", "SamModel",
        steady({"pixel_values": numbers(2, 3, 64, 64), "input_points": numbers(2, 1, 2, 2).abs() * 20}),
        vision_config={**_VISION, "image_size": 64, "output_channels": 16, "window_size": 4,
                       "global_attn_indexes": [1], "mlp_dim": 64, "num_pos_feats": 8},
        prompt_encoder_config={"hidden_size": 16, "image_size": 64, "patch_size": 8, "mask_input_channels": 8,
                               "image_embedding_size": 8},
        mask_decoder_config={"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_dim": 32,
                             "iou_head_hidden_dim": 16},
    ),
    "superpoint": of_transformers("superpoint", "SuperPointForKeypointDetection", _pictures(64)),
    "imagegpt": of_transformers(
        "imagegpt", "ImageGPTModel", steady({"input_ids": torch.arange(48).view(3, 16)}), n_embd=32, n_layer=2,
        n_head=4, vocab_size=64, n_positions=32, use_cache=False,
    ),
    "mgp_str": of_transformers(
        "mgp-str", "MgpstrForSceneTextRecognition", _pictures(), image_size=[32, 32], patch_size=8, hidden_size=32,
        num_hidden_layers=2, num_attention_heads=4, mlp_ratio=2.0, max_token_length=6, num_bpe_labels=40,
        num_wordpiece_labels=40,
    ),
    "perceiver": of_transformers(
        "perceiver", "PerceiverModel", steady({"inputs": numbers(3, 12, 16)}), d_model=16, num_latents=8, d_latents=32,
        num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=4, num_cross_attention_heads=4,
    ),
}  # fmt: skip
