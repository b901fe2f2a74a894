"""The table of `explain` on kernels: every body that one could take the place of, and what becomes of it.

in:  a program
out: a rich table, equal layers in one row
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.table import Table

from tpplan.report.grid import new_table

if TYPE_CHECKING:
    from tpplan.compiler.ir.program import KernelUse, Program

_INDEX = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)|(?<=\.)\d+$|^\d+$")


def kernel_table(program: Program, where_it_pays: Callable[[KernelUse], str]) -> Table | None:
    """Every candidate with its kernel, or with why it keeps its own operations; None if there is none."""
    if not program.kernels:
        return None
    table = new_table("kernels", "", "taken")
    for column in table.columns[1:]:
        column.no_wrap = False
    for use, count in _grouped(program.kernels):
        name = use.module or program.model
        table.add_row(name if count == 1 else f"{name} × {count}", what_text(use), when_text(use, where_it_pays))
    return table


def what_text(use: KernelUse) -> str:
    """The kernel and what of the module it computes."""
    if use.kind in ("swiglu", "geglu"):
        made = " and ".join(use.parts[: 2 if use.halves is None else 1])
        return f"{use.kind} of {made}"
    if use.kind == "bias_gelu":
        return f"bias_gelu, with the bias of {use.parts[0].rpartition('.')[2]}"
    if use.kind == "cross_entropy":
        return "cross_entropy"
    if use.kind == "residual_norm":
        return f"residual_norm (eps {use.eps:g}), with the sum in {use.parts[0] or 'the model'}"
    details = [f"eps {use.eps:g}"] if use.kind.endswith("norm") else [use.approximate or "none"]
    details += [f"weight + {use.offset:g}"] if use.offset else []
    return f"{use.kind} ({', '.join(details)})"


def when_text(use: KernelUse, where_it_pays: Callable[[KernelUse], str]) -> str:
    """When the kernel is taken, or why it isn't; and what else was considered."""
    taken = "always, as the plan says" if use.choice == "triton" else f"on a GPU, {where_it_pays(use)}"
    when = f"never: {use.refused}" if use.refused else taken
    return f"{when}; {use.note}" if use.note else when


def _grouped(uses: tuple[KernelUse, ...]) -> Iterator[tuple[KernelUse, int]]:
    counted: dict[KernelUse, int] = {}
    for use in uses:
        parts = tuple(_INDEX.sub("*", part) for part in use.parts)
        alike = replace(use, module=_INDEX.sub("*", use.module), parts=parts, note=_INDEX.sub("*", use.note))
        counted[alike] = counted.get(alike, 0) + 1
    yield from counted.items()


__all__ = ["kernel_table", "what_text", "when_text"]
