"""Draws: the random numbers of each body, and which of them every rank draws alike.

in:  the trace with every operation, the layouts of its values
out: for each module whose body draws: "split" or "same", or the one or the other for each draw in order of execution;
     the layouts of draws whose parts aren't told by their shapes alone

    dropout(down(dropout(up(x))))   with up: S(2)   ->   ("split", "same")

A module that is called for split values here and for replicated ones there (one `nn.Dropout` in two places) can't tell
by itself: it is marked "caller", and its draws count among those of the bodies that call it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from tpplan.compat.schemas import TORCH_NAMESPACES, OpOverload, is_random, schema_defaults
from tpplan.compiler.ir.layout import REPLICATED, Layout
from tpplan.compiler.ir.program import Drawn, Draws
from tpplan.compiler.ir.trace import Frame, Operation, Trace
from tpplan.ops.declared import rule_of
from tpplan.ops.registry import DRAWN_BY_SHAPE

_OF_TORCH = frozenset((*TORCH_NAMESPACES, "tpplan"))
_SWITCHES = frozenset({"dropout_p", "dropout", "train", "training"})


def is_draw(operator: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Whether a call of an operator draws random numbers.

    Fused attention may draw, and draws nothing if its dropout is 0; one call of it is one draw, as is the one dropout
    that it decomposes into. An operator that makes no tensor, such as torch's choice of a kernel, draws nothing.
    """
    known = _known.get(id(operator))
    if known is None:
        # An operator lives as long as the process, and its own hash is computed in Python.
        known = _known[id(operator)] = (is_random(operator), _switches(operator))
    random, switches = known
    if not random and not _is_told(operator):
        return False
    for position, name, default in switches:
        held = arguments[position] if position < len(arguments) else keywords.get(name, default)
        if held is not None and not held:
            return False
    return True


_Switches = tuple[tuple[int, str, Any], ...]
_known: dict[int, tuple[bool, _Switches]] = {}


def _is_told(operator: OpOverload) -> bool:
    """Whether an operator draws by its rule."""
    rule = None if operator.namespace in _OF_TORCH else rule_of(str(operator))
    return rule is not None and rule.random


def _switches(operator: OpOverload) -> _Switches:
    """The arguments with which an operator is told not to draw, with their places and defaults."""
    named = enumerate(schema_defaults(operator))
    return tuple((position, name, default) for position, (name, default) in named if name in _SWITCHES)


def random_draws(trace: Trace, layouts: Mapping[int, Layout]) -> dict[str, Draws]:
    """How the body of each module that draws random numbers does so, by the layouts of the trace's values."""
    reader = _DrawReader(trace, layouts)
    deferred: frozenset[str] = frozenset()
    while True:
        calls = reader.calls(deferred)
        clashing = {name for name, held in calls.items() if name not in deferred and not _agree(held)}
        if not clashing:
            break
        deferred |= clashing
    return {name: "caller" if name in deferred else _merged(held) for name, held in calls.items() if any(held)}


def drawn_in_parts(trace: Trace, layouts: Mapping[int, Layout]) -> tuple[Drawn, ...]:
    """The draws whose parts aren't even stretches of one dim, with all of the same operator and shape, in order."""
    found: list[Drawn] = []
    for _, node in trace.recorded.in_order():
        if isinstance(node, Operation) and is_draw(node.target, node.arguments, node.keywords):
            value, name = node.outputs[0] if node.outputs else None, node.target.name()
            if value is not None and name.startswith(DRAWN_BY_SHAPE):
                found.append(Drawn(name, trace.values[value].shape, layouts.get(value, REPLICATED)))
    told = {(d.operation, d.shape) for d in found if not d.layout.is_plain or d.layout.interleave != 1}
    return tuple(d for d in found if (d.operation, d.shape) in told)


class _DrawReader:
    """Reads the kinds of draws off a trace."""

    def __init__(self, trace: Trace, layouts: Mapping[int, Layout]) -> None:
        self._root = trace.recorded
        self._layouts = layouts
        self._sources: dict[int, tuple[int, ...]] = {}

    def calls(self, deferred: frozenset[str]) -> dict[str, list[tuple[str, ...]]]:
        """The draws of each call of each module, those of `deferred` modules counted where these are called."""
        found: dict[str, list[tuple[str, ...]]] = defaultdict(list)

        def read(frame: Frame) -> list[str]:
            drawn: list[str] = []
            for node in frame.body:
                if isinstance(node, Frame):
                    inner = read(node)
                    drawn += inner if node.module in deferred else ()
                elif is_draw(node.target, node.arguments, node.keywords):
                    drawn.append("split" if self._is_split(node) else "same")
            found[frame.module].append(tuple(drawn))
            return drawn

        read(self._root)
        return found

    def _is_split(self, node: Operation) -> bool:
        return any(self._is_sharded(output) for output in node.outputs if output is not None)

    def _is_sharded(self, value: int) -> bool:
        """Whether each rank holds a part of a value; of those that nobody reads, no layout was chosen."""
        layout = self._layouts.get(value)
        if layout is not None:
            return layout.is_sharded
        if not self._sources:
            self._sources = _sources(self._root)
        return any(map(self._is_sharded, self._sources.get(value, ())))


def _sources(root: Frame) -> dict[int, tuple[int, ...]]:
    """What each value is made from."""
    found: dict[int, tuple[int, ...]] = {}
    for _, node in root.in_order():
        if isinstance(node, Operation):
            found |= {output: node.inputs for output in node.outputs if output is not None}
        else:
            found[node.target] = (node.source,)
    return found


def _agree(calls: Iterable[tuple[str, ...]]) -> bool:
    """Whether the calls of a module can be served alike: the same draws in each, or one kind in all; or none."""
    different = {held for held in calls if held}
    return len(different) < 2 or len({kind for held in different for kind in held}) == 1


def _merged(calls: Iterable[tuple[str, ...]]) -> Draws:
    drawn = next(held for held in calls if held)
    return drawn[0] if len(set(drawn)) == 1 else drawn


__all__ = ["drawn_in_parts", "is_draw", "random_draws"]
