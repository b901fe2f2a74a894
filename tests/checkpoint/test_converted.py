"""Tensors that transformers' checkpoints name or cut otherwise than its modules are read as transformers reads them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, PermuteForRope, WeightConverter, WeightRenaming

import tpplan
from tests.checkpoint.test_load import boxes_of
from tpplan.checkpoint.assembled import assembled, reads
from tpplan.checkpoint.files import SINGLE, CheckpointError
from tpplan.checkpoint.header import read_header
from tpplan.checkpoint.loading import load
from tpplan.checkpoint.meter import Meter
from tpplan.checkpoint.reading import Files
from tpplan.checkpoint.sketch import Sketch
from tpplan.hf.build import build_stock

_SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"vocab_size": 32, "max_position_embeddings": 16}


def _rearranged(tensors: list[Any], drawn: random.Random) -> Any:
    """A tensor that some random steps make of others, the same ones for equal seeds."""
    held = list(tensors)
    for _ in range(6):
        kind, dim, one = drawn.choice(["cat", "stack", "chunk", "split"]), drawn.choice([0, 1, -1]), drawn.choice(held)
        if kind == "cat":
            held.append(
                torch.cat([one] * drawn.choice([1, 2]) + [drawn.choice([t for t in held if t.shape == one.shape])], dim)
            )
        elif kind == "stack":
            held.append(torch.stack([one, drawn.choice([t for t in held if t.shape == one.shape])], dim=dim))
        elif kind == "chunk":
            held.append(drawn.choice(torch.chunk(one, drawn.choice([2, 3]), dim=dim)).contiguous())
        else:
            size = one.shape[dim]
            held.append(drawn.choice(torch.split(one, [size // 3, size - size // 3], dim=dim)))
    return held[-1]


@pytest.mark.parametrize("seed", range(40))
def test_what_is_sketched_is_read(tmp_path: Path, seed: int) -> None:
    whole = {name: torch.rand(4, 6) for name in ("a", "b", "c")}
    save_file(whole, tmp_path / SINGLE)
    stored = {held.name: held for held in read_header(tmp_path / SINGLE, Meter()).tensors}
    expected: Tensor = _rearranged(list(whole.values()), random.Random(seed))
    sketch: Sketch = _rearranged([Sketch.of(stored[name]) for name in whole], random.Random(seed))
    assert sketch.shape == tuple(expected.shape)
    source = assembled("x", sketch.shape, sketch.pieces)
    for more in range(4):
        boxes, shape = boxes_of(sketch.shape, more)
        part, meter = torch.full(shape, 7.0), Meter()
        with Files(meter) as files:
            assert files.fill_by(part, reads(source, boxes))
        for box in boxes:
            assert torch.equal(box.of_part(part), box.of_whole(expected))
        assert meter.bytes == sum(box.of_whole(expected).nbytes for box in boxes)


@pytest.mark.parametrize("step", [lambda t: t.transpose(0, 1), lambda t: t + 1, lambda t: torch.flip(t, [0])])
def test_what_is_no_box_is_refused(tmp_path: Path, step: Any) -> None:
    save_file({"a": torch.rand(4, 6)}, tmp_path / SINGLE)
    (stored,) = read_header(tmp_path / SINGLE, Meter()).tensors
    with pytest.raises((NotImplementedError, TypeError)):
        step(Sketch.of(stored))


def _folder(kind: str, path: Path, **settings: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **_SIZES | settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    return model


def _same(ours: Any, theirs: Any) -> None:
    state = theirs.state_dict()
    assert ours.state_dict().keys() == state.keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def _empty(model: Any) -> Any:
    return build_stock(type(model), model.config, torch.float32)


@pytest.mark.parametrize(
    "kind", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_neox", "granitemoe"]
)
def test_a_folder_of_transformers_is_read_as_transformers_reads_it(tmp_path: Path, kind: str) -> None:
    few: dict[str, Any] = {"num_experts": 12, "num_local_experts": 12, "n_routed_experts": 12, "n_group": 2}
    few |= {"moe_intermediate_size": 8, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8}
    model = _folder(kind, tmp_path, **few)
    ours = tpplan.load_weights(_empty(model), tmp_path)
    _same(ours, transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    _same(ours, model)


def test_experts_that_are_missing_are_told(tmp_path: Path) -> None:
    model = _folder("mixtral", tmp_path, num_local_experts=4)
    held = load_file(tmp_path / SINGLE)
    (gone,) = [name for name in held if "layers.1" in name and "experts.2.w2" in name]
    del held[gone]
    save_file(held, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=r"shape \[3, 16, 24\] there and \[4, 16, 24\] in the model"):
        tpplan.load_weights(_empty(model), tmp_path)


def _ruled(monkeypatch: pytest.MonkeyPatch, *rules: Any) -> None:
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: list(rules))


def test_one_stored_tensor_may_be_several_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _folder("llama", tmp_path)
    held, names = load_file(tmp_path / SINGLE), [f"{n}_proj.weight" for n in "qkv"]
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        held[f"{prefix}qkv.weight"] = torch.cat([held.pop(prefix + name) for name in names])
    save_file(held, tmp_path / SINGLE)
    _ruled(monkeypatch, WeightConverter("self_attn.qkv.weight", [f"self_attn.{n}" for n in names], [Chunk(0)]))
    _same(tpplan.load_weights(_empty(model), tmp_path), model)


def test_a_conversion_that_moves_single_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _folder("llama", tmp_path)
    _ruled(monkeypatch, WeightConverter("q_proj.weight", "q_proj.weight", [PermuteForRope()]))
    with pytest.raises(CheckpointError, match=r"converts 2 tensors(.|\n)*tpplan\.save_weights(.|\n)*q_proj"):
        tpplan.load_weights(_empty(model), tmp_path)


def test_two_stored_tensors_for_one_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _folder("llama", tmp_path)
    held = load_file(tmp_path / SINGLE)
    save_file(held | {"old.norm.weight": torch.zeros(16)}, tmp_path / SINGLE)
    _ruled(monkeypatch, WeightRenaming("^old", "model"))
    with pytest.raises(CheckpointError, match=r"`model.norm.weight`, `old.norm.weight`, of which"):
        tpplan.load_weights(_empty(model), tmp_path)


def test_joined_tensors_must_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _folder("llama", tmp_path)
    sources = ["self_attn.q_proj.weight", "mlp.down_proj.weight"]
    _ruled(monkeypatch, WeightConverter(sources, "self_attn.k_proj.weight", [Concatenate(0)]))
    with pytest.raises(CheckpointError, match=r"shapes \[16, 16\] and \[16, 24\] can't be joined along dim 0"):
        tpplan.load_weights(_empty(model), tmp_path)


def test_a_base_model_goes_into_one_with_a_head_and_back(tmp_path: Path) -> None:
    model = _folder("llama", tmp_path / "head")
    model.model.save_pretrained(tmp_path / "base")
    base, head = _empty(model.model), _empty(model)
    found = load(head, tmp_path / "base", strict=False)
    assert found.missing == ("lm_head.weight",) and not found.unexpected
    found = load(base, tmp_path / "head")
    assert found.unexpected == ("lm_head.weight",)
    _same(base, model.model)


def test_what_transformers_takes_no_notice_of_is_no_warning(tmp_path: Path) -> None:
    model = _folder("llama", tmp_path)
    held = load_file(tmp_path / SINGLE)
    save_file(held | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, tmp_path / SINGLE)
    assert not load(_empty(model), tmp_path).unexpected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_parameters_that_transformers_keeps_wide_are_wide(tmp_path: Path, dtype: torch.dtype) -> None:
    kinds = transformers.T5ForConditionalGeneration, transformers.T5Config
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4, "vocab_size": 32}
    stock: Any = kinds[0](kinds[1](**sizes))
    stock.save_pretrained(tmp_path)
    theirs = kinds[0].from_pretrained(tmp_path, dtype=dtype).state_dict()
    ours = build_stock(kinds[0], stock.config, dtype).state_dict()
    assert {name: t.dtype for name, t in ours.items()} == {name: t.dtype for name, t in theirs.items()}
    assert len({t.dtype for t in ours.values()}) == (2 if dtype is torch.float16 else 1)
