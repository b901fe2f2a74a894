"""Training steps on real processes: unsharded, by tpplan, by torch and transformers, and written by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tpplan.bench.rank_processes import run_on_ranks
from tpplan.bench.rounds import timing_against
from tpplan.bench.subjects import ToySizes
from tpplan.bench.training_ranks import FLOOR, rank_main

SIZES = ToySizes(hidden=512, intermediate=1536, layers=4, heads=8, vocabulary=4096, batch=4, sequence=128)
TINY = ToySizes()


def measure(kind: str = "transformers", ranks: int = 2, rounds: int = 12, tiny: bool = False) -> dict[str, Any]:
    """Time one Llama in all its forms.

    Args:
        kind: whose Llama; see `toy_llama`.
        ranks: gloo processes on this machine, each with one thread.
        rounds: how often each form has its turn.
        tiny: whether to take a toy, which only shows that it runs.

    Returns:
        Plain data: the sizes, and a row for each way of running and each form. Times are those of the slowest rank in
        milliseconds, by the clock and of its processor, medians over rounds; ratios to the floor are taken within a
        round.
    """
    sizes = TINY if tiny else SIZES
    told = run_on_ranks(rank_main, ranks, kind, asdict(sizes), rounds)
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
                **told[0]["sent"][way][form],
            }
            for form, taken in clock.items()
        ]
    return {"sizes": asdict(sizes), "ranks": ranks, "rounds": rounds, "rows": rows}


def _timing(taken: list[float], floor: list[float]) -> dict[str, float]:
    timing = asdict(timing_against(taken, floor))
    return timing | {"milliseconds": round(timing["milliseconds"], 2)}


__all__ = ["measure"]
