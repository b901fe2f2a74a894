"""Norms: modules of the residual stream that can work on a part of the sequence, for sequence parallelism.

in:  a subject, and the modules that have a setting already
out: groups: one for each kind of norm

    input_layernorm: (batch, sequence, hidden) -> the same, reduced over hidden  ->  layers.*.input_layernorm: sequence
"""

from __future__ import annotations

from collections.abc import Collection

from tpplan.compiler.ir.trace import Frame, Operation
from tpplan.ops.dim_map import dims_of
from tpplan.plan import Style
from tpplan.suggest.patterns import shape_of
from tpplan.suggest.roles import RoleGroup, RoleSetting
from tpplan.suggest.subject import SuggestSubject


def find_norms(subject: SuggestSubject, settled: Collection[str]) -> tuple[RoleGroup, ...]:
    """A group for every kind of norm that lies in the stream, in the model's order."""
    lengths = _sequence_lengths(subject)
    kinds: dict[str, dict[str, RoleSetting]] = {}
    for frame in subject.trace.root.walk():
        if frame.module and frame.module not in settled and _normalises(frame, subject, lengths):
            kinds.setdefault(shape_of(frame.module), {})[frame.module] = RoleSetting(Style.SEQUENCE)
    title = "norms of the residual stream, each rank a part of the sequence"
    return tuple(RoleGroup(title, settings, 0) for settings in kinds.values())


def _sequence_lengths(subject: SuggestSubject) -> frozenset[int]:
    """The lengths of the streams that divide evenly: an encoder's may differ from a decoder's."""
    shapes = [_stream_shape(frame, subject) for frame in subject.trace.root.walk()]
    return frozenset(s[1] for s in shapes if s is not None and len(s) == 3 and s[1] % subject.size == 0)


def _stream_shape(frame: Frame, subject: SuggestSubject) -> tuple[int, ...] | None:
    """The shape of what a norm normalises: (batch, sequence, hidden), or flattened to (batch · sequence, hidden)."""
    if len(frame.exits) != 1 or not frame.entries or any(isinstance(node, Frame) for node in frame.body):
        return None
    given, made = (subject.trace.values[i] for i in (frame.entries[0].source, frame.exits[0].target))
    if given.shape != made.shape or not made.differentiable or len(given.shape) not in (2, 3):
        return None
    last = len(given.shape) - 1
    held = any(_reduces(node, last, subject) for node in frame.body if isinstance(node, Operation))
    return given.shape if held else None


def _normalises(frame: Frame, subject: SuggestSubject, lengths: Collection[int]) -> bool:
    shape = _stream_shape(frame, subject)
    if shape is None or len(shape) == 3:
        return shape is not None and shape[1] in lengths
    batch = subject.trace.values[subject.trace.inputs[0]].shape[0]
    return shape[0] in {batch * length for length in lengths}


def _reduces(node: Operation, last: int, subject: SuggestSubject) -> bool:
    """Whether it takes statistics over the last dim."""
    shape = subject.trace.values[node.inputs[0]].shape if node.inputs else ()
    if len(shape) != last + 1:
        return False
    if node.is_a("norm"):
        return tuple(node.arguments[1]) == shape[-1:]
    return node.is_a("moment") and dims_of(node.target, node.arguments, len(shape)) == [last]
