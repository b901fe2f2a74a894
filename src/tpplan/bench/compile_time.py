"""Compile time: `compile_plan` for a Llama of 405B's shape on `meta`, on one core, pass by pass."""

from __future__ import annotations

import functools
import importlib
import os
import resource
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

TARGET_SECONDS = 5.0
TARGET_GIB = 1.0
PASSES = ("bind_rules", "_capture", "build_regions", "solve", "assign", "check", "warnings_for", "emit")


def measure(layers: int = 126, plan: str = "llama", size: int = 8, reduced: bool = False) -> dict[str, Any]:
    """Compile once, in this process, after a small model has made torch and transformers import what they put off.

    Args:
        layers: of the model.
        plan: a shipped plan's name.
        size: ranks of the axis.
        reduced: whether to take a tiny model, to try the benchmark out.

    Returns:
        Plain data: one row, with times in seconds and memory in GiB.
    """
    imports = _time(_import)
    from tpplan.api import compile_plan
    from tpplan.bench.subjects import Architecture, llama_405b, tiny_transformer

    first = _time(lambda: compile_plan(tiny_transformer(Architecture("llama"), 1, "meta"), plan, 2))
    model = tiny_transformer(Architecture("llama"), layers, "meta") if reduced else llama_405b(layers)
    before = _peak()
    passes: dict[str, float] = {}
    started = time.process_time()
    with _timed_passes(passes):
        wall = _time(lambda: compile_plan(model, plan, size))
    processor = time.process_time() - started
    row: dict[str, Any] = {
        "layers": layers,
        "plan": plan,
        "tp": size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(wall, 2),
        "processor_seconds": round(processor, 2),
        "peak_gib": round(_peak(), 2),
        "peak_before_gib": round(before, 2),
        "imports_seconds": round(imports, 2),
        "first_compile_seconds": round(first, 2),
        "conditions_seconds": round(_conditions_seconds(model, plan, size), 2),
        "passes": {name.strip("_"): round(seconds, 2) for name, seconds in passes.items()},
    }
    return {"rows": [row]}


def _conditions_seconds(model: nn.Module, plan: str, size: int) -> float:
    """The time that it takes to find the conditions on sizes: once, when a call of another size first comes."""
    from tpplan.calls.key import KeyReader
    from tpplan.compiler.cover import cover
    from tpplan.compiler.pipeline import compile_call
    from tpplan.compiler.request import Request
    from tpplan.plan import load_plan
    from tpplan.served import served

    inner = served(model, load_plan(plan), size)
    subject = compile_call(Request(inner.model, inner.plan, size, *inner.call)).subject
    assert subject is not None
    return _time(lambda: cover(subject, KeyReader(type(inner.model).forward).sizes))


def use_one_core() -> None:
    """Keep this process on one core, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def _import() -> None:
    for name in ("transformers", "tpplan.api", "tpplan.bench.subjects"):
        importlib.import_module(name)


def _time(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _peak() -> float:
    """The peak resident memory of this process, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@contextmanager
def _timed_passes(seconds: dict[str, float]) -> Generator[None]:
    """Add up what each pass of the pipeline takes, in processor time."""
    from tpplan.compiler import pipeline, search
    from tpplan.compiler.check import local_run

    owners = {"solve": search.Placer, "check": local_run, "build_regions": search, "assign": search}
    held = {name: (owners.get(name, pipeline), name) for name in PASSES}
    stock = {name: getattr(owner, attribute) for name, (owner, attribute) in held.items()}
    try:
        for name, (owner, attribute) in held.items():
            setattr(owner, attribute, _timed(stock[name], name, seconds))
        yield
    finally:
        for name, (owner, attribute) in held.items():
            setattr(owner, attribute, stock[name])


def _timed(function: Callable[..., Any], name: str, seconds: dict[str, float]) -> Callable[..., Any]:
    depth = 0

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        started = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            depth -= 1
            if not depth:  # a pass may call itself
                seconds[name] = seconds.get(name, 0.0) + time.process_time() - started

    return timed
