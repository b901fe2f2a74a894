"""Models with adapters, sharded by the shipped plans: what users do with them, on real processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tpplan
from tests.adapters import models
from tests.adapters.models import IDS, adapted, assert_same_step, gpt2, llama, lora
from tests.marking import sweep_but
from tests.plans.parity import PLANS
from tests.runtime.world import Member, world

pytest.importorskip("peft", reason="peft isn't installed; it is in the `dev` extra")
pytestmark = pytest.mark.processes


def _one_layer() -> nn.Module:
    return llama(num_hidden_layers=1)


def _pair(
    member: Member, plan: str, make: Callable[[], nn.Module] = llama, *configs: Any, **options: Any
) -> tuple[Any, Any]:
    stock, model = (adapted(make, *configs, **options) for _ in range(2))
    ours = tpplan.parallelize(model, PLANS / f"{plan}.yaml", member.mesh())
    assert ours is model
    return ours, stock


@pytest.mark.sweep
@pytest.mark.parametrize("plan", sweep_but(["llama-sequence"], ["llama", "llama-sequence"]))
def test_life_with_one_adapter_is_that_of_the_unsharded_model(plan: str) -> None:
    world(2).run(_life, plan)


def _life(member: Member, plan: str) -> None:
    ours, stock = _pair(member, plan, lora_dropout=0.0, task_type="CAUSAL_LM")
    _assert_split(ours)
    assert_same_step(ours, stock)
    with ours.disable_adapter(), stock.disable_adapter():
        assert_same_step(ours, stock)
    assert_same_step(ours, stock)
    for model in (ours, stock):
        model.merge_adapter()
    with torch.no_grad():
        assert_same_step(ours, stock)
    for model in (ours, stock):
        model.unmerge_adapter()
        model.eval()
    assert_same_step(ours, stock)
    tokens = [m.generate(input_ids=IDS[:, :7], max_new_tokens=4, do_sample=False) for m in (ours, stock)]
    assert torch.equal(*tokens)


def _assert_split(model: Any) -> None:
    """By columns, the base and B; by rows, the base and A."""
    layer = model.get_base_model().model.layers[0]
    column, row = layer.self_attn.q_proj, layer.mlp.down_proj
    kept = [column.base_layer, column.lora_A.default, column.lora_B.default]
    kept += [row.base_layer, row.lora_A.default, row.lora_B.default]
    assert [m.weight.to_local().numel() * 2 == m.weight.numel() for m in kept] == [True, False, True, True, True, False]


@pytest.mark.sweep
def test_several_adapters_are_switched_and_trained_in_turns() -> None:
    world(2).run(_several)


def _several(member: Member) -> None:
    other = lora(r=8, target_modules=["q_proj", "k_proj", "o_proj"])
    ours, stock = _pair(member, "llama", _one_layer, lora(), other)
    for name in ("default", "b", "default"):
        for model in (ours, stock):
            model.set_adapter(name)
        assert_same_step(ours, stock)
    for model in (ours, stock):
        model.base_model.set_adapter(["default", "b"])
    assert_same_step(ours, stock)


_KEPT = {"modules_to_save": ["lm_head", "embed_tokens"], "target_modules": ["q_proj", "o_proj"]}
_CONV = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True, "modules_to_save": ["ln_f"]}


@pytest.mark.parametrize(
    ("plan", "make", "options"),
    [
        pytest.param("gpt2", gpt2, _CONV, marks=pytest.mark.slow),
        pytest.param("llama-sequence", llama, _KEPT, marks=pytest.mark.slow),
    ],
    ids=["gpt2", "kept modules"],
)
def test_an_adapter_is_saved_as_the_unsharded_models_and_loaded_again(
    plan: str, make: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    world(2).run(_saved, plan, make, options)


def _saved(member: Member, plan: str, make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

    ours, stock = _pair(member, plan, make, task_type="CAUSAL_LM", **options)
    assert_same_step(ours, stock)
    with ours.disable_adapter(), stock.disable_adapter():
        assert_same_step(ours, stock)
    state = get_peft_model_state_dict(stock)
    changed = {name: held.detach() * 1.5 for name, held in state.items()}
    for model in (ours, stock):
        set_peft_model_state_dict(model, dict(changed))
    assert_same_step(ours, stock)
    assert get_peft_model_state_dict(ours).keys() == state.keys()
    folders = [tempfile.mkdtemp() if member.rank == 0 else ""]
    dist.broadcast_object_list(folders, 0)
    sharded, plain = (Path(folders[0]) / name for name in ("sharded", "plain"))
    if member.rank == 0:
        stock.save_pretrained(plain)
    ours.save_pretrained(sharded)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (sharded / name).read_bytes() == (plain / name).read_bytes(), name
    loaded = PeftModel.from_pretrained(make(), sharded, is_trainable=True).double().train()
    assert_same_step(tpplan.parallelize(loaded, PLANS / f"{plan}.yaml", member.mesh()), stock)


@pytest.mark.slow
def test_what_changes_the_modules_is_refused_on_every_rank_with_the_way_out() -> None:
    for texts in world(2).run(_changed):
        for text in texts:
            assert "TP130" in text and "apply adapters first" in text, text


def _changed(member: Member) -> list[str]:
    ours, _ = _pair(member, "llama", _one_layer)
    ours.add_adapter("b", lora(r=2))
    found = [_error_of(ours)]
    ours, _ = _pair(member, "llama", _one_layer)
    found.append(_error_of(ours.merge_and_unload()))
    ours, _ = _pair(member, "llama", _one_layer, lora(), lora())
    ours.add_weighted_adapter(["default", "b"], [0.5, 0.5], "both", combination_type="cat")
    found.append(_error_of(ours))
    plain = tpplan.parallelize(_one_layer(), PLANS / "llama.yaml", member.mesh())
    return [*found, _error_of(models.adapted(lambda: plain))]


def _error_of(model: Any) -> str:
    try:
        model(input_ids=IDS)
    except tpplan.TpplanError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.slow
def test_a_model_on_meta_gets_its_base_from_a_folder_and_its_adapters_anew() -> None:
    world(2).run(_from_a_folder)


def _from_a_folder(member: Member) -> None:
    from peft import get_peft_model

    folders = [tempfile.mkdtemp() if member.rank == 0 else ""]
    dist.broadcast_object_list(folders, 0)
    stock: Any = llama().float()
    if member.rank == 0:
        stock.save_pretrained(folders[0])
    dist.barrier()

    def build() -> Any:
        return get_peft_model(llama().float(), lora())

    with torch.device("meta"):
        ours = build()
    tpplan.parallelize(ours, PLANS / "llama.yaml", member.mesh())
    names = {"^": "base_model.model.", r"((self_attn|mlp)\.\w+)\.weight$": r"\1.base_layer.weight"}
    tpplan.load_weights(ours, folders[0], rename=names, strict=False)
    tpplan.init_weights(ours, build=build, missing=True)
    with torch.no_grad():
        models.assert_near(ours(input_ids=IDS).logits, stock(input_ids=IDS).logits, "logits")
    assert all(bool(p.abs().sum().item()) for name, p in ours.named_parameters() if "lora_A" in name)
