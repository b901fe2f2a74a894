"""A parallelized model trains as the stock model does: what users do around a forward and a backward."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import tpplan
from tests.marking import in_thirds, slow_but
from tests.models.tiny import ARCHITECTURES, example_keywords, first_output, tiny_model
from tests.plans.parity import (
    PLANS,
    assert_close,
    assert_parity,
    assert_same_run,
    loss_of,
    run,
    tolerance,
    whole,
)
from tests.runtime.world import Member, world

pytestmark = pytest.mark.processes

EXACT = tolerance(torch.float64)
COARSE = tolerance(torch.float32)
NAMES = ("llama", "torch_transformer", "opt", "bert")
PLANS_OF_TOY = ("torch_transformer", "torch_transformer-sequence")


def allowed(name: str) -> float:
    return tolerance(ARCHITECTURES[name].coarsest)


def pair(name: str, member: Member, plan: str | None = None, **settings: Any) -> tuple[nn.Module, nn.Module, Any]:
    """The stock model, a parallelized copy, and keywords of a call."""
    stock, keywords = tiny_model(name, **settings)
    path = PLANS / f"{plan or name}.yaml"
    return stock, tpplan.parallelize(copy.deepcopy(stock), path, member.mesh(), keywords), keywords


@pytest.mark.slow
def test_one_axis_of_a_larger_mesh_shards_the_model() -> None:
    world(4).run(_in_a_larger_mesh)


def _in_a_larger_mesh(member: Member) -> None:
    mesh = member.mesh(2, 2, names=("dp", "tp"))
    model, keywords = tiny_model("torch_transformer")
    plan = PLANS / "torch_transformer-sequence.yaml"
    assert_parity(model, keywords, plan, mesh["tp"], EXACT)
    assert_parity(model, keywords, plan, mesh, EXACT)


def test_a_model_on_meta_is_parallelized_then_filled() -> None:
    world(2).run(_from_meta)


def _from_meta(member: Member) -> None:
    stock, keywords = tiny_model("torch_transformer")
    bare, _ = tiny_model("torch_transformer", device="meta")
    sharded = tpplan.parallelize(bare, PLANS / "torch_transformer.yaml", member.mesh(), keywords)
    sharded.to_empty(device="cpu")
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        numbers = distribute_tensor(stock.get_parameter(name).detach(), parameter.device_mesh, parameter.placements)
        with torch.no_grad():
            parameter.copy_(numbers)
    assert_same_run(run(sharded, keywords), run(stock, keywords), EXACT)


@pytest.mark.parametrize("plan", slow_but(["torch_transformer-sequence"], PLANS_OF_TOY))
def test_gradients_of_two_backwards_add_up(plan: str) -> None:
    world(2).run(_two_backwards, plan)


def _two_backwards(member: Member, plan: str) -> None:
    stock, sharded, keywords = pair("torch_transformer", member, plan)
    other = example_keywords("torch_transformer", batch=2, sequence=8, seed=5)
    for held in (stock, sharded):
        run(held, keywords)
    assert_same_run(run(sharded, other), run(stock, other), EXACT)


@pytest.mark.slow
def test_two_forwards_before_their_backwards_keep_apart() -> None:
    world(2).run(_interleaved)


def _interleaved(member: Member) -> None:
    stock, sharded, keywords = pair("opt", member, "opt-sequence")
    other = example_keywords("opt", batch=2, sequence=8, seed=5)
    for held in (stock, sharded):
        one, two = (loss_of([first_output(held(**k))]) for k in (keywords, other))
        one.backward()
        two.backward()
    for name, parameter in stock.named_parameters():
        assert_close(name, whole(sharded.get_parameter(name).grad), parameter.grad, EXACT, least=0.1)


def test_autograd_grad_gives_gradients_of_distributed_parameters() -> None:
    world(2).run(_autograd_grad)


def _autograd_grad(member: Member) -> None:
    stock, sharded, keywords = pair("torch_transformer", member, "torch_transformer-sequence")
    names = ["blocks.1.attention.q.weight", "blocks.0.mlp_norm.weight", "blocks.1.mlp.down.bias", "tokens.weight"]
    found: list[list[torch.Tensor]] = []
    for held in (stock, sharded):
        loss = loss_of([held(**keywords)])
        found.append(list(torch.autograd.grad(loss, [held.get_parameter(name) for name in names])))
    for name, reference, ours in zip(names, *found, strict=True):
        assert isinstance(ours, DTensor)
        assert_close(name, ours.full_tensor(), reference, EXACT)
        assert sharded.get_parameter(name).grad is None


@pytest.mark.parametrize("plan", ["llama", "llama-sequence"])
def test_frozen_parameters_get_no_gradient_and_the_others_the_right_one(plan: str) -> None:
    world(2).run(_frozen, plan)


def _frozen(member: Member, plan: str) -> None:
    stock, keywords = tiny_model("llama")
    for name, parameter in stock.named_parameters():
        if "layers.0" in name or "norm" in name or "embed" in name:
            parameter.requires_grad_(False)
    assert_parity(stock, keywords, PLANS / f"{plan}.yaml", member.mesh(), COARSE)


@pytest.mark.parametrize("name", slow_but(["llama"], NAMES))
def test_a_wholly_frozen_model_gives_the_stock_models_outputs(name: str) -> None:
    world(2).run(_wholly_frozen, name)


def _wholly_frozen(member: Member, name: str) -> None:
    for plan in (name, f"{name}-sequence"):
        stock, keywords = tiny_model(name)
        stock.requires_grad_(False)
        sharded = tpplan.parallelize(copy.deepcopy(stock), PLANS / f"{plan}.yaml", member.mesh(), keywords)
        assert_close(plan, first_output(sharded(**keywords)), first_output(stock(**keywords)), allowed(name))


@pytest.mark.parametrize("plan", slow_but(["torch_transformer-sequence"], PLANS_OF_TOY))
def test_an_optimizer_step_is_the_stock_models_step(plan: str) -> None:
    world(2).run(_optimizer_step, plan)


def _optimizer_step(member: Member, plan: str) -> None:
    stock, sharded, keywords = pair("torch_transformer", member, plan)
    norms: list[torch.Tensor] = []
    for held in (stock, sharded):
        optimizer = torch.optim.AdamW(held.parameters(), lr=0.01, weight_decay=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of([held(**keywords)]).backward()
            norm = whole(torch.nn.utils.clip_grad_norm_(held.parameters(), 1.0))
            assert norm is not None
            norms.append(norm)
            optimizer.step()
    assert_close("first norm", norms[2], norms[0], EXACT)
    assert_close("second norm", norms[3], norms[1], 100 * EXACT)
    for name, parameter in stock.named_parameters():
        if not name.endswith("k.bias"):  # its gradient is rounding, of which Adam makes whole steps
            assert_close(name, whole(sharded.get_parameter(name).detach()), parameter.detach(), 100 * EXACT)


@pytest.mark.parametrize(
    ("when", "reentrant", "plan"),
    in_thirds(
        [("before", False, "llama"), ("after", False, "llama-sequence")],
        [("before", True, "llama-sequence"), ("after", True, "llama")],
        itertools.product(["before", "after"], [False, True], ["llama", "llama-sequence"]),
    ),
)
def test_activation_checkpointing_changes_nothing(plan: str, reentrant: bool, when: str) -> None:
    world(2).run(_checkpointed, plan, reentrant, when)


def _checkpointed(member: Member, plan: str, reentrant: bool, when: str) -> None:
    def enable(model: nn.Module) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # pyright: ignore

    stock, keywords = tiny_model("llama")
    model = copy.deepcopy(stock)
    if when == "before":
        enable(model)
    sharded = tpplan.parallelize(model, PLANS / f"{plan}.yaml", member.mesh(), keywords)
    if when == "after":
        enable(sharded)
    _assert_same_gradients(stock, sharded, keywords, COARSE)


def _assert_same_gradients(stock: nn.Module, sharded: nn.Module, keywords: Any, bound: float) -> None:
    outputs = [first_output(held(**keywords)) for held in (stock, sharded)]
    assert_close("output", outputs[1].detach(), outputs[0].detach(), bound)
    for output in outputs:
        loss_of([output]).backward()
    for name, parameter in stock.named_parameters():
        assert_close(name, whole(sharded.get_parameter(name).grad), parameter.grad, bound)


@pytest.mark.parametrize("plan", ["llama", "llama-sequence"])
def test_a_head_tied_to_the_embedding_shares_its_shards(plan: str) -> None:
    world(2).run(_tied, plan)


def _tied(member: Member, plan: str) -> None:
    stock, keywords = tiny_model("llama", tie_word_embeddings=True)
    sharded = assert_parity(stock, keywords, PLANS / f"{plan}.yaml", member.mesh(), COARSE)
    assert sharded.lm_head.weight is sharded.model.embed_tokens.weight  # pyright: ignore


@pytest.mark.one_in(3)
@pytest.mark.parametrize("plan", ["llama", "llama-sequence"])
def test_the_models_own_loss_is_right(plan: str) -> None:
    world(2).run(_own_loss, plan)


def _own_loss(member: Member, plan: str) -> None:
    stock, sharded, keywords = pair("llama", member, plan)
    labelled = {**keywords, "labels": keywords["input_ids"]}
    losses = [held(**labelled).loss for held in (stock, sharded)]
    assert_close("loss", losses[1].detach(), losses[0].detach(), COARSE)
    for loss in losses:
        loss.backward()
    for name, parameter in stock.named_parameters():
        assert_close(name, whole(sharded.get_parameter(name).grad), parameter.grad, COARSE)


@pytest.mark.parametrize("name", slow_but(["torch_transformer"], NAMES))
def test_evaluation_gives_the_stock_models_outputs(name: str) -> None:
    world(2).run(_evaluation, name)


def _evaluation(member: Member, name: str) -> None:
    for plan in (name, f"{name}-sequence"):
        stock, sharded, keywords = pair(name, member, plan)
        with torch.no_grad():
            reference, ours = (first_output(held.eval()(**keywords)) for held in (stock, sharded))
        assert_close(plan, ours, reference, allowed(name))


def test_greedy_generation_gives_the_stock_models_tokens() -> None:
    world(2).run(_generation)


def _generation(member: Member) -> None:
    stock, sharded, keywords = pair("llama", member)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    prompt = {"input_ids": keywords["input_ids"], "attention_mask": torch.ones_like(keywords["input_ids"])}
    reference, ours = (held.eval().generate(**prompt, **settings) for held in (stock, sharded))  # pyright: ignore
    assert torch.equal(ours, reference)


def test_gradients_of_given_embeddings_are_right() -> None:
    world(2).run(_embeddings)


def _embeddings(member: Member) -> None:
    for plan in ("llama", "llama-sequence"):
        stock, keywords = tiny_model("llama")
        stock.model.embed_tokens.requires_grad_(False)  # pyright: ignore
        given = torch.randn(3, 12, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        call = {"inputs_embeds": given, "attention_mask": keywords["attention_mask"]}
        example = {**call, "inputs_embeds": given.clone().requires_grad_()}
        sharded = tpplan.parallelize(copy.deepcopy(stock), PLANS / f"{plan}.yaml", member.mesh(), example)
        gradients: list[torch.Tensor] = []
        for held in (stock, sharded):
            embeddings = given.clone().requires_grad_()
            loss_of([first_output(held(**{**call, "inputs_embeds": embeddings}))]).backward()
            assert embeddings.grad is not None
            gradients.append(embeddings.grad)
        assert_close(plan, gradients[1], gradients[0], COARSE)
