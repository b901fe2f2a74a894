"""Attention as people run it, on a GPU: two ranks on one device, through gloo, beside the stock model.

python -m pytest tests/ops/test_attention_on_a_gpu.py -m gpu
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import flex_attention

import tpplan
from tests.ops import flex
from tests.ops.flash import TAKES_GROUPS, Packed
from tpplan.runtime.parameters.sharded_tensors import ShardedTensor

pytestmark = pytest.mark.gpu
HEADS: dict[str, Any] = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
MODELS: dict[str, dict[str, Any]] = {
    "Distance": HEADS, "Documents": HEADS, "Bias": HEADS, "HeadBias": {**HEADS, "slopes": "colwise"}, "Causal": HEADS,
}  # fmt: skip
# Relative, of the largest entry: products run in float32 there (no TF32), and in bfloat16.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def _run(rank: int, path: str, function: Callable[..., Any], arguments: tuple[Any, ...], results: Any) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        results.put((rank, function(*arguments)))
    except BaseException as error:
        results.put((rank, error if isinstance(error, AssertionError) else AssertionError(repr(error))))
        raise
    finally:
        dist.destroy_process_group()


def on_two_ranks(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function` returns on each of two processes."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    path = os.path.join(tempfile.mkdtemp(), "rendezvous")
    held = [context.Process(target=_run, args=(rank, path, function, arguments, results)) for rank in range(2)]
    for process in held:
        process.start()
    found: list[Any] = [results.get(timeout=180) for _ in held]
    for process in held:
        process.join(20)
    for _, result in found:
        if isinstance(result, BaseException):
            raise result
    return [result for _, result in found]


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest, in parts of the largest entry; of what is sharded, in this rank's part."""
    if isinstance(ours, ShardedTensor):
        ours, theirs = ours.to_local(), ours.part.of(theirs)
    made = (ours.detach().float() - theirs.detach().float()).abs().max() / theirs.detach().float().abs().max()
    return float(made)


def compared(stock: nn.Module, rules: dict[str, Any], calls: list[dict[str, Any]]) -> list[float]:
    """The largest differences of results and gradients, call by call."""
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))
    model = tpplan.parallelize(copy.deepcopy(stock), {"version": 1, "modules": rules}, mesh, inputs=calls[0])
    found: list[float] = []
    for call in calls:
        results = [held(**call) for held in (model, stock)]
        for held, result in zip((model, stock), results, strict=True):
            held.zero_grad()
            result.square().mean().backward()
        pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), stock.parameters(), strict=True)]
        assert all(own is not None and other is not None for own, other in pairs)
        found += [difference(*results), *(difference(own, other) for own, other in pairs)]  # pyright: ignore
    return found


def flexible(name: str, compiles: bool) -> list[float]:
    torch.manual_seed(0)
    flex.SIZE = 32
    kind = flex.MODELS[name]
    stock = kind(8, 4).cuda()
    if compiles:
        stock.call = torch.compile(flex_attention)
    calls = [{"x": torch.randn(2, length, 16, device="cuda")} for length in (128, 128, 256)]
    return compared(stock, MODELS[name], calls)


@pytest.mark.parametrize(("name", "compiles"), [*((name, True) for name in MODELS), ("Distance", False)])
def test_flex_attention(name: str, compiles: bool) -> None:
    for found in on_two_ranks(flexible, name, compiles):
        assert max(found) < TOLERANCES[torch.float32]


def packed(keys: int) -> list[float]:
    torch.manual_seed(0)
    stock = Packed(8, keys).bfloat16().cuda()
    ends = torch.tensor([0, 16, 40, 64], dtype=torch.int32, device="cuda")
    x = torch.randn(64, 16, device="cuda", dtype=torch.bfloat16)
    calls = [{"x": x[:length], "ends": ends[:count], "longest": 24} for length, count in ((40, 3), (40, 3), (64, 4))]
    return compared(stock, HEADS, calls)


@pytest.mark.parametrize("keys", [8, 4] if TAKES_GROUPS else [8])
def test_sequences_one_behind_the_other(keys: int) -> None:
    for found in on_two_ranks(packed, keys):
        assert max(found) < TOLERANCES[torch.bfloat16]


def in_transformers(implementation: str) -> list[float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings: dict[str, Any] = {**flex.CONFIG, "hidden_size": 256, "attn_implementation": implementation}
    stock: Any = LlamaForCausalLM(LlamaConfig(**settings)).eval().requires_grad_(False)
    stock = stock.to("cuda")
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))
    ids = torch.randint(0, 128, (2, 128), device="cuda")
    model: Any = tpplan.parallelize(copy.deepcopy(stock), "plans/llama.yaml", mesh, inputs={"input_ids": ids})
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    calls = ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}, {"input_ids": ids[:, :100]})
    found = [difference(*(held(**call).logits for held in (model, stock))) for call in calls]
    generated = [held.generate(ids[:, :20], max_new_tokens=4, do_sample=False) for held in (model, stock)]
    return [*found, float(not torch.equal(*generated))]


@pytest.mark.parametrize("implementation", ["flex_attention", "sdpa"])
def test_transformers_interfaces(implementation: str) -> None:
    for found in on_two_ranks(in_transformers, implementation):
        assert max(found) < TOLERANCES[torch.float32]
