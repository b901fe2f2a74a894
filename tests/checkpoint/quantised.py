"""Quantised folders, written as their formats say, and the numbers that they stand for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tpplan.checkpoint.files import SINGLE

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_FLOAT8 = torch.float8_e4m3fn
_SPECIAL: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
_SIZES: dict[str, Any] = _SPECIAL | {
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 2}),
    "llama odd": ("llama", {"num_key_value_heads": 2, "hidden_size": 160, "intermediate_size": 328}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}),
    "deepseek_v3": (
        "deepseek_v3",
        {"q_lora_rank": 72, "kv_lora_rank": 80, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "gpt_oss": (
        "gpt_oss",
        {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


@dataclass(frozen=True)
class Way:
    """A format: what is stored for a weight, by what follows its name, with the numbers; and what the config says."""

    stored: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
    config: dict[str, Any]


def _spread(scales: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    return scales.repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., : shape[-2], : shape[-1]]


def _fp8_blocks(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = (
        (0.5 + torch.rand(*weight.shape[:-2], *(-(-n // 128) for n in weight.shape[-2:]))) * weight.abs().max() / 448
    )
    spread = _spread(scales, 128, 128, weight.shape)
    codes = (weight / spread).to(_FLOAT8)
    return {"": codes, "_scale_inv": scales}, codes.float() * spread


def _fp4_bytes(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """DeepSeek-V4's experts: two numbers to a byte, an exponent for each 32 inputs."""
    *outer, columns = weight.shape
    codes = torch.randint(0, 256, (*outer, columns // 2), dtype=torch.uint8)
    exponents = torch.randint(118, 124, (*outer, columns // 32), dtype=torch.uint8)
    numbers = torch.stack((E2M1[(codes & 15).long()], E2M1[(codes >> 4).long()]), -1).flatten(-2)
    scales = (2.0 ** (exponents.float() - 127)).repeat_interleave(32, -1)
    return {"": codes.view(torch.int8), "_scale_inv": exponents.view(torch.float8_e8m0fnu)}, numbers * scales


def _mxfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """gpt-oss's experts, [expert, inputs, outputs], with the outputs before groups of 32 inputs."""
    *outer, inputs, outputs = weight.shape
    blocks = torch.randint(0, 256, (*outer, outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(118, 124, blocks.shape[:-1], dtype=torch.uint8)
    numbers = torch.stack((E2M1[(blocks & 15).long()], E2M1[(blocks >> 4).long()]), -1).flatten(-2)
    numbers = numbers * 2.0 ** (scales.float() - 127)[..., None]
    return {"_blocks": blocks, "_scales": scales}, numbers.flatten(-2).transpose(-1, -2)


def _scales(weight: Tensor, groups: tuple[int, ...], most: float) -> Tensor:
    return ((0.5 + torch.rand(groups)) * weight.abs().max() / most).to(torch.bfloat16)


def _whole_codes(kind: torch.dtype, one: bool) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    def stored(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scales = _scales(weight, (1,) if one else (*weight.shape[:-1], 1), 448 if kind == _FLOAT8 else 127)
        exact = weight / scales.float()
        codes = exact.to(_FLOAT8) if kind == _FLOAT8 else exact.round().clamp(-128, 127).to(torch.int8)
        return {"": codes, "_scale": scales}, codes.to(torch.bfloat16) * scales

    return stored


def _words(codes: Tensor, bits: int) -> Tensor:
    """Signed integers in words of 32 bits, the first one in the lowest bits."""
    count = 32 // bits
    codes = torch.nn.functional.pad(codes.long() + 2 ** (bits - 1), (0, -codes.shape[-1] % count))
    words = (codes.unflatten(-1, (-1, count)) << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _packed(bits: int, group: int, shifted: bool) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    def stored(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        *outer, rows, columns = weight.shape
        groups = columns // group if group and columns % group == 0 else 1
        scales = _scales(weight, (*outer, rows, groups), 2 ** (bits - 1))
        codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), weight.shape, dtype=torch.int8)
        zeros = torch.randint(-3, 3, scales.shape, dtype=torch.int8) if shifted else torch.zeros_like(scales)
        spread = [t.to(torch.bfloat16).repeat_interleave(columns // groups, -1) for t in (zeros, scales)]
        parts = {"_packed": _words(codes, bits), "_scale": scales, "_shape": torch.tensor(weight.shape)}
        if shifted:
            parts["_zero_point"] = _words(zeros.transpose(-1, -2), bits).transpose(-1, -2).contiguous()
        return parts, (codes.to(torch.bfloat16) - spread[0]) * spread[1]

    return stored


def _one_scale(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """AutoFP8: a scale for each of weight, input and keys."""
    scale = (weight.abs().max() / 448).float()
    codes = (weight / scale).to(_FLOAT8)
    idle = {".input_scale": torch.tensor(0.5), ".k_scale": torch.tensor(0.5)}
    return {"": codes, "_scale": scale} | idle, codes.float() * scale


def _rows(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """FBGEMM: a scale for each row, and the most that one of an input's may be."""
    scales = weight.abs().amax(1, keepdim=True).float() / 448
    codes = (weight / scales).to(_FLOAT8)
    return {"": codes, "_scale": scales, ".input_scale_ub": torch.tensor([1200.0])}, codes.float() * scales


def _in_words(numbers: Tensor, places: tuple[int, ...], bits: int) -> Tensor:
    """Unsigned integers of the last dim in words of 32 bits, each of so many at its place."""
    words = torch.zeros(*numbers.shape[:-1], -(-numbers.shape[-1] // len(places)), dtype=torch.int64)
    for column in range(numbers.shape[-1]):
        word, place = divmod(column, len(places))
        words[..., word] += numbers[..., column].long() << bits * places[place]
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _by_inputs(
    awq: bool = False, bits: int = 4, group: int = 32, less: int = 0, shuffled: bool = False
) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    """GPTQ and AWQ: inputs before outputs, and groups of inputs."""
    places = (0, 4, 1, 5, 2, 6, 3, 7) if awq else tuple(range(32 // bits))

    def stored(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        groups = torch.arange(inputs) // (group or inputs)
        groups = groups[torch.randperm(inputs)] if shuffled else groups
        count = int(groups.max()) + 1
        scales = (0.5 + torch.rand(count, outputs)).half() * weight.abs().max().half() / 2**bits
        codes = torch.randint(0, 2**bits, (inputs, outputs), dtype=torch.int32)
        zeros = torch.randint(less, 2**bits, (count, outputs), dtype=torch.int32)
        packed = _in_words(codes, places, bits) if awq else _in_words(codes.t(), places, bits).t().contiguous()
        parts = {".qweight": packed, ".qzeros": _in_words(zeros - less, places, bits), ".scales": scales}
        parts |= {} if awq else {".g_idx": groups.int()}
        return parts, ((codes - zeros[groups]).half() * scales[groups]).t()

    return stored


def _compressed(kind: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}


_FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
WAYS: dict[str, Way] = {
    "fp8": Way(_fp8_blocks, _FP8),
    "fp8 with fp4": Way(_fp4_bytes, _FP8),
    "mxfp4": Way(_mxfp4, {"quant_method": "mxfp4"}),
    "int8": Way(_whole_codes(torch.int8, False), _compressed("int-quantized", num_bits=8, type="int")),
    "float8, one scale": Way(_whole_codes(_FLOAT8, True), _compressed("float-quantized", num_bits=8, type="float")),
    "int4": Way(_packed(4, 32, False), _compressed("pack-quantized", num_bits=4, type="int", group_size=32)),
    "int4 shifted": Way(_packed(4, 32, True), _compressed("pack-quantized", num_bits=4, type="int", group_size=32)),
    "fp8, one scale": Way(_one_scale, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 by row": Way(_rows, {"quant_method": "fbgemm_fp8"}),
    "gptq": Way(_by_inputs(less=1), _GPTQ),
    "gptq, shuffled": Way(_by_inputs(less=1, shuffled=True), _GPTQ | {"desc_act": True}),
    "gptq v2": Way(_by_inputs(bits=8, group=0), _GPTQ | {"bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"}),
    "gptq, one group": Way(_by_inputs(less=1, group=0), {"quant_method": "gptq", "bits": 4}),
    "awq": Way(_by_inputs(awq=True), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "int8 by row": Way(_packed(8, 0, True), _compressed("pack-quantized", num_bits=8, type="int")),
}


def beside(weight: str, more: str) -> str:
    """The name of what is stored of a weight: what begins with a dot stands in the place of its last word."""
    return weight.rpartition(".")[0] + more if more.startswith(".") else weight + more


def made(name: str) -> Any:
    """A stock model with random numbers."""
    kind, sizes = MODELS[name]
    torch.manual_seed(3)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **_SIZES | sizes), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape) / math.sqrt(parameter.shape[-1])
            parameter.copy_(noise if parameter.dim() > 1 else 1 + 0.3 * noise)
    return model


def write(name: str, way: str, folder: Path, plain: str = "embed|lm_head|norm|mlp.gate.weight|router") -> str:
    """A quantised folder, and `plain` inside of it, with the numbers that it stands for; layers of one dim stay."""
    model = made(name)
    for place in (folder, folder / "plain"):
        model.save_pretrained(place)
    held = load_file(folder / SINGLE)
    numbers, stored = dict(held), dict[str, Tensor]()
    for at, weight in held.items():
        if weight.dim() < 2 or any(word in at for word in plain.split("|")) or (way == "mxfp4") != (weight.dim() == 3):
            stored[at] = weight
            continue
        parts, whole = WAYS[way].stored(weight)
        numbers[at] = whole.float().contiguous()
        stored |= {beside(at, more): part for more, part in parts.items()}
    save_file(numbers, folder / "plain" / SINGLE, metadata={"format": "pt"})
    save_file(stored, folder / SINGLE, metadata={"format": "pt"})
    change(folder, quantization_config=WAYS[way].config)
    return str(folder)


def change(folder: Path, **fields: Any) -> None:
    """Change fields of a folder's config."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


__all__ = ["MODELS", "WAYS", "Way", "beside", "change", "made", "write"]
