"""Branches: the sides on which a model's branches on the numbers in its tensors are taken.

in:  a model and an example call
out: its trace, in which no parameter stays unused that the other side of a branch would use

    if mask.all(): mask = None                  ->   false: the mask is used
    if chosen.any(): y += expert(x[chosen])     ->   true, since `expert` would never be called
    if torch.rand(1) > p: y += x @ self.a       ->   true, since `a` would never be read
    if count != expected: raise ValueError      ->   false; of `assert count == expected` true

A capture on meta tensors has no numbers, so that it takes one side. The program records the assumption.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from tpplan.compat.modes import without_inference_kernels
from tpplan.compiler.ir.locations import Location
from tpplan.compiler.ir.observations import CaptureSettings
from tpplan.compiler.ir.trace import Operation, Trace
from tpplan.compiler.trace.capture import BodyError, Capture, record
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.sequel import sequel
from tpplan.compiler.trace.skeleton import Skeleton, make_skeleton
from tpplan.compiler.trace.surroundings import Surroundings
from tpplan.compiler.trace.unfollowed import DataDependentError

_Picking = frozenset[tuple[int, int]]
_Attempt = tuple[Trace, Capture, Skeleton]
_ROUNDS = 3  # branches within branches


def record_model(
    model: nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any], settings: CaptureSettings
) -> tuple[Trace, Capture]:
    """Record a call of `model`; branches on data take their false side, unless parameters would then stay unused.

    Args:
        model, arguments, keywords: see `record`.
        settings: how.

    Raises:
        BodyError: a module raised on these inputs.
    """
    around, stale = Surroundings(model), list[Any]()
    try:
        try:
            with without_inference_kernels():
                return _recorded(model, arguments, keywords, settings, around)
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
        return _recorded(model, arguments, keywords, settings, around)
    finally:
        around.restore()


def _recorded(
    model: nn.Module,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    settings: CaptureSettings,
    around: Surroundings,
) -> tuple[Trace, Capture]:
    chosen = settings.taken

    def recorder_with(taken: frozenset[Location], values: bool, picking: _Picking) -> Recorder:
        return Recorder(replace(settings, taken=taken, values=values, picking=picking))

    def run(skeleton: Skeleton, recorder: Recorder) -> tuple[Trace, Capture]:
        around.repeat_draws()
        state = Capture(recorder)
        return record(skeleton, arguments, keywords, state, around), state

    def again(skeleton: Skeleton, recorder: Recorder | None) -> tuple[Trace, Recorder]:
        trace_again, state_again = run(skeleton, recorder or Recorder(trace.settings))
        return trace_again, state_again.recorder

    def attempt(taken: frozenset[Location], values: bool, picking: _Picking = frozenset()) -> _Attempt:
        around.restore()
        skeleton = make_skeleton(model)
        recorder = recorder_with(taken, values, picking)
        try:
            return *run(skeleton, recorder), skeleton
        except BodyError as error:
            cause = error.__cause__ or error
            error.side = recorder.sides.surely_raised_for(cause)
            more = _picking(cause, picking) if values else picking
            if more != picking:
                try:
                    return attempt(taken, values, more)
                except BodyError:
                    raise error from cause  # it picks nothing: what it wanted to read is the finding
            test = recorder.sides.raised_for(cause)
            if chosen is not None or test is None or test in taken:
                raise
        return attempt(taken | {test}, values, picking)

    taken = frozenset[Location]() if chosen is None else chosen
    try:
        trace, state, skeleton = attempt(taken, settings.values)
    except Exception as error:  # whatever it wants to know
        if settings.values or (chosen is not None and isinstance(error, BodyError) and error.side is not None):
            raise
        trace, state, skeleton = attempt(taken, True)
    if around.stale():
        raise StaleCacheError
    unused = set(_unused(model, trace)) if chosen is None and trace.branches.assumptions else set[str]()
    for _ in range(_ROUNDS if unused else 0):
        taken = frozenset(trace.settings.taken or ()).union(_above(unused, trace))
        if taken == trace.settings.taken:
            break
        around.restore()
        other = make_skeleton(model)
        try:
            found, reached = run(other, recorder_with(taken, trace.settings.values, trace.settings.picking))
        except Exception:
            if trace.settings.values:
                break  # that side can't be captured: the first stands
            try:
                found, reached, other = attempt(frozenset(), True)
            except Exception as error:
                if isinstance(error, BodyError) and isinstance(error.__cause__, DataDependentError):
                    raise  # on the way that the call really takes
                break
        still = set(_unused(model, found))
        if len(still) >= len(unused):
            break
        trace, state, unused, skeleton = found, reached, still, other
    state.sequel = sequel(trace, skeleton.model, state.states, around, again)
    effects = replace(trace.effects, reread=trace.effects.reread | state.sequel.reread)
    return replace(trace, effects=effects), state


def _picking(cause: BaseException, picking: _Picking) -> _Picking:
    """What a body seems to pick by the places that `nonzero` finds: all, or all but a last one that isn't there."""
    if isinstance(cause, DataDependentError) and cause.among and cause.among not in dict(picking):
        return picking | {(cause.among, cause.among)}
    if isinstance(cause, IndexError):
        fewer = {(length, count - 1) for length, count in picking if length == count > 1}
        return frozenset(fewer) or picking
    return picking


class StaleCacheError(Exception):
    """A cache gave the run tensors from before it."""


def _unused(model: nn.Module, trace: Trace) -> Iterator[str]:
    """The parameters that nothing in the trace reads."""
    read: set[int] = set()
    for frame in trace.root.walk():
        read.update(crossing.source for crossing in frame.entries)
        read.update(i for node in frame.body if isinstance(node, Operation) for i in node.inputs)
    names = {name for value, every in trace.parameters.items() if value in read for name in every}
    return (name for name, _ in model.named_parameters(remove_duplicate=False) if name not in names)


def _above(unused: set[str], trace: Trace) -> Iterator[Location]:
    """The branches that were taken on their false side in a module that holds one of these."""
    for assumption in trace.branches.assumptions:
        prefix = f"{assumption.module}." if assumption.module else ""
        if assumption.location is not None and any(name.startswith(prefix) for name in unused):
            yield assumption.location


class Captures:
    """What was captured. The model, the call, and what is around them must be the same for all that ask."""

    def __init__(self) -> None:
        """Start without any."""
        self._found: dict[CaptureSettings, tuple[Trace, Capture] | Exception] = {}
        self._others: dict[Hashable, Captures] = {}

    def record(
        self, model: nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any], settings: CaptureSettings
    ) -> tuple[Trace, Capture]:
        """What `record_model` returns, or raises."""
        if settings not in self._found:
            try:
                self._found[settings] = record_model(model, arguments, keywords, settings)
            except Exception as error:
                self._found[settings] = error
        found = self._found[settings]
        if isinstance(found, Exception):
            raise found
        return found

    def where(self, state: Hashable) -> Captures:
        """Those of the model in another state, such as a call leaves it in."""
        return self._others.setdefault(state, Captures())


__all__ = ["Captures", "record_model"]
