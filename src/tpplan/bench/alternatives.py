"""Against the alternatives, in one run: unsharded, by tpplan, by torch, by transformers, and written by hand.

Three parts, each in a process of its own: `steps` on real ranks, `host`, what Python takes on a fake group, and
`layer`, a rank's compute of a layer of Llama 70B.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from tpplan.bench import layer_compute, overhead
from tpplan.bench.alternative_ranks import FLOOR, rank_main
from tpplan.bench.decode import TOKEN
from tpplan.bench.rank_processes import run_on_ranks
from tpplan.bench.rounds import timing_against
from tpplan.bench.subjects import ToySizes

SIZES = ToySizes(hidden=512, intermediate=1536, layers=4, heads=8, vocabulary=4096, batch=4, sequence=128)
GPU_SIZES = ToySizes(hidden=2048, intermediate=5632, layers=4, heads=16, vocabulary=32000, batch=4, sequence=512)
TINY = ToySizes()
STEPS, HOST, LAYER = "steps", "host", "layer"


def measure(part: str = STEPS, **arguments: Any) -> dict[str, Any]:
    """One part: its settings under its name, and rows that name it."""
    measured = {STEPS: steps, HOST: host, LAYER: layer_compute.measure}[part](**arguments)
    rows = [{"part": part, **row} for row in measured.pop("rows")]
    return {part: measured, "rows": rows}


def steps(kind: str = "transformers", ranks: int | None = None, rounds: int = 12, tiny: bool = False) -> dict[str, Any]:
    """Time one Llama in all its forms.

    Args:
        kind: whose Llama; see `toy_llama`.
        ranks: processes on this machine, each with a GPU if there are as many, or else one thread and gloo; as many as
            there are GPUs, at most 8, or 2.
        rounds: how often each form has its turn.
        tiny: whether to take a toy, which only shows that it runs.

    Returns:
        Plain data: the sizes, and a row for each way of running and each form. Times are those of the slowest rank in
        milliseconds, by the clock and of its processor, medians over rounds; ratios to the floor are taken within a
        round. Memory is the most of a rank, beside what there was.
    """
    gpus = torch.cuda.device_count()
    ranks = ranks or (1 << (min(gpus, 8).bit_length() - 1) if gpus > 1 else 2)
    device = "cuda" if gpus >= ranks else "cpu"
    sizes = TINY if tiny else GPU_SIZES if device == "cuda" else SIZES
    told = run_on_ranks(rank_main, ranks, kind, asdict(sizes), rounds, device)
    rows: list[dict[str, Any]] = []
    for way, forms in told[0]["seconds"].items():
        clock, processor = (
            {form: [max(t["seconds"][way][form][i][which] for t in told) for i in range(rounds)] for form in forms}
            for which in range(2)
        )
        rows += [
            {
                "model": kind,
                "way": way,
                "form": form,
                **_timing(taken, clock[FLOOR]),
                **{f"processor_{key}": value for key, value in _timing(processor[form], processor[FLOOR]).items()},
                **told[0]["found"][way][form],
                "peak_mib": max(t["found"][way][form]["peak_mib"] for t in told),
                "parallelize_seconds": round(max(t["parallelizing"][form] for t in told), 3),
            }
            for form, taken in clock.items()
        ]
    return {"sizes": asdict(sizes), "ranks": ranks, "rounds": rounds, "device": device, "rows": rows}


def host(kind: str = "transformers", rounds: int = 20, calls: int = 3) -> dict[str, Any]:
    """What Python takes of a toy in all its forms, on a fake group; see `overhead`."""
    measured = overhead.measure(rounds, calls, kind)
    ways, left = (overhead.FORWARD, overhead.BACKWARD, TOKEN), (overhead.WATCHED, overhead.GUARD)
    names = {overhead.BY_HAND: FLOOR}
    rows = [
        {**row, "model": kind, "form": names.get(row["form"], row["form"])}
        for row in measured["rows"]
        if row["way"] in ways and row["form"] not in left
    ]
    return measured | {"rows": rows}


def _timing(taken: list[float], floor: list[float]) -> dict[str, float]:
    timing = asdict(timing_against(taken, floor))
    return timing | {"milliseconds": round(timing["milliseconds"], 2)}


__all__ = ["HOST", "LAYER", "STEPS", "measure"]
