"""Quantised folders are read as the numbers that they stand for: any box of a weight, and whole models on ranks."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import quantization_config

import tpplan
from tests.checkpoint.quantised import WAYS, beside, change, write
from tests.checkpoint.test_load import boxes_of
from tests.marking import in_thirds
from tests.plans.parity import tolerance
from tests.runtime.world import Member, world
from tpplan.checkpoint import loading, reading
from tpplan.checkpoint.assembled import assembled, reads
from tpplan.checkpoint.dequantised import raw
from tpplan.checkpoint.files import SINGLE, CheckpointError
from tpplan.checkpoint.formats import dequantised
from tpplan.checkpoint.header import read_header
from tpplan.checkpoint.loading import Loaded
from tpplan.checkpoint.meter import Meter
from tpplan.checkpoint.ranges import elements
from tpplan.checkpoint.reading import Files
from tpplan.checkpoint.sketch import Sketch
from tpplan.checkpoint.stored import read_checkpoint
from tpplan.compat.dtensors import local_of
from tpplan.hf.quantised import as_plain
from tpplan.plan import PlanError
from tpplan.runtime.parameters.pieces import whole_box

pytestmark = pytest.mark.processes

IDS = torch.arange(24).view(2, 12)


def _odd(way: str) -> tuple[int, ...]:
    """A shape that isn't whole blocks, of dims that the format can have."""
    return {
        "fp8": (2, 300, 160),
        "fp8 with fp4": (5, 96),
        "mxfp4": (3, 64, 10),
        "int8 by row": (13, 41),
        "awq": (304, 160),
    }.get(way, (300, 160))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunk", [4096, reading.CHUNK])
def test_any_box_of_a_weight_is_read(tmp_path: Path, way: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHUNK", chunk)
    torch.manual_seed(1)
    parts, expected = WAYS[way].stored(torch.randn(_odd(way)))
    save_file(
        {beside("x.weight", more): part for more, part in parts.items()} | {"b": torch.ones(3)}, tmp_path / SINGLE
    )
    stored = {held.name: held for held in read_header(tmp_path / SINGLE, Meter()).tensors}
    tensors = dequantised(stored, WAYS[way].config, Meter())
    assert tensors.keys() == {"x.weight", "b"} and tensors["b"] is stored["b"]
    weight = Sketch.of(tensors["x.weight"])
    assert weight.shape == tuple(expected.shape)
    stack: Any = torch.stack
    pair: Sketch = stack([weight, weight], dim=1)
    for seed, (held, whole) in enumerate([(weight, expected)] * 6 + [(pair, torch.stack([expected] * 2, dim=1))] * 6):
        boxes, shape = boxes_of(tuple(whole.shape), seed)
        dtype = random.Random(seed).choice([torch.float32, torch.bfloat16, torch.float16])
        part, meter = torch.full(shape, 7.0, dtype=dtype), Meter()
        found = reads(assembled("y", held.shape, held.pieces), boxes)
        with Files(meter) as files:
            assert files.fill_by(part, found)
        for box in boxes:
            assert torch.equal(box.of_part(part), box.of_whole(whole).to(dtype)), box
        assert meter.bytes == sum(one.bytes_of(elements(inside)) for one, inside in raw(found))
        numbers = sum(math.prod(box.sizes) for box in boxes)
        assert meter.bytes <= 2 * numbers + 8 * sum(sum(box.sizes) for box in boxes) + 64, (meter.bytes, numbers)


def _weight(folder: Path, codes: Tensor, scales: Tensor, config: dict[str, Any]) -> Any:
    """A weight of these codes, as tpplan reads it."""
    more = "_scale_inv" if config["quant_method"] == "fp8" else "_scale"
    save_file({"x.weight": codes, f"x.weight{more}": scales}, folder / SINGLE)
    stored = {held.name: held for held in read_header(folder / SINGLE, Meter()).tensors}
    return dequantised(stored, config, Meter())["x.weight"]


def _integers(**weights: Any) -> dict[str, Any]:
    return {"weights": {"num_bits": 8, "type": "int"} | weights}


@pytest.mark.parametrize(
    ("config", "kind", "scales", "blocks"),
    [
        ({"quant_method": "fp8"}, torch.float8_e4m3fn, (3, 3), (128, 128)),
        ({"quant_method": "fp8", "weight_block_size": None}, torch.float8_e4m3fn, (3, 3), (100, 100)),
        ({"config_groups": {"a": _integers(group_size=128)}}, torch.int8, (300, 3), (1, 128)),
        (
            {"config_groups": {"a": _integers(block_structure=[128, 128]), "b": _integers(block_structure=[64, 32])}},
            torch.int8,
            (5, 10),
            (64, 32),
        ),
    ],
    ids=str,
)
def test_blocks_are_the_configs(
    tmp_path: Path, config: dict[str, Any], kind: torch.dtype, scales: tuple[int, int], blocks: tuple[int, int]
) -> None:
    codes, held = torch.ones(300, 300).to(kind), torch.arange(1.0, 1 + math.prod(scales)).view(scales)
    weight = _weight(tmp_path, codes, held, {"quant_method": "compressed-tensors"} | config)
    numbers, boxes = torch.empty(300, 300), whole_box((300, 300))
    with Files(Meter()) as files:
        assert files.fill(numbers, boxes, weight)
    assert torch.equal(numbers, held.repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)[:300, :300])


@pytest.mark.parametrize(("kind", "said"), [(torch.int8, "float"), (torch.float8_e4m3fn, "int")], ids=str)
def test_codes_are_of_the_dtype_that_the_config_says(tmp_path: Path, kind: torch.dtype, said: str) -> None:
    config = {"quant_method": "compressed-tensors", "config_groups": {"a": _integers(type=said)}}
    with pytest.raises(CheckpointError, match=r"`x.weight` is (I8|F8_E4M3) of shape \[4, 4\], which should be "):
        _weight(tmp_path, torch.ones(4, 4).to(kind), torch.ones(4, 1), config)


def _loads(member: Member, folder: str, plan: str, options: dict[str, Any]) -> tuple[int, int, int]:
    """Load on all ranks, and compare with the plain folder's stock model; the bytes that were read, and could be."""
    counted: list[Loaded] = []

    def load(*arguments: Any, **keywords: Any) -> Loaded:
        counted.append(loading.load(*arguments, **keywords))
        return counted[-1]

    with mock.patch("tpplan.pretrained.load", load):
        model: Any = tpplan.from_pretrained(folder, plan, member.mesh(), dequantize=True, **options)
    stock: Any = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "plain", **options)
    assert model.config.to_dict() | {"_name_or_path": ""} == stock.config.to_dict() | {"_name_or_path": ""}
    ours, theirs = model.state_dict(), stock.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        whole: Tensor = ours[name].full_tensor() if hasattr(ours[name], "full_tensor") else ours[name]
        assert whole.dtype == tensor.dtype and torch.equal(whole, tensor), name
    with torch.no_grad():
        logits, expected = model(input_ids=IDS).logits, stock(input_ids=IDS).logits
    error = (logits - expected).abs().max() / expected.abs().max()
    assert error <= tolerance(expected.dtype, 8 if expected.dtype is torch.bfloat16 else 512), error
    held = sum(local_of(p).numel() for p in model.parameters()) / sum(p.numel() for p in stock.parameters())
    return counted[0].bytes_read, round(held * 1000), (Path(folder) / SINGLE).stat().st_size


QUICK: list[Any] = [("llama odd", "fp8", 2, {}), ("llama odd", "gptq, shuffled", 2, {})]
SLOW: list[Any] = [
    ("gpt_oss", "mxfp4", 2, {"dtype": torch.bfloat16}),
    ("deepseek_v3", "fp8", 2, {}),
    ("llama odd", "fp8", 4, {}),
    ("llama", "int4 shifted", 2, {}),
    ("llama", "awq", 2, {"dtype": torch.float16}),
]
CASES: list[Any] = [
    *QUICK,
    *SLOW,
    *((name, way, size, {}) for name, way in [("qwen3_moe", "fp8"), ("gpt_oss", "mxfp4")] for size in (2, 4)),
    *(("llama", way, 4, {}) for way in ("int8", "float8, one scale", "int4", "fp8 with fp4")),
    ("deepseek_v3", "fp8", 4, {"dtype": torch.bfloat16}),
    *(("llama odd", way, 2, {}) for way in ("gptq", "gptq v2", "awq", "fp8 by row")),
    *(("llama", way, 4, {}) for way in ("gptq", "gptq, shuffled", "awq", "fp8, one scale")),
    ("qwen3_moe", "gptq", 2, {}),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "way", "size", "options"), in_thirds(QUICK, SLOW, CASES), ids=str)
def test_it_is_the_model_of_its_numbers(
    tmp_path: Path, name: str, way: str, size: int, options: dict[str, Any]
) -> None:
    folder = write(name, way, tmp_path)
    for read, share, every in world(size).run(_loads, folder, name.partition(" ")[0], options):
        assert read <= 1.1 * every * share / 1000 + 20_000, (read, share, every)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_numbers_are_transformers_own(tmp_path: Path, name: str) -> None:
    way = "mxfp4" if name == "gpt_oss" else "fp8"
    folder = write(name, way, tmp_path)
    kind: Any = vars(quantization_config)["Mxfp4Config" if way == "mxfp4" else "FineGrainedFP8Config"]
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(folder, dtype=torch.bfloat16, quantization_config=kind(dequantize=True)).state_dict()
    ours = load(tmp_path / "plain", dtype=torch.bfloat16).state_dict()
    assert ours.keys() == theirs.keys()
    for tensor, own in zip(ours.values(), theirs.values(), strict=True):
        assert torch.equal(tensor, own)


def _held(folder: Path, changed: Callable[[dict[str, Tensor]], Any]) -> None:
    held = load_file(folder / SINGLE)
    changed(held)
    save_file(held, folder / SINGLE, metadata={"format": "pt"})


_GATE = "model.layers.1.mlp.gate_proj.weight"
_COMPRESSED: dict[str, Any] = WAYS["int4"].config
FAULTS: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "not asked": ("fp8", lambda f: None, r"quantised \(fp8\); tpplan computes(.|\n)*help: .*`dequantize=True`"),
    "no scales": (
        "fp8",
        lambda f: _held(f, lambda h: h.pop(f"{_GATE}_scale_inv")),
        rf"1 of (.|\n)*`{_GATE}` has no scales",
    ),
    "no codes": ("fp8", lambda f: _held(f, lambda h: h.pop(_GATE)), rf"`{_GATE}_scale_inv` has no codes"),
    "more scales": (
        "fp8",
        lambda f: _held(f, lambda h: h.update({f"{_GATE}_global_scale": torch.ones(1)})),
        rf"`{_GATE}_global_scale` is there beside the codes and scales of `{_GATE}`",
    ),
    "numbers, too": (
        "int4",
        lambda f: _held(f, lambda h: h.update({_GATE: torch.ones(384, 256)})),
        rf"`{_GATE}` is there beside the codes and scales of `{_GATE}`",
    ),
    "fewer scales": (
        "fp8",
        lambda f: _held(f, lambda h: h.update({f"{_GATE}_scale_inv": torch.ones(2, 3)})),
        r"is F32 of shape \[2, 3\], which isn't a number for each block of \[384, 256\] in blocks of 128×128",
    ),
    "whole numbers": (
        "fp8",
        lambda f: _held(f, lambda h: h.update({f"{_GATE}_scale_inv": torch.ones(3, 2, dtype=torch.int32)})),
        "is I32 of shape .*, which should be floating-point numbers or exponents",
    ),
    "other blocks": (
        "fp8",
        lambda f: change(f, quantization_config=WAYS["fp8"].config | {"weight_block_size": 128}),
        "a `weight_block_size` that isn't two sizes",
    ),
    "other groups": (
        "int4",
        lambda f: _held(f, lambda h: h.update({f"{_GATE}_shape": torch.tensor([384, 300])})),
        r"is I32 of shape \[384, 32\], which isn't \[384, 300\] at 4 bits each",
    ),
    "no shape": ("int4", lambda f: _held(f, lambda h: h.pop(f"{_GATE}_shape")), f"no `{_GATE}_shape`"),
    "in order": (
        "int4",
        lambda f: _held(f, lambda h: h.update({f"{_GATE}_g_idx": torch.arange(256)})),
        "in the order of activations",
    ),
    "another format": (
        "int4",
        lambda f: change(f, quantization_config=_COMPRESSED | {"format": "nvfp4-pack-quantized"}),
        r"\(compressed-tensors\), in the format nvfp4-pack-quantized, which tpplan doesn't read",
    ),
    "rotated": (
        "int4",
        lambda f: change(f, quantization_config=_COMPRESSED | {"transform_config": {"a": 1}}),
        "rotated",
    ),
    "another method": (
        "fp8",
        lambda f: change(f, quantization_config={"quant_method": "vptq"}),
        r"quantised \(vptq\)(.|\n)*note: it reads awq, compressed-tensors, fbgemm_fp8, fp8, gptq, mxfp4, torchao",
    ),
    "in parts": (
        "fp8",
        lambda f: change(f, quantization_config=None, text_config={"quantization_config": {"quant_method": "hqq"}}),
        r"quantised \(hqq\), which tpplan doesn't read(.|\n)*help: load the folder that it was quantised from",
    ),
    "other bits": (
        "gptq",
        lambda f: change(f, quantization_config=WAYS["gptq"].config | {"bits": 3}),
        r"quantised \(gptq\), in 3 bits, in words of int32, which",
    ),
    "another version": (
        "awq",
        lambda f: change(f, quantization_config=WAYS["awq"].config | {"version": "gemv"}),
        r"quantised \(awq\), in the format gemv, which",
    ),
    "no zero points": (
        "awq",
        lambda f: _held(f, lambda h: h.pop(_GATE.replace("weight", "qzeros"))),
        rf"`{_GATE}`: .*, which should be I32 of two dims, with `qzeros` beside it",
    ),
    "no such group": (
        "gptq",
        lambda f: _held(f, lambda h: h[_GATE.replace("weight", "g_idx")].fill_(8)),
        rf"`{_GATE}`: .*g_idx` is I32 of shape \[256\], which isn't one of 8 groups for each input",
    ),
    "no order of groups": (
        "gptq, shuffled",
        lambda f: _held(f, lambda h: h.pop(_GATE.replace("weight", "g_idx"))),
        rf"`{_GATE}`: .*scales` is F16 .*, of groups in the order of activations \(`desc_act`\) without a `g_idx`",
    ),
    "no codes of groups": (
        "gptq",
        lambda f: _held(f, lambda h: h.pop(_GATE.replace("weight", "qweight"))),
        rf"`{_GATE.replace('weight', 'scales')}` has no codes",
    ),
    "torchao": (
        "fp8",
        lambda f: change(f, quantization_config={"quant_method": "torchao", "quant_type": {}}),
        "quantised by torchao, don't say of which classes",
    ),
    "bitsandbytes": (
        "fp8",
        lambda f: change(f, quantization_config={"quant_method": "bitsandbytes"}),
        r"help: .*`dequantize\(\)`",
    ),
}


@pytest.mark.parametrize(
    ("said", "shape", "expected"),
    [
        ({"config_groups": {"a": {"weights": {"num_bits": "four"}}}}, [384, 256], "at no bits each"),
        ({"format": ["dense"]}, [384, 256], r"in the format \['dense'\]"),
        ({"sparsity_config": "2:4"}, [384, 256], "sparse, in the format 2:4"),
        ({}, [], r"isn't \[\] at 4 bits"),
        ({}, [384], r"isn't \[384\] at 4 bits"),
    ],
)
def test_what_is_malformed_is_told(tmp_path: Path, said: Any, shape: list[int], expected: str) -> None:
    folder = write("llama", "int4", tmp_path)
    change(tmp_path, quantization_config=_COMPRESSED | said)
    _held(tmp_path, lambda h: h.update({f"{_GATE}_shape": torch.tensor(shape, dtype=torch.int64)}))
    with pytest.raises(CheckpointError, match=expected):
        as_plain(read_checkpoint(folder), True, Meter())


def _tries(member: Member, folder: str, asked: bool) -> str:
    try:
        tpplan.from_pretrained(folder, "llama", member.mesh(), dequantize=asked)
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("fault", in_thirds([*FAULTS][:1], [*FAULTS][::5], FAULTS))
def test_a_fault_is_told(tmp_path: Path, fault: str) -> None:
    way, make, expected = FAULTS[fault]
    folder = write("llama", way, tmp_path)
    make(tmp_path)
    ours, theirs = world(2).run(_tries, folder, fault not in ("not asked", "torchao"))
    assert ours == theirs and ours.count("TP121") == 1 and "help: " in ours
    assert re.search(expected, ours), ours
