"""The communication table of `explain`: where a step sends how much.

in:  a program and its outline
out: a rich table: reshards, sums for equal layers, and the sum of a step
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from tpplan.cost.traffic import StepTraffic, Traffic, gradient_sum_traffic, module_traffic, reshard_traffic
from tpplan.report.grid import INDENT, TOTAL_STYLE, fitted, new_table
from tpplan.report.program_outline import Block, Item, Unit, units_of
from tpplan.report.quantities import NOTHING, bytes_text, count_text, path_text

if TYPE_CHECKING:
    from tpplan.compiler.ir.program import Program, Reshard

_BLOCK_STYLE = "bold cyan"
_SUBTOTAL_STYLE = "italic"
_WIDEST_PLACEMENT = 16
_COLLECTIVES = ("all-reduce", "one-shot all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def communication_table(program: Program, items: Sequence[Item], width: int) -> Table:
    """Every reshard with the bytes that each rank sends, and the sums for equal layers and for a step."""

    def make(stacked: bool) -> Table:
        table = new_table("communication", "placement", "forward", "backward", right=(2, 3), tight=stacked)
        _TrafficRows(table, program.size, "\n" if stacked else " ").add(program, items)
        return table

    return fitted(width, make)


def counts_text(traffic: Traffic) -> str:
    """`5 all-reduce, 1 all-gather`."""
    return ", ".join(f"{count:,} {name}" for name, count in _ordered(traffic)) or NOTHING


def unit_title(unit: Unit, depth: int) -> Text:
    """A module's name inside its block."""
    return Text(INDENT * depth + (unit.name or ("the layer" if depth else "the model")))


def block_title(block: Block, depth: int) -> Text:
    """`model.layers.* × 32`."""
    count = f" × {block.count}" if block.count > 1 else ""
    return Text(f"{INDENT * depth}{block.name}{count}", style=_BLOCK_STYLE)


class _TrafficRows:
    """Adds the rows."""

    def __init__(self, table: Table, size: int, separator: str) -> None:
        self.table = table
        self.size = size
        self.separator = separator

    def add(self, program: Program, items: Sequence[Item]) -> None:
        """Add the reshards, the sum of parameter gradients, and the sum of a step."""
        self._add_items(items, 0)
        sums = gradient_sum_traffic(program)
        if sums.number:
            name = f"gradients of {count_text(len(program.summed_parameters), 'parameter')}"
            self.table.add_row(name, "    P → R", NOTHING, self._text(sums))
        if self.table.row_count:
            self.table.rows[-1].end_section = True
        step = module_traffic(program.modules, self.size)
        self._add_traffic("a step", StepTraffic(step.forward, step.backward + sums), TOTAL_STYLE)

    def _add_items(self, items: Sequence[Item], depth: int) -> None:
        for item in items:
            if isinstance(item, Unit):
                self._add_reshards(item, depth)
            elif any(True for unit, _ in units_of(item.items) for _ in _reshards(unit)):
                self.table.add_row(block_title(item, depth))
                self._add_items(item.items, depth + 1)
                if item.count > 1:
                    self._add_subtotals(item, depth + 1)

    def _add_reshards(self, unit: Unit, depth: int) -> None:
        calls = unit.module.calls if unit.module is not None else 1
        title = unit_title(unit, depth)
        for way, reshard in _reshards(unit):
            traffic = reshard_traffic(reshard, self.size, calls)
            backward = str(reshard.backward) if reshard.differentiable else ""
            self.table.add_row(
                title,
                self._placement(way, reshard),
                self._text(traffic.forward, str(reshard.forward)),
                self._text(traffic.backward, backward),
            )
            title = Text()

    def _placement(self, way: str, reshard: Reshard) -> str:
        moved = f"{reshard.source} → {reshard.target}"
        if reshard.source == reshard.target:  # rows change their ranks, and the layout tells nothing
            moved = path_text(reshard.path)
        text = f"{way:<3} {moved}"
        return text.replace(" →", "\n    →") if len(text) > _WIDEST_PLACEMENT and self.separator == "\n" else text

    def _add_subtotals(self, block: Block, depth: int) -> None:
        once = StepTraffic()
        for unit, count in units_of(block.items):
            if unit.module is not None:
                once += module_traffic([unit.module], self.size).times(count)
        self._add_traffic(f"{INDENT * depth}each", once, _SUBTOTAL_STYLE)
        self._add_traffic(f"{INDENT * depth}all {block.count}", once.times(block.count), _SUBTOTAL_STYLE)

    def _add_traffic(self, name: str, traffic: StepTraffic, style: str) -> None:
        self.table.add_row(name, "", self._text(traffic.forward), self._text(traffic.backward), style=style)

    def _text(self, traffic: Traffic, instead: str = "") -> str:
        """`all-reduce 36.0 KiB` for each collective; `instead` stands for a local operation that sends nothing."""
        if not traffic.number:
            return NOTHING if instead in ("", "none") else instead
        counted = [(name if count == 1 else f"{count:,} {name}", name) for name, count in _ordered(traffic)]
        return "\n".join(f"{shown}{self.separator}{bytes_text(traffic.sent[name])}" for shown, name in counted)


def _reshards(unit: Unit) -> Iterator[tuple[str, Reshard]]:
    """Those at the boundary, and those in the middle of the body, by their way."""
    if unit.module is not None:
        yield from (("in", reshard) for reshard in unit.module.entries)
        yield from (("mid", reshard) for reshard in unit.module.inner)
        yield from (("out", reshard) for reshard in unit.module.exits)


def _ordered(traffic: Traffic) -> Iterable[tuple[str, int]]:
    return sorted(traffic.counts.items(), key=lambda item: _COLLECTIVES.index(item[0]))
