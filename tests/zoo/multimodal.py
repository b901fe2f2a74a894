"""Stock models whose Python reads numbers of their inputs, tiny, with inputs as a processor makes them.

Pictures stand at other places in each sequence, and are of several sizes where the model takes these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, PICTURE = 88, 7
Inputs = dict[str, Tensor]

_SPECIAL: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
_TEXT: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 80, "vocab_size": VOCABULARY, "max_position_embeddings": 128, "use_cache": False, **_SPECIAL,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_MERGING: dict[str, Any] = {
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "depth": 2,
    "num_heads": 4,
}
_ROTARY = {"rope_type": "default", "rope_theta": 1e4}
_QWEN = {"image_token_id": PICTURE, "video_token_id": 8, "vision_start_token_id": 5, "vision_end_token_id": 6}


@dataclass(frozen=True)
class Multimodal:
    """How to build a tiny model.

    Attributes:
        kind: transformers' model type.
        maker: the name of transformers' class.
        settings: the config's fields.
        inputs: makes the keywords of a call; `number` tells calls with other numbers apart.
    """

    kind: str
    maker: str
    settings: dict[str, Any]
    inputs: Callable[[int], Inputs]


def _tokens(spans: list[tuple[int, int]], length: int = 24) -> Inputs:
    """Sequences with pictures: of each, where it begins and how many tokens it takes."""
    ids = torch.randint(10, VOCABULARY, (len(spans), length), generator=torch.Generator().manual_seed(0))
    for row, (start, count) in zip(ids, spans, strict=True):
        row[start : start + count] = PICTURE
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _pictures(tokens: int, side: int = 32) -> Callable[[int], Inputs]:
    def inputs(number: int) -> Inputs:
        return _tokens([(3, tokens), (1 + number, tokens)]) | {"pixel_values": _numbers(2, 3, side, side)}

    return inputs


def _typed_pictures(number: int) -> Inputs:
    made = _pictures(4)(number)
    return made | {"token_type_ids": (made["input_ids"] == PICTURE).long()}


def _lists_of_pictures(number: int) -> Inputs:
    """The second sequence has one picture or two; where it has one, the other is padding."""
    second = 4 if number % 2 else 8
    pixels = _numbers(2, 2, 3, 32, 32)
    if second == 4:
        pixels[1, 1] = 0
    return _tokens([(3, 8), (5, second)]) | {"pixel_values": pixels}


_GRIDS = (((1, 4, 4), (1, 4, 8)), ((1, 4, 8), (1, 4, 4)), ((1, 8, 4), (1, 4, 4)))


def _grids(number: int) -> Inputs:
    grids = _GRIDS[number % len(_GRIDS)]
    made = _tokens([(3 + number, height * width // 4) for _, height, width in grids])
    more = {"image_grid_thw": torch.tensor(grids), "mm_token_type_ids": (made["input_ids"] == PICTURE).int()}
    return made | more | {"pixel_values": _numbers(48, 3 * 2 * 4 * 4)}


def _shapes(number: int) -> Inputs:
    shapes = torch.tensor([[4, 4], [3, 4]] if number % 2 == 0 else [[2, 6], [4, 4]])
    mask = (torch.arange(16) < shapes.prod(-1, keepdim=True)).long()
    ids = _tokens([(0, 0), (0, 0)], 12)["input_ids"]
    return {
        "input_ids": ids,
        "pixel_values": _numbers(2, 16, 48),
        "pixel_attention_mask": mask,
        "spatial_shapes": shapes,
    }


def _padded(number: int) -> Inputs:
    ids = _tokens([(0, 0), (0, 0)])["input_ids"]
    ids[:, 20 - number :] = 1
    return {"input_ids": ids}


def _grid_text(sections: list[int], **more: Any) -> dict[str, Any]:
    return {**_TEXT, "rope_parameters": {**_ROTARY, "mrope_section": sections}, **more}


MULTIMODAL: dict[str, Multimodal] = {
    "llava": Multimodal(
        "llava", "LlavaForConditionalGeneration",
        {"vision_config": {"model_type": "clip_vision_model", "projection_dim": 24, **_VISION},
         "text_config": {"model_type": "llama", **_TEXT}, "image_token_id": PICTURE, "vision_feature_layer": -1},
        _pictures(16),
    ),
    "gemma3": Multimodal(
        "gemma3", "Gemma3ForConditionalGeneration",
        {"vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **_VISION},
         "text_config": {"model_type": "gemma3_text", "head_dim": 12, "sliding_window": 8, **_TEXT},
         "image_token_index": PICTURE, "mm_tokens_per_image": 4},
        _typed_pictures,
    ),
    "internvl": Multimodal(
        "internvl", "InternVLForConditionalGeneration",
        {"vision_config": {"model_type": "internvl_vision", **_VISION}, "text_config": {"model_type": "qwen2", **_TEXT},
         "image_token_id": PICTURE, "image_seq_length": 4},
        _pictures(4),
    ),
    "qwen2_vl": Multimodal(
        "qwen2_vl", "Qwen2VLForConditionalGeneration",
        {"vision_config": {**_MERGING, "embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2},
         "text_config": _grid_text([1, 1, 1]), **_QWEN},
        _grids,
    ),
    "qwen2_5_vl": Multimodal(
        "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration",
        {"vision_config": {**_MERGING, "hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 64,
                           "window_size": 16, "fullatt_block_indexes": [1]},
         "text_config": _grid_text([1, 1, 1]), **_QWEN},
        _grids,
    ),
    "qwen3_vl": Multimodal(
        "qwen3_vl", "Qwen3VLForConditionalGeneration",
        {"vision_config": {**_MERGING, "hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 64,
                           "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
         "text_config": _grid_text([2, 2, 2], head_dim=12), **_QWEN},
        _grids,
    ),
    "idefics3": Multimodal(
        "idefics3", "Idefics3ForConditionalGeneration",
        {"vision_config": _VISION, "text_config": {"model_type": "llama", **_TEXT}, "image_token_id": PICTURE,
         "scale_factor": 2},
        _lists_of_pictures,
    ),
    "llama4": Multimodal(
        "llama4", "Llama4ForConditionalGeneration",
        {"vision_config": {**_VISION, "intermediate_size": 128, "pixel_shuffle_ratio": 0.5, "vision_output_dim": 32,
                           "projector_input_dim": 32, "projector_output_dim": 32},
         "text_config": {**_TEXT, "intermediate_size": 64, "intermediate_size_mlp": 80, "head_dim": 6,
                         "num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 32},
         "image_token_index": PICTURE},
        _pictures(4),
    ),
    "siglip2": Multimodal(
        "siglip2", "Siglip2Model",
        {"text_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "vocab_size": VOCABULARY, "max_position_embeddings": 32, "projection_size": 32, **_SPECIAL},
         "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                           "num_attention_heads": 4, "patch_size": 4, "num_patches": 16}},
        _shapes,
    ),
    "xlm": Multimodal(
        "xlm", "XLMWithLMHeadModel",
        {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
         "dropout": 0.0, "attention_dropout": 0.0, "pad_index": 1, "use_cache": False},
        _padded,
    ),
}  # fmt: skip


def build(name: str) -> nn.Module:
    """A tiny model in float64 and in evaluation mode."""
    import transformers

    held = MULTIMODAL[name]
    config = transformers.AutoConfig.for_model(held.kind, **held.settings)
    torch.manual_seed(0)
    return getattr(transformers, held.maker)(config).double().eval()


def inputs_of(name: str, number: int) -> Inputs:
    """The keywords of a call, in float64."""
    made = MULTIMODAL[name].inputs(number)
    return {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in made.items()}
