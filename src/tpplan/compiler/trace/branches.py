"""Branches: the sides on which a model's branches on the numbers in its tensors are taken.

in:  a model and an example call
out: its trace, in which no module stays uncalled that the other side of a branch would call

    if mask.all(): mask = None                  ->   false: the mask is used
    if chosen.any(): y += expert(x[chosen])     ->   true, since `expert` would never be called

A capture on meta tensors has no numbers, so that it takes one side. The program records the assumption.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tpplan.compat import named_modules
from tpplan.compiler.ir.trace import Location, Trace
from tpplan.compiler.trace.capture import Capture, record
from tpplan.compiler.trace.device import device_of
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.sequel import sequel, state_of
from tpplan.compiler.trace.skeleton import Skeleton, make_skeleton
from tpplan.compiler.trace.surroundings import Surroundings

_ROUNDS = 3  # branches within branches


def record_model(
    model: nn.Module,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    training: bool,
    taken: frozenset[Location] | None = None,
    device: torch.device | None = None,
) -> tuple[Trace, Capture]:
    """Record a call of `model`; branches on data take their false side, unless modules would then stay uncalled.

    Args:
        model, arguments, keywords, training: see `capture`.
        taken: the branches that take their true side; None to choose them as said.
        device: where bodies are told that their tensors lie; None for where the model's parameters do.

    Raises:
        BodyError: a module raised on these inputs.
    """
    device = device or device_of(model)
    around, stale = Surroundings(model), list[Any]()
    try:
        try:
            return _recorded(model, arguments, keywords, training, taken, device, around)
        finally:
            stale = around.stale()
            around.restore()
    except Exception:
        if not stale:
            raise
    for cache in stale:
        cache.cache_clear()
    around = Surroundings(model)
    try:
        return _recorded(model, arguments, keywords, training, taken, device, around)
    finally:
        around.restore()


def _recorded(
    model: nn.Module,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    training: bool,
    chosen: frozenset[Location] | None,
    device: torch.device,
    around: Surroundings,
) -> tuple[Trace, Capture]:
    def run(skeleton: Skeleton, recorder: Recorder) -> tuple[Trace, Capture]:
        around.repeat_draws()
        state = Capture(recorder)
        return record(skeleton, arguments, keywords, training, state, around), state

    def again(skeleton: Skeleton, recorder: Recorder | None) -> tuple[Trace, Recorder]:
        trace_again, state_again = run(skeleton, recorder or Recorder(trace.taken, device))
        return trace_again, state_again.recorder

    skeleton = make_skeleton(model)
    before = state_of(skeleton.model, around)
    trace, state = run(skeleton, Recorder(chosen or frozenset(), device))
    if around.stale():
        raise StaleCacheError
    uncalled = set(_uncalled(model, trace)) if chosen is None else set[str]()
    for _ in range(_ROUNDS if uncalled else 0):
        taken = trace.taken | set(_above(uncalled, trace))
        if taken == trace.taken:
            break
        around.restore()
        other = make_skeleton(model)
        try:
            found, reached = run(other, Recorder(taken, device))
        except Exception:  # that side can't be captured: the first stands
            break
        still = set(_uncalled(model, found))
        if len(still) >= len(uncalled):
            break
        trace, state, uncalled, skeleton = found, reached, still, other
    state.sequel = sequel(trace, skeleton.model, before, around, again)
    return trace, state


class StaleCacheError(Exception):
    """A cache gave the run tensors from before it."""


def _uncalled(model: nn.Module, trace: Trace) -> Iterator[str]:
    """The modules with parameters of their own that the trace doesn't call."""
    called = {frame.module for frame in trace.root.walk()}
    for name, module in named_modules(model):
        if name not in called and next(module.parameters(recurse=False), None) is not None:
            yield name


def _above(uncalled: set[str], trace: Trace) -> Iterator[Location]:
    """The branches that were taken on their false side in a module that holds one of these."""
    for assumption in trace.assumptions:
        prefix = f"{assumption.module}." if assumption.module else ""
        if assumption.location is not None and any(name.startswith(prefix) for name in uncalled):
            yield assumption.location


__all__ = ["record_model"]
