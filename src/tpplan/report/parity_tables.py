"""Rendering the report of a verification for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tpplan.report.grid import fitted, new_table
from tpplan.report.program_page import listed, to_text
from tpplan.report.quantities import count_text

if TYPE_CHECKING:
    from tpplan.parity import ParityReport, TensorParity

_SHOWN: Final = 8
_GOOD: Final = "green"
_BAD: Final = "bold red"


def render_parity(report: ParityReport, *, width: int = 100, color: bool = False) -> str:
    """The report as text of `width` columns: the verdict, outputs and worst gradients, collectives, what is wrong."""
    return to_text(_parts(report, width), width, color)


def _parts(report: ParityReport, width: int) -> Iterator[RenderableType]:
    yield _verdict(report)
    if report.problems:
        yield Text("\n").join(Text(f"  {problem}") for problem in report.problems)
    if report.notes:
        yield Text("\n").join(Text(f"  note: {note}") for note in report.notes)
    if report.assumed:
        yield listed("Assumed of operators, as it couldn't be tried:", report.assumed)
    yield fitted(width, lambda _: _tensors("output", report.outputs))
    if report.gradients:
        yield fitted(width, lambda _: _tensors("gradient of", report.gradients))
    if report.collectives or report.predicted:
        yield fitted(width, lambda _: _collectives(report))
    yield _closing(report)


def _verdict(report: ParityReport) -> Text:
    text = Text(f"{report.plan} for {report.model} at tp={report.size}: ", style="bold")
    if report.ok:
        text.append("computes the same", style=_GOOD)
    elif report.divergence is None:
        text.append("isn't as the program says", style=_BAD)
    else:
        where = report.divergence.module or "the model itself"
        text.append(f"diverges, first in the {report.divergence.what} of {where}", style=_BAD)
    return text


def _tensors(heading: str, tensors: Sequence[TensorParity]) -> Table:
    """The tensors that stray farthest."""
    table = new_table(heading, "error", "tolerance", "", right=(1, 2))
    worst = sorted(tensors, key=lambda held: -held.error)
    for held in worst[:_SHOWN]:
        mark = Text("ok", style=_GOOD) if held.ok else Text("off", style=_BAD)
        table.add_row(held.name, f"{held.error:.1e}", f"{held.tolerance:.1e}", mark)
    if len(worst) > _SHOWN:
        right = sum(held.ok for held in worst[_SHOWN:])
        rest = len(worst) - _SHOWN
        table.add_row(f"{rest} more", "", "", Text("ok", style=_GOOD) if right == rest else Text(f"{rest - right} off"))
    return table


def _collectives(report: ParityReport) -> Table:
    table = new_table("collective", "counted", "predicted", "", right=(1, 2))
    for name in sorted({*report.collectives, *report.predicted}):
        counted, least, most = (held.get(name, 0) for held in (report.collectives, report.least, report.predicted))
        differs = Text("off", style=_BAD) if report.problems else Text("differs", style="yellow")
        mark = Text("ok", style=_GOOD) if least <= counted <= most else differs
        table.add_row(name, str(counted), str(most) if least == most else f"{least} to {most}", mark)
    return table


def _closing(report: ParityReport) -> Text:
    ranks = "simulated ranks" if report.ranks == "simulated" else "processes"
    lines = [
        f"One forward and backward in {report.dtype} on {report.size} {ranks}, in evaluation mode; "
        f"{count_text(report.modules_compared, 'module call')} compared.",
        "Errors are the largest difference, relative to the tensor's largest magnitude. "
        f"Tolerance: {report.tolerance.derivation}.",
    ]
    return Text("\n".join(lines), style="dim")
