"""Premises: what a proof of a call stands on, place by place.

in:  what was compiled for a call, and the call
out: `Premise`s: a later call runs by the proof if all of them hold for it, and is proved anew or refused otherwise

    input_ids            an int64 tensor of 2 dims
    x.shape[1] <= 8      model.py:12: if x.shape[1] <= 8:
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tpplan.calls.describe import contents, listed
from tpplan.calls.key import KeyReader
from tpplan.compiler.cover import NotCoveredError, cover
from tpplan.compiler.pipeline import Compiled
from tpplan.compiler.trace.signatures import argument_names

Kind = Literal["argument", "size", "branch", "number", "mode", "memory", "state"]


@dataclass(frozen=True, slots=True)
class Premise:
    """One thing that a proof stands on.

    Attributes:
        kind: what it is about.
        text: the condition.
        line: of the code that reads it, if that is known.
    """

    kind: Kind
    text: str
    line: str = ""


def premises_of(
    compiled: Compiled, forward: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> list[Premise]:
    """All premises of a proof.

    Args:
        compiled: for the call.
        forward: the root's.
        arguments, keywords: the call.
    """
    return [
        *_arguments(forward, arguments, keywords),
        *_sizes(compiled, forward),
        *_data(compiled),
        *_modes(compiled),
        *_state(compiled),
    ]


def _arguments(forward: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Iterator[Premise]:
    for name, content in contents(arguments, keywords, argument_names(forward)).items():
        yield from (Premise("argument", text) for text in listed(name, content))
    yield Premise("argument", "nothing else is passed, but None where that is the default")


def _sizes(compiled: Compiled, forward: Callable[..., Any]) -> Iterator[Premise]:
    if compiled.subject is None:
        why = "numbers are read, each at its sizes" if compiled.facts is not None else "later calls run otherwise"
        yield Premise("size", f"all sizes are those of the call: {why}")
        return
    try:
        found = cover(compiled.subject, KeyReader(forward).sizes)
    except NotCoveredError as error:
        yield Premise("size", f"all sizes are those of the call: {error}")
        return
    for condition in found.conditions:
        yield Premise("size", condition.text, condition.line)
    for path, dims in compiled.subject.sequences.items():
        for dim in dims:
            name = ".".join(map(str, path))
            yield Premise("size", f"{name}.shape[{dim}] % {compiled.program.size} == 0", "ranks share the sequence")
    yield Premise("size", "sizes of 0 and 1 are those of the call, and others are 2 or more")


def _data(compiled: Compiled) -> Iterator[Premise]:
    for assumed in compiled.assumptions:
        side = "either side, by chance" if assumed.drawn else f"its {str(assumed.taken).lower()} side"
        yield Premise(
            "branch",
            f"a test of a tensor's value takes {side}",
            "" if assumed.location is None else assumed.location.short,
        )
    for read in compiled.facts.reads if compiled.facts is not None else ():
        shown = f"a shape of {read.seen}" if isinstance(read.seen, tuple) else str(read.seen.tolist())  # pyright: ignore
        yield Premise("number", f"of a tensor, {shown} is read")


def _modes(compiled: Compiled) -> Iterator[Premise]:
    yield Premise("mode", f"the model is in {'training' if compiled.program.training else 'evaluation'}")
    yield Premise("mode", f"the default dtype is {torch.get_default_dtype()}")
    yield Premise("mode", "autocast is as it is now, as are deterministic algorithms and the recording of gradients")
    for name in sorted(compiled.asked.settings):
        yield Premise("mode", f"`torch.{name}` says the same")


def _state(compiled: Compiled) -> Iterator[Premise]:
    for method in sorted(compiled.asked.memory):
        yield Premise("memory", f"`{method}` of the call's tensors says the same")
    for name in sorted(compiled.asked.flags):
        yield Premise("state", f"{name}.requires_grad is as it is now")
    written = " but for what each call changes itself" if compiled.keeps_writing else ""
    yield Premise("state", f"modules, hooks, configs and what they hold are as they are now{written}")


__all__ = ["Premise", "premises_of"]
