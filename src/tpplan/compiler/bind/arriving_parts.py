"""Arriving parts: inputs of a part of a model that the part before has left split.

in:  a trace, and what the plan says
out: by path, the layouts of those arguments of which a rank gets its part only

    layers.*: {style: replicate, input: sequence, output: sequence}   # and a stage that has layers 4 to 7
    ->   its argument `x`, which goes to `layers.4`, is S(1)
"""

from __future__ import annotations

from tpplan.compiler.bind.bind import Binding
from tpplan.compiler.ir.layout import Layout, sharded
from tpplan.compiler.ir.trace import Frame, Path, Trace
from tpplan.plan import Pin


def arriving_parts(trace: Trace, binding: Binding, size: int) -> dict[Path, Layout]:
    """The arguments that reach a module with `input: sequence` as they came."""
    found: dict[Path, Layout] = {}
    for crossing in trace.root.entries:
        value = trace.values[crossing.source]
        fits = len(value.shape) >= 3 and value.shape[1] % size == 0 and value.dtype.is_floating_point
        if fits and _is_taken(trace.root, crossing.target, binding):
            found[crossing.path] = sharded(1)
    return found


def _is_taken(frame: Frame, value: int, binding: Binding) -> bool:
    """Whether the first module with a pin that is passed the value takes its rank's part of it."""
    for child in frame.body:
        if not isinstance(child, Frame):
            continue
        place = next((i for i, crossing in enumerate(child.entries) if crossing.source == value), None)
        if place is None:
            continue
        bound = binding.modules.get(child.module)
        if bound is not None and bound.input is not None and place == 0:
            return bound.input is Pin.SEQUENCE
        if bound is None and _is_taken(child, child.entries[place].target, binding):
            return True
    return False


__all__ = ["arriving_parts"]
