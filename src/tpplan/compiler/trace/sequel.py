"""Sequel: whether the calls after a recorded one run the same operations.

in:  a skeleton after it was recorded, what it held before and after, and how to record one
out: whether later calls run other operations; a `LeftStateError` if that goes on changing
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from torch import Tensor, nn

from tpplan.compat.modules import named_modules
from tpplan.compiler.ir.trace import Frame, Operation, Trace, Value, filled
from tpplan.compiler.trace.left_state import LeftStateError, State, changes, described, watch
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.skeleton import Skeleton, make_skeleton
from tpplan.compiler.trace.slots import slots_of
from tpplan.compiler.trace.surroundings import Surroundings

Record = Callable[[Skeleton, Recorder | None], tuple[Trace, Recorder]]


class Sequel(NamedTuple):
    """What is known of the calls after the first: whether they run other operations, and whether each changes state.

    And what they read of what the first has left behind, see `Trace.reread`; the places that each of them changes and
    by which it steers nothing.
    """

    differs: bool
    writes: bool
    reread: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()


def sequel(trace: Trace, used: nn.Module, states: tuple[State, State], around: Surroundings, record: Record) -> Sequel:
    """Record further calls of a model whose state a call has changed; if they run other operations, all run the same.

    Args:
        trace: of the first call.
        used: the skeleton that it was recorded with.
        states: what it and its surroundings held before and after.
        around: its surroundings.
        record: records a skeleton, with a recorder if there is one already.

    Raises:
        StateError: each call runs others, or could.
    """
    changed, after = list(changes(*states)), states[1]
    if not changed:
        return Sequel(False, False)
    later = without_records(used)
    skeleton = make_skeleton(later)
    try:
        second = record(skeleton, None)[0]
    except Exception as error:
        raise LeftStateError(
            f"a second call fails, as the first has changed `{changed[0]}`: {error}", changed[0]
        ) from error
    same = shown(trace) == shown(second)
    slots = slots_of(skeleton.model, around)
    # What a cache keeps for a module's copy, it doesn't know of the next one's: each run of this one has computed it.
    again = {name for name in changes(after, described(slots)) if name not in slots or not slots[name].cached}
    if again:
        _refuse_steering(second, without_records(skeleton.model), again, around, record)
    return Sequel(not same, bool(again), second.effects.reread, frozenset(again))


def _refuse_steering(trace: Trace, model: nn.Module, names: set[str], around: Surroundings, record: Record) -> None:
    """Record one more call, in which all is watched that each call changes."""
    read: list[str] = []
    skeleton = make_skeleton(model)
    recorder = Recorder(trace.settings)

    def note(name: str) -> None:
        if len(recorder.frames) > 1:  # a forward reads it, and not the capture
            read.append(name)

    recorder.real.changing = watch(skeleton.model, around, names, note)
    first = min(names)
    try:
        third, recorder = record(skeleton, recorder)
        differs = shown(trace) != shown(third, recorder.real.blurred)
    except Exception as error:
        raise LeftStateError(
            f"it reads `{(read or [first])[0]}`, which changes with each call", (read or [first])[0]
        ) from error
    if recorder.real.steering:
        raise LeftStateError(
            f"it reads the value of `{first}` at {recorder.real.steering[0]}, which changes with each call", first
        )
    if read:
        raise LeftStateError(f"it reads `{read[0]}`, which changes with each call", read[0])
    if differs:
        raise LeftStateError(f"`{first}` changes with each call, and other operations run after it", first)


def without_records(model: nn.Module) -> nn.Module:
    """A skeleton that has been recorded, as a model again."""
    for _, module in named_modules(model):
        vars(module).pop("forward", None)
    return model


def shown(trace: Trace, blurred: Collection[int] = ()) -> list[object]:
    """What a trace computes, with its values numbered in order of appearance; `blurred` ones may have any number."""
    numbers: dict[int, int] = {}
    return [*_shown(trace.root, trace.values, numbers, blurred)]


class _Any:
    """It equals everything."""

    __hash__ = None  # pyright: ignore

    def __eq__(self, _: object) -> bool:
        return True


def _shown(
    frame: Frame, values: tuple[Value, ...], numbers: dict[int, int], blurred: Collection[int]
) -> Iterator[object]:
    def number(value: int | None) -> object:
        if value is None or value in numbers:
            return None if value is None else numbers[value]
        numbers[value] = len(numbers)
        held = values[value]
        known = _Any() if value in blurred else _numbers(held.numbers)
        return (numbers[value], held.shape, held.stride, held.dtype, held.differentiable, known)

    yield (frame.module, frame.call, [(c.path, number(c.source), number(c.target), c.aliases) for c in frame.entries])
    for node in frame.body:
        if isinstance(node, Operation):
            yield (
                node.name,
                filled(node.arguments, number),
                [(n, filled(a, number)) for n, a in node.keywords.items()],
            )
            yield ([number(o) for o in node.outputs], [number(o) for o in node.overwritten])
        else:
            yield from _shown(node, values, numbers, blurred)
    yield [(c.path, number(c.source), number(c.target), c.aliases) for c in frame.exits]


def _numbers(held: Tensor | None) -> object:
    return None if held is None or held.numel() != 1 else repr(held.item())  # of which one is like another, also if NaN


__all__ = ["sequel"]
