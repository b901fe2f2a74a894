"""One rank of the benchmark of serving."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpplan.bench.decode import PROMPT, TOKEN, next_calls
from tpplan.bench.forms import UNSHARDED, forms_of
from tpplan.bench.rank_processes import Seconds, joined, sent, tell, timed
from tpplan.bench.subjects import ToySizes, first_tensor

TOKENS = 8  # after each prompt
_WARM = 2

Meter = Callable[[Callable[[], object]], Any]


def rank_main(rank: int, size: int, folder: str, sizes: dict[str, int], batches: tuple[int, ...], rounds: int) -> None:
    """Measure, and write what was measured."""
    with joined(rank, size, folder) as mesh, torch.no_grad():
        tell(rank, folder, _measured(ToySizes(**sizes), batches, mesh, rounds))


def _measured(sizes: ToySizes, batches: tuple[int, ...], mesh: DeviceMesh, rounds: int) -> dict[str, Any]:
    forms = forms_of("transformers", sizes, mesh, {"input_ids": _ids(sizes, sizes.batch)})
    told: dict[str, Any] = {}
    for batch in batches:
        ids = _ids(sizes, batch)
        _compare(forms, ids)
        for model in forms.values():
            for _ in range(_WARM):
                _generate(model, ids, lambda run: run())
        taking = {name: model for name, model in forms.items() if name != UNSHARDED or dist.get_rank() == 0}
        traffic = {name: _generate(model, ids, sent) for name, model in forms.items()}
        seconds: dict[str, dict[str, list[Seconds]]] = {way: {name: [] for name in forms} for way in (PROMPT, TOKEN)}
        for _ in range(rounds):
            for name in forms:
                for way, taken in _generate(taking.get(name), ids, timed).items():
                    seconds[way][name].append(taken)
        told[str(batch)] = {"seconds": seconds, "sent": traffic}
    return told


def _ids(sizes: ToySizes, batch: int) -> Tensor:
    return torch.arange(batch * sizes.sequence).view(batch, -1) * 7 % sizes.vocabulary


def _generate(model: nn.Module | None, ids: Tensor, meter: Meter) -> dict[str, Any]:
    """What a meter says of a prompt, and of the tokens after it; of nothing, on a rank that takes no part."""
    if model is None:
        return {way: meter(lambda: None) for way in (PROMPT, TOKEN)}
    first, after = next_calls(model, {"input_ids": ids})
    calls = [after(number) for number in range(1, TOKENS + 1)]
    return {
        PROMPT: meter(lambda: model(**first)),
        TOKEN: meter(lambda: [model(**call) for call in calls]),
    }


def _compare(forms: Mapping[str, nn.Module], ids: Tensor) -> None:
    """See to it that all forms give the logits of the first."""
    expected: list[Tensor] = []
    for name, model in forms.items():
        first, after = next_calls(model, {"input_ids": ids})
        calls = [first, *(after(number) for number in range(1, TOKENS + 1))]
        logits = [first_tensor(model(**call)) for call in calls]
        expected = expected or logits
        torch.testing.assert_close(logits, expected, msg=lambda text, name=name: f"{name}: {text}")


__all__ = ["TOKENS", "rank_main"]
