"""What a rank needs in memory while its model is initialised: its shards, and a whole tensor or two; not the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import tpplan
from tests.checkpoint.memory import MIB, peak
from tests.plans.parity import PLANS
from tests.runtime.world import Member, world
from tpplan.compat.dtensors import local_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def _initialises(member: Member) -> tuple[int, int, int, int]:
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=9, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=30000,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    tpplan.parallelize(model, PLANS / "llama.yaml", member.mesh())
    dist.barrier()
    with peak() as most:
        tpplan.init_weights(model)
    sizes = [p.numel() * p.itemsize for p in model.parameters()]
    return sum(sizes), sum(local_of(p).nbytes for p in model.parameters()), max(sizes), most[0]


def test_a_rank_never_has_the_model() -> None:
    for rank, (whole, share, largest, most) in enumerate(world(2).run(_initialises)):
        print(f"rank {rank}: {most // MIB} MiB; share {share // MIB}, largest {largest // MIB}, whole {whole // MIB}")
        assert whole > 700 * MIB
        # Of one whole tensor at a time (`test_effort.py`) the system's allocator makes up to two.
        assert most <= share + 2 * largest + 100 * MIB < whole
