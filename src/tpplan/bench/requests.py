"""Requests on real processes: what the first `generate` of a model takes, later ones, and the first after `warm_up`."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpplan.api import parallelize
from tpplan.bench.rank_processes import Seconds, joined, run_on_ranks, tell, timed
from tpplan.bench.subjects import ToySizes, toy_llama
from tpplan.calls.warm import warm_up

TOKENS = 24
_CANDIDATES = 4
_SETTINGS: dict[str, bool] = {"do_sample": False, "use_cache": True}
WAYS: dict[str, dict[str, int]] = {"greedy": {}, "prompt lookup": {"prompt_lookup_num_tokens": _CANDIDATES}}
FIRST, WARMED, LATER = "the first request", "the first after `warm_up`", "later ones"


def measure(ranks: int = 2, rounds: int = 10) -> dict[str, Any]:
    """Time requests of a toy Llama.

    Args:
        ranks: gloo processes on this machine, each with one thread.
        rounds: how many later requests there are.

    Returns:
        Plain data: a row for each way of generating, with seconds of the slowest rank; the unsharded model's are of a
        later request on one process alone.
    """
    told = run_on_ranks(_rank_main, ranks, rounds)
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        seconds = {
            name: statistics.median(max(t[way][name][i][0] for t in told) for i in range(len(held)))
            for name, held in told[0][way].items()
        }
        rows.append({"way": way, "seconds": {name: round(held, 4) for name, held in seconds.items()}})
    return {"ranks": ranks, "rounds": rounds, "tokens": TOKENS, "rows": rows}


def _rank_main(rank: int, size: int, folder: str, rounds: int) -> None:
    with joined(rank, size, folder) as mesh, torch.no_grad():
        tell(rank, folder, {way: _of_way(options, mesh, rank, rounds) for way, options in WAYS.items()})


def _of_way(options: dict[str, int], mesh: DeviceMesh, rank: int, rounds: int) -> dict[str, list[Seconds]]:
    sizes = ToySizes(batch=1)
    ids = torch.tensor([[5, 9, 23, 7] * (sizes.sequence // 4)]) % sizes.vocabulary
    stock, fresh, warmed = (toy_llama("transformers", sizes) for _ in range(3))
    expected = _generated(stock, ids, options)
    models = [parallelize(model, "llama", mesh, {"input_ids": ids}) for model in (fresh, warmed)]
    warm_up(warmed, {"input_ids": ids}, candidates=options.get("prompt_lookup_num_tokens", 0), **_SETTINGS)
    found: dict[str, list[Seconds]] = {}
    for name, model in zip((FIRST, WARMED), models, strict=True):
        made: list[Tensor] = []
        found[name] = [timed(lambda model=model, made=made: made.append(_generated(model, ids, options)))]
        assert torch.equal(made[0], expected), f"{name}: other tokens than the unsharded model's"
    found[LATER] = [timed(lambda: _generated(fresh, ids, options)) for _ in range(rounds)]
    alone = [timed(lambda: None if rank else _generated(stock, ids, options)) for _ in range(rounds)]
    return found | {"unsharded": alone}


def _generated(model: nn.Module, ids: Tensor, options: dict[str, int]) -> Tensor:
    lengths = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, **_SETTINGS, **lengths, **options)  # pyright: ignore


__all__ = ["FIRST", "LATER", "TOKENS", "WARMED", "WAYS", "measure"]
