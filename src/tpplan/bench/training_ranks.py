"""One rank of the benchmark of training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from tpplan.bench.forms import UNSHARDED, forms_of
from tpplan.bench.megatron import split_by_hand
from tpplan.bench.rank_processes import Seconds, joined, sent, tell, timed
from tpplan.bench.subjects import ToySizes, first_tensor, toy_llama

FLOOR = "by hand"
FORWARD, BACKWARD, STEP = "forward without grad", "forward and backward", "with AdamW"
_WARM = 3

Way = Callable[[], object]


def rank_main(rank: int, size: int, folder: str, kind: str, sizes: dict[str, int], rounds: int) -> None:
    """Measure, and write what was measured."""
    with joined(rank, size, folder) as mesh:
        tell(rank, folder, _measured(kind, ToySizes(**sizes), mesh, rounds))


def _measured(kind: str, sizes: ToySizes, mesh: DeviceMesh, rounds: int) -> dict[str, Any]:
    forms = {name: _ways(model, sizes) for name, model in _forms(kind, sizes, mesh).items()}
    seconds: dict[str, dict[str, list[Seconds]]] = {}
    traffic: dict[str, dict[str, dict[str, float]]] = {}
    for way in (FORWARD, BACKWARD, STEP):
        runs = {name: ways[way] for name, ways in forms.items()}
        for run in runs.values():
            for _ in range(_WARM):
                run()
        traffic[way] = {name: sent(run) for name, run in runs.items()}
        seconds[way] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                seconds[way][name].append(timed(run))
    return {"seconds": seconds, "sent": traffic}


def _forms(kind: str, sizes: ToySizes, mesh: DeviceMesh) -> dict[str, nn.Module]:
    call = {"input_ids": _ids(sizes)}
    forms = forms_of(kind, sizes, mesh, call)
    forms = {UNSHARDED: forms[UNSHARDED], FLOOR: split_by_hand(toy_llama(kind, sizes)), **forms}
    expected = _results(forms[UNSHARDED], call)
    for name, model in forms.items():
        torch.testing.assert_close(_results(model, call), expected, msg=lambda text, name=name: f"{name}: {text}")
    return forms


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


def _ids(sizes: ToySizes) -> Tensor:
    return torch.arange(sizes.batch * sizes.sequence).view(sizes.batch, -1) * 7 % sizes.vocabulary


def _ways(model: nn.Module, sizes: ToySizes) -> dict[str, Way]:
    ids = _ids(sizes)
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

    return {FORWARD: forward, BACKWARD: backward, STEP: step}


__all__ = ["BACKWARD", "FLOOR", "FORWARD", "STEP", "rank_main"]
