"""What a rank needs in memory while it saves: its shards, and some blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import tpplan
from tests.plans.parity import PLANS
from tests.runtime.world import Member, world

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MIB = 1024**2


def _private() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


@contextmanager
def _peak() -> Iterator[list[int]]:
    """The most private memory that the process has had in the block, over what it had before; seen every 30 ms."""
    before, found, over = _private(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.03):
            found[0] = max(found[0], _private() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


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
    with _peak() as peak:
        start = time.perf_counter()
        tpplan.save_weights(model, folder, file_bytes=file_bytes)
        seconds = time.perf_counter() - start
    return sum(p.numel() * p.itemsize for p in model.parameters()), peak[0], seconds


@pytest.mark.parametrize("file_bytes", [5 * 1024 * MIB, 256 * MIB], ids=["one file", "files of both ranks"])
def test_a_rank_needs_little_more_than_its_shards(file_bytes: int, tmp_path: Path) -> None:
    for rank, (size, peak, seconds) in enumerate(world(2).run(_saves, str(tmp_path), file_bytes)):
        print(f"rank {rank}: {peak // MIB} MiB over its shards, {size // MIB} MiB in all, {seconds:.1f} s")
        assert size > 900 * MIB
        assert peak <= 300 * MIB
