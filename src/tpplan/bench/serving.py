"""Serving on real processes: tokens a second of prompts and after them, by tpplan, by torch and by transformers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tpplan.bench.decode import PROMPT
from tpplan.bench.forms import UNSHARDED
from tpplan.bench.rank_processes import run_on_ranks
from tpplan.bench.rounds import timing_against
from tpplan.bench.serving_ranks import TOKENS, rank_main
from tpplan.bench.subjects import ToySizes

SIZES = {
    "toy": ToySizes(),
    "wide": ToySizes(hidden=1024, intermediate=2816, layers=4, heads=16, vocabulary=8192, batch=1, sequence=128),
}
_ROUNDS = {"toy": 20, "wide": 8}


def measure(
    model: str = "toy", ranks: int = 2, batches: tuple[int, ...] = (1, 8), rounds: int | None = None
) -> dict[str, Any]:
    """Time a prompt and the tokens after it for one Llama in all its forms.

    Args:
        model: a key of `SIZES`.
        ranks: gloo processes on this machine, each with one thread; the unsharded model runs on one of them alone.
        batches: how many sequences there are at once.
        rounds: how often each form has its turn.

    Returns:
        Plain data: the sizes, and a row for each batch, way and form. Milliseconds of a prompt or token are those of
        the slowest rank, by the clock and of its processor, medians over rounds; ratios are of tokens a second, to the
        unsharded model's in the same round.
    """
    sizes = SIZES[model]
    rounds = _ROUNDS[model] if rounds is None else rounds
    told = run_on_ranks(rank_main, ranks, asdict(sizes), tuple(batches), rounds)
    rows: list[dict[str, Any]] = []
    for batch in batches:
        ways: dict[str, dict[str, Any]] = told[0][str(batch)]["seconds"]
        for way, forms in ways.items():
            clock, processor = (
                {
                    form: [max(t[str(batch)]["seconds"][way][form][i][which] for t in told) for i in range(rounds)]
                    for form in forms
                }
                for which in range(2)
            )
            calls, tokens = (1, batch * sizes.sequence) if way == PROMPT else (TOKENS, batch)
            rows += [
                {
                    "model": model,
                    "batch": batch,
                    "rounds": rounds,
                    "way": way,
                    "form": form,
                    **_speed(taken, clock[UNSHARDED], calls, tokens),
                    "processor_milliseconds": _speed(processor[form], clock[UNSHARDED], calls, tokens)["milliseconds"],
                    **{key: value / calls for key, value in told[0][str(batch)]["sent"][form][way].items()},
                }
                for form, taken in clock.items()
            ]
    return {"sizes": {name: asdict(held) for name, held in SIZES.items()}, "ranks": ranks, "rows": rows}


def _speed(taken: list[float], base: list[float], calls: int, tokens: int) -> dict[str, float]:
    """By the call; how many times as fast as the base."""
    faster = timing_against(base, taken)
    milliseconds = timing_against(taken, base).milliseconds / calls
    return {
        "milliseconds": round(milliseconds, 3),
        "tokens_per_second": round(tokens / milliseconds * 1e3, 1),
        "ratio": faster.ratio,
        "low": faster.low,
        "high": faster.high,
    }


__all__ = ["SIZES", "measure"]
