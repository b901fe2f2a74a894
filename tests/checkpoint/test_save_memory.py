"""What a rank needs in memory while it saves: its shards, and some blocks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import tpplan
from tests.checkpoint.memory import MIB, peak
from tests.plans.parity import PLANS
from tests.runtime.world import Member, world

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def _saves(member: Member, folder: str, file_bytes: int) -> tuple[int, int, float]:
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=9,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=60000,
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    tpplan.parallelize(model, PLANS / "llama.yaml", member.mesh())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(member.rank)
    dist.barrier()
    with peak() as seen:
        start = time.perf_counter()
        tpplan.save_weights(model, folder, file_bytes=file_bytes)
        seconds = time.perf_counter() - start
    return sum(p.numel() * p.itemsize for p in model.parameters()), seen[0], seconds


@pytest.mark.parametrize(
    "file_bytes",
    [pytest.param(5 * 1024 * MIB, marks=pytest.mark.sweep), 256 * MIB],
    ids=["one file", "files of both ranks"],
)
def test_a_rank_needs_little_more_than_its_shards(file_bytes: int, tmp_path: Path) -> None:
    for rank, (size, most, seconds) in enumerate(world(2).run(_saves, str(tmp_path), file_bytes)):
        print(f"rank {rank}: {most // MIB} MiB over its shards, {size // MIB} MiB in all, {seconds:.1f} s")
        assert size > 900 * MIB
        assert most <= 300 * MIB
