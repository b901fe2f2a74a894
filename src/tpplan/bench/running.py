"""Running a benchmark: its measurements, each in a fresh process, and their rows put together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tpplan.bench.environment import describe_environment

_LAYERS = (8, 32, 126)
_PLANS = ("llama", "llama-sequence")


class BenchmarkError(RuntimeError):
    """A measurement's process failed; the message holds the end of what it said."""


def measurements(name: str, quick: bool) -> list[dict[str, Any]]:
    """The arguments of each measurement of a benchmark; `quick` only shows that it runs."""
    if name == "collectives":
        few = {"plans": ["llama", "llama-sequence"]} if quick else {}
        return [{"of": "steps", **few}, {"of": "generation", **few}]
    if name in ("overhead", "loop"):
        rounds = {"rounds": 2, "calls": 1} if quick else {}
        return [{"kind": kind, **rounds} for kind in ("transformers", "plain")]
    if name == "alternatives":
        if quick:
            steps = {"part": "steps", "kind": "plain", "rounds": 2, "tiny": True}
            return [steps, {"part": "host", "kind": "plain", "rounds": 2, "calls": 1},
                    {"part": "layer", "rounds": 2, "calls": 1, "tiny": True}]  # fmt: skip
        steps = [{"part": "steps", "kind": kind} for kind in ("transformers", "plain")]
        return [*steps, {"part": "host"}, {"part": "layer"}]
    if name == "serving":
        if quick:
            return [{"model": "toy", "rounds": 2, "batches": [2]}]
        return [{"model": model} for model in ("toy", "wide")]
    if name == "requests":
        return [{"rounds": 2}] if quick else [{}]
    if name == "checkpoint":
        tiny = {"layers": 1, "hidden": 256, "rounds": 1, "file_bytes": 1 << 23}
        return [{"ranks": 2, **tiny}] if quick else [{"ranks": 2}, {"ranks": 4}]
    if name == "overlap":
        if quick:
            return [
                {"part": "steps", "rounds": 2, "tiny": True, "rate": 1e7},
                {"part": "host", "rounds": 2, "calls": 1},
            ]
        return [{"part": "steps"}, {"part": "steps", "ranks": 4, "rounds": 5}, {"part": "host"}]
    if name == "loss":
        return [{"tokens": 32, "vocabulary": 64, "rounds": 1}] if quick else [{}]
    if quick:
        return [{"layers": 2, "plan": plan, "size": 2, "reduced": True} for plan in _PLANS]
    return [{"layers": layers, "plan": plan} for plan in _PLANS for layers in _LAYERS]


def run(name: str, quick: bool = False, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Run a benchmark.

    Args:
        name: one of `BENCHMARKS`.
        quick: whether to do as little as shows that it runs; the figures mean nothing.
        progress: told what is measured next.

    Returns:
        Plain data: the benchmark's name, the environment, the settings, and `rows`.

    Raises:
        BenchmarkError: a measurement failed.
    """
    environment = describe_environment().to_dict()
    whole: dict[str, Any] = {"benchmark": name, "quick": quick, "environment": environment}
    rows: list[dict[str, Any]] = []
    for arguments in measurements(name, quick):
        progress(f"{name}: {', '.join(f'{key} {value}' for key, value in arguments.items()) or 'all'}")
        measured = run_in_process(name, arguments)
        rows += measured.pop("rows")
        whole |= measured
    return whole | {"rows": rows}


def run_in_process(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """One measurement in a fresh process."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tpplan.bench.child", name, json.dumps(arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[-15:])
        raise BenchmarkError(f"the benchmark {name} failed with {json.dumps(arguments)}\n{said}")
    return json.loads(done.stdout.splitlines()[-1])
