"""Overhead: what a sharded toy Llama takes on one rank, where nearly all time is Python's.

The collectives are fake and return at once, so that what's left is what the runtime itself adds. A rank has half of the
arithmetic at tp=2; at these sizes that is little.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tpplan.api import parallelize
from tpplan.bench.decode import time_generation
from tpplan.bench.forms import MODELS, SEQUENCE, TPPLAN, UNSHARDED, forms_of
from tpplan.bench.megatron import split_by_hand
from tpplan.bench.rounds import Timing, processor_seconds, time_interleaved, timing_against
from tpplan.bench.subjects import ToySizes, first_tensor, toy_call, toy_llama
from tpplan.compat.process_groups import fake_process_group
from tpplan.runtime.modules.module_runtime import RUNTIME

SIZE = 2
_GUARDS = 20  # one alone is too short for the clock
WATCHED = "tpplan, every call watched"
GUARD = "tpplan's guard of a call alone"
BY_HAND = "Megatron's way, by hand"
FORWARD = "forward without grad"
BACKWARD = "forward and backward"
NEW_LENGTH = "forward without grad of a length that is new, against the same again"


def measure(rounds: int = 60, calls: int = 3, kind: str = "transformers") -> dict[str, Any]:
    """Time one toy Llama in all its forms.

    Args:
        rounds, calls: see `time_interleaved`.
        kind: a key of `MODELS`.

    Returns:
        Plain data: the sizes, and a row for each way of running and each form.
    """
    torch.set_num_threads(1)
    sizes = ToySizes()
    with fake_process_group(SIZE):
        forms = _forms(kind, sizes)
        rows: list[dict[str, Any]] = []
        for way, prepare in ((FORWARD, _forward), (BACKWARD, _forward_and_backward)):
            subjects = {name: prepare(model, sizes) for name, model in forms.items()}
            if way == FORWARD:
                subjects[GUARD] = _guard(forms[TPPLAN], sizes)
            timed = time_interleaved(subjects, rounds, calls)
            rows += [
                {"model": MODELS[kind], "way": way, "form": name, **asdict(timing)} for name, timing in timed.items()
            ]
        if kind == "transformers":
            compared = {name: forms[name] for name in (UNSHARDED, TPPLAN, SEQUENCE)}
            rows += [
                {"model": MODELS[kind], "way": NEW_LENGTH, "form": name, **asdict(timing)}
                for name, timing in _new_lengths(compared, sizes, rounds).items()
            ]
            served = {name: model for name, model in forms.items() if name not in (WATCHED, BY_HAND)}
            rows += [
                {"model": MODELS[kind], "way": way, "form": name, **asdict(timing)}
                for way, name, timing in time_generation(served, sizes, rounds, calls)
            ]
    return {"sizes": asdict(sizes), "tp": SIZE, "rounds": rounds, "calls": calls, "rows": rows}


def _forms(kind: str, sizes: ToySizes) -> dict[str, nn.Module]:
    mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("tp",))
    call = toy_call(sizes)
    watched = _watched(lambda: parallelize(toy_llama(kind, sizes), "llama", mesh, call))
    by_hand = split_by_hand(toy_llama(kind, sizes))
    return forms_of(kind, sizes, mesh, call) | {WATCHED: watched, BY_HAND: by_hand}


def _watched(make: Callable[[], nn.Module]) -> nn.Module:
    """A sharded model all of whose calls are watched, as the first call of each kind is in any."""
    before = os.environ.get("TPPLAN_DEBUG")
    os.environ["TPPLAN_DEBUG"] = "1"
    try:
        return make()
    finally:
        if before is None:
            del os.environ["TPPLAN_DEBUG"]
        else:
            os.environ["TPPLAN_DEBUG"] = before


def _guard(model: nn.Module, sizes: ToySizes) -> Callable[[], float]:
    """What decides by which program a call runs."""
    call = toy_call(sizes)
    guard = vars(model)[RUNTIME].guard

    def run() -> float:
        with torch.no_grad():
            start = processor_seconds()
            for _ in range(_GUARDS):
                guard(model.training, (), call)
            return (processor_seconds() - start) / _GUARDS

    return run


def _forward(model: nn.Module, sizes: ToySizes) -> Callable[[], float]:
    call = toy_call(sizes)

    def run() -> float:
        with torch.no_grad():
            start = processor_seconds()
            model(**call)
            return processor_seconds() - start

    return run


def _new_lengths(forms: Mapping[str, nn.Module], sizes: ToySizes, rounds: int) -> dict[str, Timing]:
    """Calls, each longer than all before it, against their second runs; the first few find out what is covered."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for number in range(1, rounds + 4):
        run = {name: _forward(model, replace(sizes, sequence=sizes.sequence + number)) for name, model in forms.items()}
        for name, call in run.items():
            seconds[name].append((call(), call()))
    return {
        name: timing_against([new for new, _ in held[3:]], [again for _, again in held[3:]])
        for name, held in seconds.items()
    }


def _forward_and_backward(model: nn.Module, sizes: ToySizes) -> Callable[[], float]:
    call = toy_call(sizes)
    parameters = list(model.parameters())
    cotangent = torch.ones(sizes.batch, sizes.sequence, sizes.vocabulary)

    def run() -> float:
        for parameter in parameters:
            parameter.grad = None
        start = processor_seconds()
        torch.autograd.backward(first_tensor(model(**call)), cotangent)
        return processor_seconds() - start

    return run
