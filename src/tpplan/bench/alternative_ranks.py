"""One rank of the benchmark against the alternatives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from tpplan.bench.decode import TOKEN, next_calls
from tpplan.bench.forms import UNSHARDED, stock_of, ways_to_shard
from tpplan.bench.megatron import split_by_hand
from tpplan.bench.rank_processes import Seconds, joined, peak_mib, sent, synchronize, tell, timed
from tpplan.bench.subjects import ToySizes, first_tensor

FLOOR = "by hand"
FORWARD, BACKWARD, STEP = "forward without grad", "forward and backward", "with AdamW"
_WARM = 3
_TOKENS = 4

Way = Callable[[], Callable[[], object]]
"""Prepares a run, and returns what is measured of it."""


def rank_main(
    rank: int, size: int, folder: str, kind: str, sizes: dict[str, int], rounds: int, device: str = "cpu"
) -> None:
    """Measure, and write what was measured."""
    with joined(rank, size, folder, device) as mesh:
        tell(rank, folder, _measured(kind, ToySizes(**sizes), mesh, rounds))


def _measured(kind: str, sizes: ToySizes, mesh: DeviceMesh, rounds: int) -> dict[str, Any]:
    models, parallelizing = _forms(kind, sizes, mesh)
    forms = {name: _ways(model, _ids(sizes, mesh), decodes=kind == "transformers") for name, model in models.items()}
    seconds: dict[str, dict[str, list[Seconds]]] = {}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for way in forms[UNSHARDED]:
        runs, times = {name: ways[way] for name, ways in forms.items()}, _TOKENS if way == TOKEN else 1
        for run in runs.values():
            for _ in range(_WARM):
                run()()
        peaks = {name: min(peak_mib(run()) for _ in range(_WARM)) for name, run in runs.items()}
        found[way] = {name: _parts(sent(run()), times) | {"peak_mib": peaks[name]} for name, run in runs.items()}
        seconds[way] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                clock, processor = timed(run())
                seconds[way][name].append((clock / times, processor / times))
    return {"seconds": seconds, "found": found, "parallelizing": parallelizing}


def _parts(counted: dict[str, float], times: int) -> dict[str, float]:
    return {"collectives": counted["collectives"] // times, "mib": round(counted["mib"] / times, 3)}


def _forms(kind: str, sizes: ToySizes, mesh: DeviceMesh) -> tuple[dict[str, nn.Module], dict[str, float]]:
    """The model in all its forms, which give the same, and the seconds that each took to make."""
    call = {"input_ids": _ids(sizes, mesh)}
    ways = ways_to_shard(kind, sizes, mesh, call)
    ways = {UNSHARDED: ways[UNSHARDED], FLOOR: split_by_hand, **ways}
    forms, seconds = dict[str, nn.Module](), dict[str, float]()
    for name, shard in ways.items():
        stock = stock_of(kind, sizes, mesh)
        began = time.perf_counter()
        forms[name] = shard(stock)
        synchronize()
        seconds[name] = time.perf_counter() - began
    expected = _results(forms[UNSHARDED], call)
    for name, model in forms.items():
        torch.testing.assert_close(_results(model, call), expected, msg=lambda text, name=name: f"{name}: {text}")
    return forms, seconds


def _results(model: Any, call: dict[str, Tensor]) -> list[Tensor]:
    """The logits, and the gradient of the first norm, in which all layers have a part."""
    logits = _whole(first_tensor(model(**call)))
    logits.square().mean().backward()
    (norm,) = model.model.layers[0].input_layernorm.parameters()
    gradient = _whole(norm.grad)
    model.zero_grad()
    return [logits.detach(), gradient]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _ids(sizes: ToySizes, mesh: DeviceMesh) -> Tensor:
    ids = torch.arange(sizes.batch * sizes.sequence, device=mesh.device_type)
    return ids.view(sizes.batch, -1) * 7 % sizes.vocabulary


def _ways(model: nn.Module, ids: Tensor, decodes: bool) -> dict[str, Way]:
    # torch's foreach kernels don't take DTensors together with the plain parameters that some forms leave.
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is split] for split in (True, False)]
    optimizer = torch.optim.AdamW([{"params": several} for several in kinds if several], lr=1e-9, foreach=True)

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=ids)

    def backward() -> None:
        optimizer.zero_grad()
        logits = _whole(first_tensor(model(input_ids=ids)))
        functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()

    def step() -> None:
        backward()
        optimizer.step()

    def cleared(run: Callable[[], None]) -> Callable[[], None]:
        optimizer.zero_grad()
        return run

    def decode() -> Callable[[], None]:
        first, after = next_calls(model, {"input_ids": ids})
        with torch.no_grad():
            model(**first)
        calls = [after(number) for number in range(1, _TOKENS + 1)]

        def tokens() -> None:
            with torch.no_grad():
                for call in calls:
                    model(**call)

        return tokens

    ways: dict[str, Way] = {
        FORWARD: lambda: forward, BACKWARD: lambda: cleared(backward), STEP: lambda: cleared(step),
    }  # fmt: skip
    return ways | ({TOKEN: decode} if decodes else {})


__all__ = ["BACKWARD", "FLOOR", "FORWARD", "STEP", "rank_main"]
