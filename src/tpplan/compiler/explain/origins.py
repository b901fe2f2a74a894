"""Origins: which line of the plan a value's layout comes from.

in:  a trace, the layouts of its values, the bindings
out: for a value, the rules whose sharded parameters it descends from; for a reshard, why it stands there
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from tpplan.compiler.bind.bind import Binding, Bound
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.layout import Layout
from tpplan.compiler.ir.trace import Crossing, Frame
from tpplan.plan import Pin

_SPLITTING = (Pin.SHARD, Pin.SEQUENCE)


@dataclass(frozen=True, slots=True)
class Cause:
    """What a layout comes from.

    Attributes:
        bound: a rule.
        option: the pin of it that makes the value so; "" if that is its style.
        parameter: the split parameter or buffer, if the value is one itself, so that nothing is gathered before a read.
    """

    bound: Bound
    option: Literal["", "input", "output"] = ""
    parameter: str = ""


class Origins:
    """Looks back along the data flow of one trace."""

    def __init__(self, flow: DataFlow, binding: Binding) -> None:
        """Look at the values of `flow`."""
        self.trace = flow.trace
        self.binding = binding
        self._flow = flow
        self._stored = flow.trace.stored
        self._pinned: dict[int, Cause] | None = None

    def crossed_from(self, value: int) -> int:
        """The value on the outer side of an entry, or the inner side of an exit, as far back as boundaries lead."""
        while value in self._flow.source:
            value = self._flow.source[value]
        return value

    def rule_behind(
        self, value: int, layouts: Mapping[int, Layout] | None = None, up_to: Collection[int] = ()
    ) -> Bound | None:
        """The nearest rule that sharded a parameter which `value` was computed from.

        With `layouts`, only operands that are themselves not replicated are followed back from `value`. Nothing behind
        the values `up_to` counts.
        """
        owners = (self._owner(current) for current in self._back_from(value, layouts, up_to))
        return next((bound for bound in owners if bound is not None), None)

    def cause_behind(self, value: int) -> Cause | None:
        """The nearest rule that sharded a parameter which `value` was computed from, or pinned what it was."""
        for current in self._back_from(value):
            bound = self._owner(current)
            if bound is not None:
                itself = self.crossed_from(value) == current
                return Cause(bound, parameter=self._stored[current][0] if itself else "")
            if current in self._pins():
                return self._pins()[current]
        return None

    def _back_from(
        self, value: int, layouts: Mapping[int, Layout] | None = None, up_to: Collection[int] = ()
    ) -> Iterator[int]:
        """A value and what it was computed from, nearest first; nothing is behind parameters and `up_to`."""
        seen: set[int] = set()
        queue = [value]
        while queue:
            current = queue.pop(0)
            if current in seen:
                continue
            seen.add(current)
            whole = layouts is not None and current in layouts and layouts[current].is_replicated
            is_parameter = current in self._stored
            if whole and current != value and not is_parameter:
                continue
            yield current
            if is_parameter or current in up_to:
                continue
            if current in self._flow.source:
                queue.append(self._flow.source[current])
            elif current in self._flow.made:
                queue.extend(self._flow.made[current].inputs)

    def _owner(self, value: int) -> Bound | None:
        """The rule that shards a value, if that is a parameter or a buffer which one shards."""
        names = self._stored.get(value)
        return None if names is None else self.binding.owners.get(names[0])

    def _pins(self) -> dict[int, Cause]:
        """The values that a rule pins as split: inside of a module what it takes, outside what it returns."""
        if self._pinned is None:
            self._pinned = {}
            for frame in self.trace.root.walk():
                bound = self.binding.modules.get(frame.module)
                if bound is not None and bound.rule.input in _SPLITTING:
                    self._pinned |= {crossing.target: Cause(bound, "input") for crossing in frame.entries}
                if bound is not None and bound.rule.output in _SPLITTING:
                    self._pinned |= {crossing.target: Cause(bound, "output") for crossing in frame.exits}
        return self._pinned

    def readers(self, frame: Frame, value: int) -> Iterator[Bound]:
        """The styled modules inside `frame` that take `value` through boundaries alone, in order."""
        carried = {value}
        for inner in frame.walk():
            for crossing in inner.entries:
                if crossing.source in carried or crossing.target in carried:
                    carried.add(crossing.target)
                    bound = self.binding.modules.get(inner.module)
                    if bound is not None:
                        yield bound

    def of_entry(self, frame: Frame, crossing: Crossing) -> str:
        """Why an argument is resharded: whom it serves."""
        bound = self.binding.modules.get(frame.module)
        if bound is not None:
            return bound.rule.origin or f"rule for {bound.rule.pattern}"
        readers = list(dict.fromkeys(self.readers(frame, crossing.target)))
        if not readers:
            return "inferred: the body needs it so"
        places = ", ".join(dict.fromkeys(r.rule.origin for r in readers if r.rule.origin))
        names = ", ".join(r.name.removeprefix(f"{frame.module}.") for r in readers)
        return f"for {names}" + (f" ({places})" if places else "")

    def of_exit(self, frame: Frame, value: int) -> str:
        """Why a result is resharded: which rule left it so."""
        bound = self.binding.modules.get(frame.module)
        if bound is None:
            bound = self.rule_behind(value)
        if bound is None:
            return "inferred: the readers of the result need it so"
        where = f" ({bound.rule.origin})" if bound.rule.origin else ""
        return f"{bound.style} {bound.name}{where}"
