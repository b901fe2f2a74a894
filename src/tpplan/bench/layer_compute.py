"""A rank's compute of a layer of Llama 70B at tp 8, on one GPU: collectives are a fake group's, and take no time.

Without a GPU a layer a sixteenth as wide runs in float32 on the processor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tpplan.bench.alternative_ranks import BACKWARD, FLOOR, FORWARD
from tpplan.bench.forms import UNSHARDED, stock_of, ways_to_shard
from tpplan.bench.megatron import split_by_hand
from tpplan.bench.rank_processes import peak_mib, synchronize
from tpplan.bench.rounds import time_interleaved
from tpplan.bench.subjects import ToySizes, first_tensor
from tpplan.compat.process_groups import fake_process_group

SIZE = 8
LAYER_70B = ToySizes(8192, 28672, layers=1, heads=64, vocabulary=1024, batch=1, sequence=4096, key_heads=8)
NARROW = ToySizes(512, 1792, layers=1, heads=8, vocabulary=64, batch=1, sequence=256)


def measure(rounds: int = 20, calls: int = 3, tiny: bool = False) -> dict[str, Any]:
    """Time the layer in all its forms, between an embedding and a head that are a hundredth of it.

    Args:
        rounds, calls: see `time_interleaved`.
        tiny: whether to take the narrow layer.

    Returns:
        Plain data: the sizes, and a row for each way of running and each form, with the clock's milliseconds, ratios to
        the unsharded layer, and a rank's memory.
    """
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available() and not tiny
    sizes, dtype = (LAYER_70B, torch.bfloat16) if on_gpu else (NARROW, torch.float32)
    device = "cuda" if on_gpu else "cpu"
    rows: list[dict[str, Any]] = []
    with fake_process_group(SIZE):
        mesh = init_device_mesh(device, (SIZE,), mesh_dim_names=("tp",))
        ids = torch.arange(sizes.batch * sizes.sequence, device=device).view(sizes.batch, -1) % sizes.vocabulary
        ways = ways_to_shard("transformers", sizes, mesh, {"input_ids": ids})
        ways = {UNSHARDED: ways[UNSHARDED], FLOOR: split_by_hand, **ways}
        forms = {name: shard(stock_of("transformers", sizes, mesh, dtype)) for name, shard in ways.items()}
        for way, prepare in ((FORWARD, _forward), (BACKWARD, _backward)):
            runs = {name: prepare(model, ids) for name, model in forms.items()}
            timed = time_interleaved({name: _seconds(run) for name, run in runs.items()}, rounds, calls)
            rows += [
                {"model": "transformers", "way": way, "form": name, **asdict(timing), "peak_mib": peak_mib(runs[name])}
                for name, timing in timed.items()
            ]
    return {"sizes": asdict(sizes), "tp": SIZE, "rounds": rounds, "device": device, "dtype": str(dtype), "rows": rows}


def _forward(model: nn.Module, ids: Tensor) -> Callable[[], object]:
    def run() -> None:
        with torch.no_grad():
            model(input_ids=ids)

    return run


def _backward(model: nn.Module, ids: Tensor) -> Callable[[], object]:
    def run() -> None:
        model.zero_grad()
        logits = first_tensor(model(input_ids=ids))
        torch.autograd.backward(logits, torch.ones_like(logits))

    return run


def _seconds(run: Callable[[], object]) -> Callable[[], float]:
    def taken() -> float:
        synchronize()
        began = time.perf_counter()
        run()
        synchronize()
        return time.perf_counter() - began

    return taken


__all__ = ["measure"]
