"""The tables of `explain` on what a step costs, on memory, and on what becomes of the modules.

in:  a program and its outline
out: rich tables
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from tpplan.cost.traffic import gradient_sum_traffic, memory, module_traffic
from tpplan.report.grid import QUIET_STYLE, TOTAL_STYLE, fitted, new_table
from tpplan.report.program_communication import block_title, counts_text, unit_title
from tpplan.report.program_outline import Block, Item, Unit, units_of
from tpplan.report.quantities import bytes_text, count_text, shape_text

if TYPE_CHECKING:
    from tpplan.compiler.ir.layout import Layout
    from tpplan.compiler.ir.program import ModuleProgram, ParameterPlacement, Program
    from tpplan.compiler.ir.replaced_bodies import SharedExperts


def cost_table(program: Program) -> Table:
    """What one step costs a rank: bytes sent by pass."""
    step = module_traffic(program.modules, program.size)
    sums = gradient_sum_traffic(program)
    table = new_table("each rank, in one step", "", "sends", right=(2,))
    table.columns[1].no_wrap = False
    table.add_row("forward", counts_text(step.forward), bytes_text(step.forward.total))
    table.add_row("backward", counts_text(step.backward), bytes_text(step.backward.total))
    of = f" for {count_text(len(program.summed_parameters), 'parameter')}" if sums.number else ""
    table.add_row("sum of parameter gradients", counts_text(sums) + of, bytes_text(sums.total), end_section=True)
    together = step.forward + step.backward + sums
    table.add_row("together", counts_text(together), bytes_text(together.total), style=TOTAL_STYLE)
    return table


def memory_table(program: Program) -> Table:
    """Bytes of parameters, of the whole model and on one rank."""
    table = new_table("parameters", "", "whole", "each rank", "share", right=(1, 2, 3, 4))
    for name, sharded in (("sharded", True), ("replicated", False)):
        _add_memory(table, name, [p for p in program.parameters if p.layout.is_sharded is sharded], "")
    table.rows[-1].end_section = True
    _add_memory(table, "together", program.parameters, TOTAL_STYLE)
    return table


def module_table(items: Sequence[Item], size: int, width: int) -> Table:
    """Every module with its style, its parameters, and what else is local to one of `size` ranks."""
    dtypes = {parameter.dtype for unit, _ in units_of(items) for parameter in unit.parameters}
    common = dtypes.pop() if len(dtypes) == 1 else ""
    title = f"modules, {common}" if common else "modules"

    def make(stacked: bool) -> Table:
        separator = "\n" if stacked else " "
        table = new_table(title, "style", "", f"whole{separator}→ each rank", "placement", tight=stacked)
        _add_modules(table, items, size, common, separator, 0)
        return table

    return fitted(width, make)


def sizes_text(parameter: ParameterPlacement, size: int, common_dtype: str = "", separator: str = " ") -> str:
    """`(64, 64) → (16, 64)`, or one shape if it stays whole; with the dtype unless it is `common_dtype`.

    Where the ranks' parts differ in size, all sizes are shown: `(107, 64) → (54|53, 64)`.
    """
    dtype = "" if parameter.dtype == common_dtype else f" {parameter.dtype}"
    if parameter.shape == parameter.local_shape:
        return shape_text(parameter.shape) + dtype
    stored = [parameter.stored_shape(size, rank) for rank in range(size)]
    local = ", ".join(by_rank_text(sizes) for sizes in zip(*stored, strict=True))
    return f"{shape_text(parameter.shape)}{separator}→ ({local}){dtype}"


def by_rank_text(values: Sequence[int]) -> str:
    """`54|53`: the values on the ranks, each once."""
    return "|".join(map(str, dict.fromkeys(values)))


def layout_text(layout: Layout, shape: tuple[int, ...], size: int) -> str:
    """The layout, and the shape of what a rank holds where that isn't the whole: `S(1) (3, 8, 64)`."""
    held = [layout.local_shape(shape, size, rank) for rank in range(size)]
    local = ", ".join(by_rank_text(sizes) for sizes in zip(*held, strict=True))
    return str(layout) if set(held) == {shape} else f"{layout} ({local})"


def placement_text(parameter: ParameterPlacement) -> str:
    """`S(0)`, `R`, or `R, summed` for a gradient that is summed over the ranks."""
    return f"{parameter.layout}, summed" if parameter.summed and parameter.trainable else str(parameter.layout)


def randomness_text(module: ModuleProgram) -> str:
    """`differ by rank`, for a body that draws for sharded values; or for how many of its draws that's so."""
    draws = module.random
    if not isinstance(draws, tuple):
        return "differ by rank"
    return f"differ by rank in {draws.count('split')} of {count_text(len(draws), 'draw')}"


def exchange_text(experts: SharedExperts) -> str:
    """`all-to-all 1.2 MiB, by sums 4.5 MiB`: what a rank sends in a forward and its backward, first the way taken."""
    sent = experts.sent or (0, 0)
    ways = [f"all-to-all {bytes_text(sent[0])}", f"by sums {bytes_text(sent[1])}"]
    return ", ".join(ways if experts.dispatches else ways[::-1])


def _add_memory(table: Table, name: str, parameters: Sequence[ParameterPlacement], style: str) -> None:
    held = memory(parameters)
    count = count_text(len(parameters), "tensor")
    table.add_row(name, count, bytes_text(held.whole), bytes_text(held.local), f"{held.share:.1%}", style=style)


def _add_modules(table: Table, items: Sequence[Item], size: int, common_dtype: str, separator: str, depth: int) -> None:
    for item in items:
        if isinstance(item, Block):
            table.add_row(block_title(item, depth))
            _add_modules(table, item.items, size, common_dtype, separator, depth + 1)
            continue
        title, style = unit_title(item, depth), _style(item)
        for row in list(_facts(item, size, common_dtype, separator)) or [("", "", "")]:
            table.add_row(title, style, *row)
            title, style = Text(), Text()


def _facts(unit: Unit, size: int, common_dtype: str, separator: str) -> Iterator[tuple[str, str, str]]:
    """Rows on a module: what, whole and local value, placement."""
    for parameter in unit.parameters:
        yield (
            parameter.name.rpartition(".")[2],
            sizes_text(parameter, size, common_dtype, separator),
            placement_text(parameter),
        )
    for leaf, other in unit.tied:
        yield leaf, f"is {other}", ""
    if unit.module is None:
        return
    for attribute in unit.module.local_attributes:
        yield (
            "attribute",
            f"{attribute.name} {attribute.whole} → {by_rank_text(attribute.by_rank or (attribute.local,))}",
            "",
        )
    if unit.module.experts is not None and unit.module.experts.sent is not None:
        yield "tokens", exchange_text(unit.module.experts), ""
    if unit.module.draws_by_rank:
        yield "random", f"numbers {randomness_text(unit.module)}", ""


def _style(unit: Unit) -> Text:
    style = unit.module.style if unit.module is not None else None
    return Text("inferred", style=QUIET_STYLE) if style is None else Text(style)
