"""A model of transformers that is asked for its routers' logits is proved as another is, whole experts and all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import tpplan
from tests.runtime.world import Member, world
from tests.zoo.architectures import build


@pytest.mark.parametrize("by_config", [True, False])
def test_routers_logits_leave_experts_whole(by_config: bool) -> None:
    model, inputs = build("mixtral")
    if by_config:
        model.config.output_router_logits = True  # type: ignore[union-attr]
    call: dict[str, Any] = inputs if by_config else {**inputs, "output_router_logits": True}
    plan = tpplan.load_plan("mixtral-experts")
    program = tpplan.compile_plan(model, plan, 2, call)
    assert any("experts" in held.names[0] and held.shape != held.local_shape for held in program.parameters)
    assert not any(module._forward_hooks for module in model.modules())  # it isn't changed
    assert not hasattr(model.model, "_output_capturing_hooks_installed")


def mixtral() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4}
    config = MixtralConfig(**sizes, **heads, initializer_range=0.2, output_router_logits=True)
    return MixtralForCausalLM(config)


def sharded(member: Member) -> tuple[float, float]:
    ids = torch.arange(12).view(2, 6)
    refused = mixtral()
    with pytest.raises(tpplan.CompileError):
        tpplan.parallelize(refused, {"version": 1, "modules": {"nothing": "colwise"}}, member.mesh())
    assert not any(module._forward_hooks for module in refused.modules())  # all or nothing
    whole = mixtral()(input_ids=ids, labels=ids)
    model = tpplan.parallelize(mixtral(), "mixtral-experts", member.mesh())
    found = model(input_ids=ids, labels=ids)
    logits = max((a - b).abs().max().item() for a, b in zip(found.router_logits, whole.router_logits, strict=True))
    return logits, (found.loss - whole.loss).abs().item()


@pytest.mark.processes
def test_the_logits_and_the_loss_are_the_stock_model_s() -> None:
    for logits, loss in world(2).run(sharded):
        assert logits < 1e-5 and loss < 1e-5
