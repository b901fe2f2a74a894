"""Modules called by themselves: each takes and gives whole tensors, and gradients are those of the stock module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpplan
from tests.marking import slow_but
from tests.models.tiny import tiny_model
from tests.plans.parity import PLANS
from tests.runtime.simulated import on_ranks
from tests.runtime.world import Member, world
from tests.zoo.architectures import build

Call = tuple[tuple[Any, ...], dict[str, Any], Any]


def calls_of(model: nn.Module, keywords: dict[str, Any]) -> dict[str, Call]:
    """The arguments and the result of each module's call in a forward of the stock model."""
    found: dict[str, Call] = {}
    hooks = [
        module.register_forward_hook(
            lambda _m, args, kwargs, out, name=name: found.update({name: (args, kwargs, out)}),  # pyright: ignore
            with_kwargs=True,
        )
        for name, module in model.named_modules()
        if name
    ]
    model(**keywords)
    for hook in hooks:
        hook.remove()
    return found


def fresh(held: Any) -> Any:
    """Leaves in place of tensors, with gradients as before."""
    if isinstance(held, Tensor):
        return held.detach().clone().requires_grad_(held.requires_grad)
    if isinstance(held, (tuple, list)):
        return type(held)(map(fresh, held))  # pyright: ignore
    return {name: fresh(item) for name, item in held.items()} if isinstance(held, dict) else held  # pyright: ignore


def leaves(held: Any) -> list[Tensor]:
    if isinstance(held, Tensor):
        return [held]
    items = held.values() if isinstance(held, dict) else held if isinstance(held, (tuple, list)) else ()
    return [leaf for item in items for leaf in leaves(item)]


def run(module: nn.Module, call: Call) -> list[Tensor]:
    """The result, and the gradients of what it is given and of its parameters."""
    args, kwargs = fresh(call[0]), fresh(call[1])
    for parameter in module.parameters():
        parameter.grad = None
    made = leaves(module(*args, **kwargs))[0]
    if not made.requires_grad:
        return [made]
    torch.manual_seed(1)
    made.backward(torch.randn(made.shape, dtype=made.dtype))
    given = [leaf.grad for leaf in leaves((args, kwargs)) if leaf.requires_grad]
    wanted = [*given, *(parameter.grad for parameter in module.parameters())]
    return [made] + [held.full_tensor() if isinstance(held, DTensor) else held for held in wanted if held is not None]


def alone(member: Member, name: str, plan: str) -> dict[str, float]:
    """The largest error of each module that is called by itself, relative to the largest of what it should give."""
    stock, keywords = tiny_model(name)
    model, _ = tiny_model(name)
    tpplan.parallelize(model, PLANS / f"{plan}.yaml", member.mesh(), keywords)
    errors: dict[str, float] = {}
    for path, call in calls_of(stock, keywords).items():
        if not leaves(call[0]) and not leaves(call[1]):
            continue
        theirs, ours = (run(m.get_submodule(path), call) for m in (stock, model))
        assert len(ours) == len(theirs), path
        scale = max(float(b.detach().abs().max()) for b in theirs)
        errors[path] = max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True)) / scale
    return errors


@pytest.mark.processes
@pytest.mark.parametrize(
    "plan", slow_but(["llama-sequence", "bert"], ["llama", "llama-sequence", "bert", "gpt2-sequence"])
)
@pytest.mark.one_in(3)
def test_each_module_takes_and_gives_whole_tensors(plan: str) -> None:
    for errors in world(2).run(alone, plan.removesuffix("-sequence"), plan):
        assert len(errors) > 15
        assert {path: error for path, error in errors.items() if error > 1e-12} == {}


def encoded(model: Any) -> list[Tensor]:
    """An encoder by itself, as `generate` calls it, and one of its blocks, which hands biases by heads on."""
    ids = torch.randint(3, 80, (2, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model.get_encoder()(input_ids=ids, output_hidden_states=True)
        block = model.encoder.block[0](whole.last_hidden_state)
        made = model(encoder_outputs=whole, decoder_input_ids=ids)
    return [whole.last_hidden_state, *whole.hidden_states, *block, made.logits]


def compared(kind: str, plan: str, work: Callable[[Any], list[Tensor]]) -> int:
    """Hold what `work` makes of a sharded model against what it makes of the stock one; returns how much that is."""
    model, inputs = build(kind)
    torch.manual_seed(0)
    stock: Any = type(model)(model.config).eval()  # pyright: ignore
    example = (), {name: torch.ones(held.shape, dtype=held.dtype) for name, held in inputs.items()}
    ranks = on_ranks(stock, str(PLANS / f"{plan}.yaml"), 2, example, lambda m, _: work(m.eval()))
    expected = work(stock)
    for ours in ranks:
        for one, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, other)
    return len(expected)


@pytest.mark.sweep
def test_an_encoder_is_called_by_itself_where_only_a_split_sequence_makes_something_of_its_blocks() -> None:
    assert compared("t5", "t5-sequence", encoded)


def wanting(member: Member) -> str:
    stock, keywords = tiny_model("llama")
    model, _ = tiny_model("llama")
    tpplan.parallelize(model, PLANS / "llama.yaml", member.mesh(), keywords)
    args, kwargs, _ = calls_of(stock, keywords)["model.layers.0.self_attn"]
    kwargs["position_embeddings"] = tuple(t.clone().requires_grad_() for t in kwargs["position_embeddings"])
    try:
        model.get_submodule("model.layers.0.self_attn")(*args, **kwargs)
    except tpplan.TpplanError as error:
        return str(error)
    return ""


@pytest.mark.processes
def test_a_gradient_that_the_proof_does_not_have_is_refused() -> None:
    for text in world(2).run(wanting):
        assert text.startswith("TP117 unproved-call: `model.layers.0.self_attn` is called by itself")
        assert "`position_embeddings.0` doesn't require grad there" in text


def shown(model: Any) -> list[Tensor]:
    """All that a model and its encoder can show, after attention was told to show its weights."""
    model.model.config._attn_implementation = "eager"
    sound = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(1))
    ids = torch.randint(3, 80, (2, 8), generator=torch.Generator().manual_seed(1))
    flags = {"output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        alone = model.get_encoder()(sound, **flags)
        made = model(encoder_outputs=alone, decoder_input_ids=ids, **flags)
    seen = (alone.hidden_states, alone.attentions, made.decoder_hidden_states, made.decoder_attentions)
    return [tensor for held in (*seen, made.cross_attentions) for tensor in held]


@pytest.mark.sweep
def test_modules_show_all_that_a_setting_of_later_lets_them_show() -> None:
    assert compared("whisper", "whisper", shown) == 12


class ByMode(nn.Module):
    """Each mode has a program of its own, and that of evaluation calls neither `aux` nor `back` nor `table`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.table = nn.Linear(8, 16), nn.Linear(16, 8), nn.Embedding(6, 8)
        self.aux, self.back = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + self.down(self.up(x).softmax(-1))
        return self.down(self.up(x).relu()) + self.back(self.aux(x + self.table(torch.arange(4))).relu())


def test_layers_that_the_last_call_ran_without_are_whole_by_themselves() -> None:
    stock, x, features = ByMode().double(), torch.randn(2, 4, 8).double(), torch.randn(2, 4, 16).double()
    ids = torch.arange(6)

    def of(model: Any) -> list[Tensor]:
        return [model.aux(x), model.back(features), model.table(ids), model.up(x)]

    def work(model: nn.Module, guard: Any) -> list[Tensor]:
        model.train()(x)
        with torch.no_grad():
            model.eval()(x)
        return of(model)

    rules = {"up": "colwise", "down": "rowwise", "aux": "colwise", "back": "rowwise", "table": "vocab"}
    for made in on_ranks(stock, rules, 2, ((x,), {}), work):
        for found, whole in zip(made, of(stock), strict=True):
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-14)
