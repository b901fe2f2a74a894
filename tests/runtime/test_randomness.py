"""Dropout over an axis: one mask for what's replicated, one a rank for what's split, and one seed for the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.models.tiny import tiny_model
from tests.plans.parity import PLANS
from tests.runtime.world import Member, world

pytestmark = pytest.mark.processes


def gathered(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, tensor.contiguous())
    return parts


def dropped(model: nn.Module, keywords: dict[str, Any], names: list[str], seed: int) -> list[Tensor]:
    """Where the named dropouts' results are zero, and the output, of one forward in training."""
    seen: dict[str, Tensor] = {}
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda _m, _i, out, name=name: seen.update({name: out.detach()})  # pyright: ignore
        )
        for name in names
    ]
    torch.manual_seed(seed)
    with torch.no_grad():
        output = model.train()(**keywords)
    for hook in hooks:
        hook.remove()
    return [(seen[name] == 0).double() for name in names] + [output]


REPLICATED = ["dropout", "blocks.0.attention_dropout", "blocks.1.mlp_dropout"]


@pytest.mark.parametrize(
    ("plan", "same", "split"),
    [
        pytest.param("torch_transformer", REPLICATED, ["blocks.0.mlp.dropout"], marks=pytest.mark.slow),
        ("torch_transformer-sequence", [], ["blocks.0.mlp.dropout", "blocks.0.attention_dropout"]),
    ],
)
def test_masks_are_shared_where_values_are(plan: str, same: list[str], split: list[str]) -> None:
    world(2).run(_masks, plan, same, split)


def _masks(member: Member, plan: str, same: list[str], split: list[str]) -> None:
    model, keywords = tiny_model("torch_transformer", dropout=0.1)
    tpplan.parallelize(model, PLANS / f"{plan}.yaml", member.mesh(), keywords)
    *masks, output = dropped(model, keywords, same + split, seed=7)
    for name, mask in zip(same + split, masks, strict=True):
        one, other = gathered(mask)
        assert 0 < mask.mean() < 0.3, f"{name} drops a tenth"
        assert torch.equal(one, other) == (name in same), name
    assert torch.equal(*gathered(output))
    *again, repeated = dropped(model, keywords, same + split, seed=7)
    assert all(torch.equal(one, other) for one, other in zip(masks, again, strict=True))
    assert torch.equal(output, repeated)
    assert not torch.equal(output, dropped(model, keywords, [], seed=8)[-1])


class AttentionWithItsResidualDropout(nn.Module):
    """As in GPT-2: the body draws for the sharded probabilities, a module inside it for the replicated result."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.residual_dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        q, k, v = (layer(x).view(batch, sequence, -1, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = functional.dropout((q @ k.transpose(2, 3)).softmax(-1), 0.5, self.training)
        return self.residual_dropout(self.o((weights @ v).transpose(1, 2).reshape(batch, sequence, -1)))


def test_a_replicated_dropout_inside_a_body_that_draws_for_shards_still_draws_alike() -> None:
    world(2).run(_nested)


def _nested(member: Member) -> None:
    model = AttentionWithItsResidualDropout()
    plan = {"version": 1, "modules": {"{q,k,v}": "colwise", "o": "rowwise"}}
    x = torch.randn(3, 12, 16)
    tpplan.parallelize(model, plan, member.mesh(), (x,))
    mask, output = dropped(model, {"x": x}, ["residual_dropout"], seed=7)
    assert torch.equal(*gathered(mask))
    assert torch.equal(*gathered(output))
    _, after = dropped(model, {"x": x}, ["residual_dropout"], seed=7)
    assert torch.equal(output, after)


@pytest.mark.slow
def test_a_recomputed_forward_draws_the_same_masks() -> None:
    world(2).run(_recomputed)


def _recomputed(member: Member) -> None:
    gradients: list[dict[str, Tensor]] = []
    for checkpointed in (False, True):
        model, keywords = tiny_model("llama", attention_dropout=0.2)
        tpplan.parallelize(model, PLANS / "llama-sequence.yaml", member.mesh(), keywords)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # pyright: ignore
        torch.manual_seed(3)
        model.train()(**keywords).logits.square().mean().backward()
        gradients.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})  # pyright: ignore
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(
            gradients[1][name], gradient, rtol=1e-5, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}"
        )
