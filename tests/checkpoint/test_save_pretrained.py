"""Sharded models of transformers: folders that transformers reads, copies, and what is refused."""

from __future__ import annotations

import copy
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import tpplan
from tests.marking import slow_but
from tests.plans.parity import PLANS
from tests.runtime.world import Member, world

pytestmark = pytest.mark.processes


def _made(name: str) -> Any:
    torch.manual_seed(3)
    if name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=1)
        )
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            tie_word_embeddings=name == "tied llama",
        )
    )


def _sharded(member: Member, name: str, fsdp: bool = False) -> Any:
    mesh = member.mesh(2, 2, names=("dp", "tp")) if fsdp else member.mesh()
    model = tpplan.parallelize(_made(name), PLANS / f"{name.split()[-1]}.yaml", mesh["tp"] if fsdp else mesh)
    return fully_shard(model, mesh=mesh["dp"]) if fsdp else model


def _saved(member: Member, name: str, how: str, folder: str, fsdp: bool) -> None:
    model = _sharded(member, name, fsdp)
    model.generation_config.max_new_tokens = 7
    before = copy.deepcopy(model.config.to_dict())
    if how == "save_weights":
        tpplan.save_weights(model, folder, file_bytes=8000)
    else:
        model.save_pretrained(folder, max_shard_size=8000)
    assert model.config.to_dict() == before


KINDS = ("llama", "gpt2", "tied llama")


@pytest.mark.parametrize("how", ["save_weights", "save_pretrained"])
@pytest.mark.parametrize(
    ("name", "fsdp"),
    slow_but([("gpt2", False), ("tied llama", False)], [(name, False) for name in KINDS] + [("gpt2", True)]),
    ids=str,
)
@pytest.mark.one_in(3)
def test_transformers_reads_what_is_saved(name: str, how: str, fsdp: bool, tmp_path: Path) -> None:
    folder, theirs = tmp_path / "ours", tmp_path / "theirs"
    world(4 if fsdp else 2).run(_saved, name, how, str(folder), fsdp)
    stock = _made(name)
    stock.generation_config.max_new_tokens = 7
    stock.save_pretrained(theirs, max_shard_size=8000)
    for file in ("config.json", "generation_config.json"):
        assert json.loads((folder / file).read_text()) == json.loads((theirs / file).read_text())
    names = [
        set(json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]) for path in (folder, theirs)
    ]
    assert names[0] == names[1] and len(list(folder.glob("*.safetensors"))) > 1
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, problems = loaded
    assert not any(problems.values())
    assert type(model) is type(stock) and model.generation_config.max_new_tokens == 7
    for key, tensor in stock.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key


def _copied(member: Member, name: str) -> None:
    model, stock = _sharded(member, name).eval(), _made(name).eval()
    ids = torch.arange(8).view(1, 8)
    for _ in range(2):
        again = copy.deepcopy(model)
        torch.testing.assert_close(again(input_ids=ids).logits, stock(input_ids=ids).logits)
        for one in (model, again, stock):
            one.zero_grad()
            one(input_ids=ids, labels=ids).loss.backward()
        for one in (model, again):
            for ours, theirs in zip(one.parameters(), stock.parameters(), strict=True):
                assert isinstance(ours.grad, DTensor)
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        for one in (stock, again):
            assert all(parameter.grad is None for parameter in copy.deepcopy(one).parameters())
    inner = next(iter(model.children()))
    assert list(copy.deepcopy(inner).state_dict()) == list(inner.state_dict())


@pytest.mark.parametrize("name", slow_but([], ["llama", "gpt2"]))
def test_copies_run_before_and_after_a_backward(name: str) -> None:
    world(2).run(_copied, name)


def _pickled(member: Member) -> None:
    model = _sharded(member, "llama")
    attempts = [
        *(lambda protocol=protocol: pickle.dumps(model, protocol) for protocol in (0, 2, pickle.HIGHEST_PROTOCOL)),
        lambda: torch.save(model, io.BytesIO()),
        lambda: torch.save({"model": model}, io.BytesIO()),
        lambda: pickle.dumps(model.lm_head),
        lambda: pickle.dumps(copy.deepcopy(model)),
    ]
    for attempt in attempts:
        with pytest.raises(tpplan.TpplanError, match=r"TP142.*can't be pickled(.|\n)*save_weights"):
            attempt()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = _sharded(member, "llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(torch.load(file))
    for ours, theirs in zip(other.parameters(), _made("llama").parameters(), strict=True):
        assert isinstance(ours, DTensor)
        assert torch.equal(ours.full_tensor(), theirs)


def test_pickling_is_refused_with_the_way_out() -> None:
    world(2).run(_pickled)
