"""The loss: the memory and the time of a step with all logits on each rank, with split ones, and with none."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn  # pyright: ignore[reportUnknownVariableType]

from tpplan.api import parallelize
from tpplan.bench.checkpoint_ranks import peak_memory
from tpplan.bench.subjects import Architecture, tiny_transformer
from tpplan.loss import linear_cross_entropy

WHOLE = "all logits on each rank (`output: replicate`)"
SPLIT = "each rank's part of the logits (`output: shard`)"
CHUNKED = "chunks of the part (`linear_cross_entropy`)"
_MIB = 2**20


def measure(ranks: int = 2, tokens: int = 2048, vocabulary: int = 64000, rounds: int = 5) -> dict[str, Any]:
    """Measure one number of ranks.

    Args:
        ranks: gloo processes on this machine.
        tokens: in a batch of 2.
        vocabulary: of a Llama of one layer in bfloat16, hidden size 256.
        rounds: how often a step is timed.

    Returns:
        Plain data: a row for each form. Memory is the largest of all ranks, in MiB, times are the slowest rank's.
    """
    rows: list[dict[str, Any]] = []
    for form in (WHOLE, SPLIT, CHUNKED):
        with tempfile.TemporaryDirectory(prefix="tpplan-bench-") as folder:
            given = (ranks, folder, form, tokens, vocabulary, rounds)
            spawn(_rank_main, given, ranks)  # pyright: ignore[reportUnknownArgumentType]
            told = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
        worst = {key: max(one[key] for one in told) for key in told[0]}
        rows.append({"ranks": ranks, "tokens": tokens, "vocabulary": vocabulary, "form": form, **worst})
    return {"rows": rows}


def _rank_main(rank: int, size: int, folder: str, form: str, tokens: int, vocabulary: int, rounds: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    warnings.simplefilter("ignore")
    step = _step(form, tokens, vocabulary)
    step()  # compiled, and watched
    with peak_memory(0.002) as peak:
        step()
    seconds = [_seconds(step) for _ in range(rounds)]
    told = {"peak_mib": round(peak[0] / _MIB, 1), "seconds": round(statistics.median(seconds), 3)}
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def _seconds(step: Callable[[], None]) -> float:
    dist.barrier()
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _step(form: str, tokens: int, vocabulary: int) -> Callable[[], None]:
    """A forward and backward, by way of this form of the loss."""
    torch.manual_seed(0)
    model: Any = tiny_transformer(
        Architecture("llama"), 1, "cpu", hidden_size=256, intermediate_size=512, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=vocabulary,
    ).to(torch.bfloat16)  # fmt: skip
    output = "replicate" if form == WHOLE else "shard"
    plan = {"version": 1, "extends": "llama", "modules": {"lm_head": {"style": "colwise", "output": output}}}
    parallelize(model, plan)
    ids = torch.randint(0, vocabulary, (2, tokens // 2))

    def loss() -> Tensor:
        if form != CHUNKED:
            return model(input_ids=ids, labels=ids, use_cache=False).loss
        hidden = model.model(ids, use_cache=False).last_hidden_state
        return linear_cross_entropy(hidden[:, :-1], model.lm_head.weight, ids[:, 1:])

    def step() -> None:
        model.zero_grad()
        loss().backward()

    return step


__all__ = ["measure"]
