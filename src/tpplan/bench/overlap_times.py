"""A training step with and without overlap: on real processes, on a link that is slowed, and on a fake group.

steps   gloo processes of this machine; on its own link, and on one of so many bytes a second
host    what Python takes of a toy, whose collectives return at once
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpplan.api import parallelize
from tpplan.bench.rank_processes import joined, run_on_ranks, tell, timed
from tpplan.bench.rounds import processor_seconds, time_interleaved, timing_against
from tpplan.bench.slow_link import SlowLink
from tpplan.bench.subjects import ToySizes, first_tensor, toy_call, toy_llama
from tpplan.compat.process_groups import fake_process_group
from tpplan.plan import load_plan

SIZES = ToySizes(hidden=1024, intermediate=2816, layers=2, heads=16, vocabulary=512, batch=2, sequence=512)
TINY = ToySizes(sequence=16)
NONE, AUTO, EVERY, AGAIN = "none", "auto", "all units", "all units, gathered again"
FORMS: dict[str, dict[str, Any]] = {
    NONE: {},
    AUTO: {"overlap": "auto"},
    EVERY: {"overlap": ["gather_linear", "linear_reduce", "weight_gradient"]},
    AGAIN: {"overlap": ["gather_linear", "linear_reduce", "weight_gradient"], "recompute_gather": True},
}
PLANS = ("llama", "llama-sequence")
STEPS, HOST = "steps", "host"
LINKS = {"own": "the machine's own link", "slow": "a slow link", "fake": "a fake group"}


def measure(part: str = STEPS, **arguments: Any) -> dict[str, Any]:
    """One part: its settings under its name, and rows that name it."""
    measured = {STEPS: steps, HOST: host}[part](**arguments)
    rows = [{"part": part, **row} for row in measured.pop("rows")]
    return {f"{part}, {measured['ranks']} ranks": measured, "rows": rows}


def steps(ranks: int = 2, rounds: int = 8, rate: float = 100e6, tiny: bool = False) -> dict[str, Any]:
    """Time a forward and backward of one Llama by each plan, with each choice of what is overlapped.

    Args:
        ranks: gloo processes, each with one thread.
        rounds: how often each has its turn.
        rate: bytes a second of the slow link.
        tiny: whether to take a toy, which only shows that it runs.

    Returns:
        Plain data: a row for each plan, link and choice. Milliseconds are the slowest rank's, medians over rounds, and
        ratios to no overlap are taken within a round. On the slow link, `sent` is how long it was busy, and `hidden`
        the share of that for which no rank's Python waited: the least of all ranks.
    """
    sizes = TINY if tiny else SIZES
    told = run_on_ranks(_rank_main, ranks, asdict(sizes), rounds, rate)
    rows: list[dict[str, Any]] = []
    for plan in PLANS:
        for link in ("own", "slow"):
            found = [one[plan][link] for one in told]
            seconds = {form: [max(f[form]["seconds"][i] for f in found) for i in range(rounds)] for form in FORMS}
            for form, taken in seconds.items():
                timing = timing_against(taken, seconds[NONE])
                row = {**_place(ranks, plan, link), "form": form, **asdict(timing)}
                if link == "slow":
                    sent = statistics.median(found[0][form]["sent"])
                    waited = max(statistics.median(f[form]["waited"]) for f in found)
                    row |= {"sent": round(sent * 1e3, 1), "hidden": round(1 - waited / sent, 3)}
                rows.append(row)
    return {"sizes": asdict(sizes), "ranks": ranks, "rounds": rounds, "rate": rate, "rows": rows}


def host(ranks: int = 2, rounds: int = 40, calls: int = 3) -> dict[str, Any]:
    """Time a forward and backward of a toy on a fake group, in processor time; see `time_interleaved`."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with fake_process_group(ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        for plan in PLANS:
            subjects = {form: _processor_time(_step(model, TINY)) for form, model in _forms(plan, TINY, mesh).items()}
            timings = time_interleaved(subjects, rounds, calls)
            rows += [
                {**_place(ranks, plan, "fake"), "form": form, **asdict(timing)} for form, timing in timings.items()
            ]
    return {"sizes": asdict(TINY), "ranks": ranks, "rounds": rounds, "calls": calls, "rows": rows}


def _place(ranks: int, plan: str, link: str) -> dict[str, Any]:
    return {"ranks": ranks, "model": plan, "link": link, "way": f"{ranks} ranks, {LINKS[link]}"}


def _rank_main(rank: int, size: int, folder: str, sizes: dict[str, int], rounds: int, rate: float) -> None:
    with joined(rank, size, folder) as mesh:
        tell(rank, folder, {plan: _measured(plan, ToySizes(**sizes), mesh, rounds, rate) for plan in PLANS})


def _measured(plan: str, sizes: ToySizes, mesh: DeviceMesh, rounds: int, rate: float) -> dict[str, Any]:
    runs = {form: _step(model, sizes) for form, model in _forms(plan, sizes, mesh).items()}
    for run in runs.values():
        for _ in range(2):
            run()
    told: dict[str, Any] = {
        link: {form: {"seconds": [], "sent": [], "waited": []} for form in FORMS} for link in ("own", "slow")
    }
    for _ in range(rounds):
        for form, run in runs.items():
            told["own"][form]["seconds"].append(timed(run)[0])
        for form, run in runs.items():
            with SlowLink(rate) as link:
                taken = timed(run)[0]
            for key, value in (("seconds", taken), ("sent", link.sent), ("waited", link.waited)):
                told["slow"][form][key].append(value)
    return told


def _forms(plan: str, sizes: ToySizes, mesh: DeviceMesh) -> dict[str, nn.Module]:
    document = load_plan(plan).to_dict()
    call = toy_call(sizes)
    return {
        form: parallelize(toy_llama("transformers", sizes), {**document, **options}, mesh, call)
        for form, options in FORMS.items()
    }


def _step(model: nn.Module, sizes: ToySizes) -> Callable[[], None]:
    call, parameters = toy_call(sizes), list(model.parameters())
    cotangent = torch.ones(sizes.batch, sizes.sequence, sizes.vocabulary)

    def run() -> None:
        for parameter in parameters:
            parameter.grad = None
        torch.autograd.backward(first_tensor(model(**call)), cotangent)

    return run


def _processor_time(run: Callable[[], None]) -> Callable[[], float]:
    def seconds() -> float:
        start = processor_seconds()
        run()
        return processor_seconds() - start

    return seconds


__all__ = ["FORMS", "HOST", "NONE", "PLANS", "STEPS", "measure"]
