"""Rendering why a module became what it did: every decision with its origin.

in:  a program and the name, or the pattern, of a module
out: text: the module and what is inside it, and the reshards of the modules around it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from tpplan.cost.traffic import Traffic, reshard_traffic
from tpplan.plan import Pattern
from tpplan.report.program_outline import Block, Item, Unit, collapse, joined, units
from tpplan.report.program_page import legend, to_text
from tpplan.report.program_tables import (
    by_rank_text,
    exchange_text,
    layout_text,
    placement_text,
    randomness_text,
    sizes_text,
)
from tpplan.report.quantities import bytes_text, count_text, path_text, shape_text

if TYPE_CHECKING:
    from tpplan.compiler.ir.program import ModuleProgram, ParameterPlacement, Program, Reshard

_WHY_STYLE = "cyan"


def render_why(program: Program, wanted: Pattern, *, width: int = 100, color: bool = False) -> str:
    """Every decision on the modules that `wanted` names and on what is inside them, as text of `width` columns."""
    everything = units(program)
    inside = [unit for unit in everything if _names(wanted, unit.full_name)]
    around = [unit for unit in everything if _is_around(unit, inside, wanted)]
    parts: list[RenderableType] = []
    for name, count, unit in _flat(collapse(inside)):
        parts.append(_unit(name, count, unit, program))
    if not inside:
        parts.append(
            Text(f"Nothing happens to {wanted.text} itself: it has no parameters, and no tensor is resharded.")
        )
    if around:
        parts.append(Text("Around it", style="bold underline"))
        for name, count, unit in _flat(collapse(around)):
            parts.append(_unit(name, count, unit, program, boundaries_only=True))
    parts.append(legend(program))
    return to_text(parts, width, color)


def _names(wanted: Pattern, name: str) -> bool:
    """Whether the module or one around it matches."""
    while True:
        if wanted.matches(name):
            return True
        if not name:
            return False
        name = name.rpartition(".")[0]


def _is_around(unit: Unit, inside: Sequence[Unit], wanted: Pattern) -> bool:
    if unit.module is None or not unit.module.reshards:
        return False
    if any(unit is held for held in inside):
        return False
    names = [held.full_name for held in inside] or [wanted.text]
    return any(not unit.full_name or name.startswith(f"{unit.full_name}.") for name in names)


def _flat(items: Iterable[Item], prefix: str = "", count: int = 1) -> Iterator[tuple[str, int, Unit]]:
    for item in items:
        if isinstance(item, Block):
            yield from _flat(item.items, joined(prefix, item.name), count * item.count)
        else:
            yield joined(prefix, item.name), count, item


def _unit(name: str, count: int, unit: Unit, program: Program, *, boundaries_only: bool = False) -> Group:
    title = Text(name or program.model, style="bold")
    title.append(f" × {count}" if count > 1 else "")
    module = unit.module
    origin = "inferred" if module is None or module.style is None else f"{module.style}, {module.origin}"
    title.append("  " + (f"{module.kind}, {origin}" if module is not None else origin), style="not bold")
    owned = [_parameter(parameter, program.size) for parameter in unit.parameters]
    facts = [] if boundaries_only else [*owned, *map(_tie, unit.tied)]
    if module is not None:
        facts += _boundaries(module, program.size)
        facts += [] if boundaries_only else _local_facts(module)
    lines: list[RenderableType] = [title]
    for fact, why in facts:
        lines.append(Padding(Text(fact), (0, 0, 0, 2)))
        if module is None or why != module.origin:
            shown = why.replace(unit.full_name, name) if count > 1 else why
            lines.append(Padding(Text(f"why: {shown}", style=_WHY_STYLE), (0, 0, 0, 6)))
    return Group(*lines)


def _parameter(parameter: ParameterPlacement, size: int) -> tuple[str, str]:
    leaf = parameter.name.rpartition(".")[2]
    fact = f"{leaf}  {placement_text(parameter)}  {sizes_text(parameter, size)}"
    why = parameter.origin
    if parameter.summed and parameter.trainable:
        why += "; its gradient comes out in parts, one on each rank"
    return fact, why


def _tie(tie: tuple[str, str]) -> tuple[str, str]:
    return f"{tie[0]}  is {tie[1]}", "the model ties the two"


def _boundaries(module: ModuleProgram, size: int) -> list[tuple[str, str]]:
    ways = (("in", module.entries), ("mid", module.inner), ("out", module.exits))
    return [_boundary(way, reshard, module, size) for way, reshards in ways for reshard in reshards]


def _boundary(way: str, reshard: Reshard, module: ModuleProgram, size: int) -> tuple[str, str]:
    traffic = reshard_traffic(reshard, size, module.calls)
    backward = str(reshard.backward) if reshard.differentiable else "nothing (no gradient)"
    costs = f"forward {_cost(traffic.forward, str(reshard.forward))}, backward {_cost(traffic.backward, backward)}"
    times = f", {module.calls} calls" if module.calls > 1 and reshard.times is None else ""
    times = times if reshard.times is None else f", {count_text(reshard.times, 'step')}"
    tensor = f"{path_text(reshard.path)} {shape_text(reshard.shape)} {reshard.dtype}"
    source, target = (layout_text(layout, reshard.shape, size) for layout in (reshard.source, reshard.target))
    return f"{way}  {tensor}  {source} → {target}: {costs}{times}", reshard.origin


def _cost(traffic: Traffic, collective: str) -> str:
    if not traffic.number:
        return "nothing" if collective == "none" else collective
    return f"{collective} {bytes_text(traffic.total)}"


def _local_facts(module: ModuleProgram) -> list[tuple[str, str]]:
    facts = [
        (f"{a.name}  {a.whole} → {by_rank_text(a.by_rank or (a.local,))}", "it counts what each rank holds a share of")
        for a in module.local_attributes
    ]
    if module.experts is not None and module.experts.sent is not None:
        facts.append((f"tokens  {exchange_text(module.experts)}, a forward and its backward", _exchange_why(module)))
    if module.draws_by_rank:
        facts.append((f"random numbers  {randomness_text(module)}", "they fall on a sharded tensor"))
    return facts


def _exchange_why(module: ModuleProgram) -> str:
    """Why tokens are exchanged as they are."""
    if module.experts is not None and module.experts.dispatches:
        return "the tokens are split, and go to the ranks with their experts: less is sent, or the plan asks for it"
    return "all ranks get all tokens, and sum their results: with all else that needs these, no more time, or asked for"
