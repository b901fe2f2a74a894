"""The loop around a model: adding to gradients, clipping them, and optimizer steps, on one rank of a sharded toy Llama.

As in the benchmark of overhead, collectives are fake, and nearly all time is Python's and torch's cost of an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tpplan.api import parallelize
from tpplan.bench.forms import MODELS, SEQUENCE, TPPLAN, UNSHARDED
from tpplan.bench.overhead import SIZE
from tpplan.bench.rounds import processor_seconds, time_interleaved
from tpplan.bench.subjects import ToySizes, first_tensor, toy_call, toy_llama
from tpplan.compat.process_groups import fake_process_group
from tpplan.runtime.data_parallel.clipping import clip_grad_norm_

OWN = "tpplan, torch's own on its DTensors"
FRESH = "forward and backward, gradients set to None"
ADDED = "forward and backward, added to gradients"
CLIPPING = "clipping by the norm"

Subject = Callable[[], float]


class _OtherAdamW(torch.optim.AdamW):
    """Steps on DTensors, as it isn't one of torch's own classes."""


_STEPS: dict[str, dict[str, Any]] = {
    "AdamW step": {},
    "AdamW step, foreach": {"foreach": True},
    "AdamW step, fused": {"fused": True},
}


def measure(rounds: int = 30, calls: int = 3, kind: str = "transformers") -> dict[str, Any]:
    """Time what surrounds the model in a loop.

    Args:
        rounds, calls: see `time_interleaved`.
        kind: a key of `MODELS`.

    Returns:
        Plain data: the sizes, and a row for each way and form.
    """
    torch.set_num_threads(1)
    sizes = ToySizes()
    with fake_process_group(SIZE):
        mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("tp",))
        call = toy_call(sizes)
        forms: dict[str, nn.Module] = {
            UNSHARDED: toy_llama(kind, sizes),
            TPPLAN: parallelize(toy_llama(kind, sizes), "llama", mesh, call),
            SEQUENCE: parallelize(toy_llama(kind, sizes), "llama-sequence", mesh, call),
        }
        rows: list[dict[str, Any]] = []
        for way, subjects in _ways(forms, sizes).items():
            timed = time_interleaved(subjects, rounds, calls)
            rows += [
                {"model": MODELS[kind], "way": way, "form": name, **asdict(timing)} for name, timing in timed.items()
            ]
    return {"sizes": asdict(sizes), "tp": SIZE, "rounds": rounds, "calls": calls, "rows": rows}


def _ways(forms: Mapping[str, nn.Module], sizes: ToySizes) -> dict[str, dict[str, Subject]]:
    own = {OWN: forms[TPPLAN]}
    clip = torch.nn.utils.clip_grad_norm_
    ways: dict[str, dict[str, Subject]] = {
        FRESH: {name: _backward(model, sizes, fresh=True) for name, model in forms.items()},
        ADDED: {name: _backward(model, sizes, fresh=False) for name, model in forms.items()},
        CLIPPING: {
            name: _clipping(model, clip if name == UNSHARDED else clip_grad_norm_) for name, model in forms.items()
        }
        | {name: _clipping(model, clip) for name, model in own.items()},
    }
    for way, options in _STEPS.items():
        ways[way] = {name: _step(model, torch.optim.AdamW, options) for name, model in forms.items()}
        ways[way] |= {name: _step(model, _OtherAdamW, options) for name, model in own.items()}
    return ways


def _backward(model: nn.Module, sizes: ToySizes, fresh: bool) -> Subject:
    call = toy_call(sizes)
    parameters = list(model.parameters())
    cotangent = torch.ones(sizes.batch, sizes.sequence, sizes.vocabulary)

    def run() -> float:
        for parameter in parameters if fresh else ():
            parameter.grad = None
        start = processor_seconds()
        torch.autograd.backward(first_tensor(model(**call)), cotangent)
        return processor_seconds() - start

    return run


def _clipping(model: nn.Module, clip: Callable[..., Tensor]) -> Subject:
    parameters = list(model.parameters())

    def run() -> float:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        start = processor_seconds()
        clip(parameters, 1.0)
        return processor_seconds() - start

    return run


def _step(model: nn.Module, kind: type[torch.optim.AdamW], options: dict[str, Any]) -> Subject:
    parameters = list(model.parameters())
    optimizer = kind(parameters, lr=0.0, **options)

    def run() -> float:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        start = processor_seconds()
        optimizer.step()
        return processor_seconds() - start

    return run


__all__ = ["ADDED", "CLIPPING", "FRESH", "OWN", "measure"]
