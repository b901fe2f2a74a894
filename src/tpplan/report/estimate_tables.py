"""Estimates and advice, as people read them.

in:  an `Estimate` or an `Advice`
out: text, or Markdown
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from tpplan.cost.advice import Advice, AdviceRow
from tpplan.cost.estimates import Estimate
from tpplan.report.grid import QUIET_STYLE, TOTAL_STYLE, new_table
from tpplan.report.program_page import to_text
from tpplan.report.quantities import NOTHING, bytes_text

_HEADINGS = ("tp", "sp", "replicas", "checkpointing", "memory", "step", "sends", "tokens/s", "batch", "")


def render_estimate(cost: Estimate, width: int, color: bool, assumptions: bool = False) -> str:
    """Memory of a rank, the step, and what rests on guesses; with every number that it rests on if wanted."""
    parts: list[Table | Text] = [_memory(cost), _step(cost)]
    if any(held.hidden for held in cost.step.line):
        parts.append(_beside(cost))
    if cost.guesses:
        parts.append(Text(f"Guesses: {'; '.join(cost.guesses)}.", style=QUIET_STYLE))
    if assumptions:
        parts.append(_assumptions(cost))
    return to_text(parts, width, color)


def render_advice(advice: Advice, width: int, color: bool) -> str:
    """The table of choices, and what to do."""
    table = new_table(*_HEADINGS, right=(0, 2, 4, 5, 6, 7, 8), tight=width < 110)
    table.columns[-1].no_wrap = False
    for row in advice:
        table.add_row(*_cells(row), style=TOTAL_STYLE if row.recommended else "" if row.fits else QUIET_STYLE)
    return to_text([table, *map(Text, _sentences(advice))], width, color)


def advice_markdown(advice: Advice) -> str:
    """The same as Markdown."""
    lines = [f"| {' | '.join(_HEADINGS[:-1])} | |", "|" + "---|" * len(_HEADINGS)]
    for row in advice:
        texts = [" ".join(cell.split()).replace("|", "\\|") for cell in _cells(row)]
        cells = [f"**{text}**" if row.recommended and text else text for text in texts]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_sentences(advice)])


def seconds_text(seconds: float) -> str:
    """`1.24 s`, `318 ms`, `42.0 µs`."""
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.1f} µs"


def _memory(cost: Estimate) -> Table:
    table = new_table(f"memory of a rank, {cost.gpu}", "", "share", right=(1, 2))
    total = cost.memory.total
    for name, held in cost.memory.parts.items():
        if held:
            table.add_row(name, bytes_text(held), f"{held / total:.1%}")
    table.rows[-1].end_section = True
    fits = f"of {bytes_text(cost.available)}" if cost.fits else f"more than {bytes_text(cost.available)}"
    table.add_row("together", bytes_text(total), fits, style=TOTAL_STYLE)
    return table


def _step(cost: Estimate) -> Table:
    degrees = f"tp {cost.tp}" + (f", {'fsdp' if cost.fsdp else 'dp'} {cost.dp}" if cost.dp > 1 else "")
    table = new_table(
        f"{'a step' if cost.generation is None else 'the prompts'}, {degrees}, batch {cost.batch} × {cost.sequence:,}",
        "",
        right=(1,),
    )
    step = cost.step
    table.add_row("compute", seconds_text(step.compute_seconds))
    table.add_row("communication", seconds_text(step.communication_seconds))
    table.add_row("  of which nothing hides", seconds_text(step.exposed_seconds))
    if step.host_seconds:
        table.add_row("launching kernels, meanwhile", seconds_text(step.host_seconds))
    table.rows[-1].end_section = True
    table.add_row("together", seconds_text(step.total_seconds), style=TOTAL_STYLE)
    if cost.generation is not None:
        table.add_row("first token", seconds_text(cost.generation.first_token_seconds))
        table.add_row("each token more", seconds_text(cost.generation.token_seconds))
    table.add_row(f"{'tokens' if cost.sequence > 1 else 'inputs'} a second", f"{cost.tokens_per_second:,.0f}")
    if cost.mfu is not None:
        table.add_row("MFU", f"{cost.mfu:.1%}")
    return table


def _beside(cost: Estimate) -> Table:
    """The collectives of one block, and what of them runs beside products."""
    table = new_table("collectives of a block", "takes", "hidden", "exposed", right=(1, 2, 3))
    for held in cost.step.line:
        if held.stream != "communication":
            continue
        way = ", backward" if held.backward else ""
        seconds = (held.seconds, held.hidden, held.seconds - held.hidden)
        table.add_row(f"{held.module} {held.name}{way}", *(seconds_text(s) if s else NOTHING for s in seconds))
    return table


def _assumptions(cost: Estimate) -> Table:
    table = new_table("assumption", "")
    for name, value in cost.assumptions.items():
        held: list[tuple[str, object]] = [(name, value)]
        if isinstance(value, dict):
            held = [(f"{name}.{key}", item) for key, item in value.items()]  # pyright: ignore
        for key, item in held:
            table.add_row(key, f"{item:g}" if isinstance(item, float) else str(item))
    return table


def _cells(row: AdviceRow) -> list[str]:
    replicas = f"{row.dp}{' fsdp' if row.fsdp else ''}"
    known = row.memory is not None and row.step is not None
    return [
        str(row.tp),
        "yes" if row.sequence_parallel else NOTHING,
        replicas,
        row.checkpointing if known else NOTHING,
        bytes_text(row.memory.total) if row.memory is not None else NOTHING,
        seconds_text(row.step.total_seconds) if row.step is not None else NOTHING,
        f"{row.communication_share:.0%}" if known else NOTHING,
        f"{row.tokens_per_second:,.0f}" if row.fits else NOTHING,
        str(row.largest_batch) if known else NOTHING,
        row.reason,
    ]


def _sentences(advice: Advice) -> Iterator[str]:
    yield advice.summary
    kind = "generation after" if advice.inference else "training with"
    what = "tokens" if advice.sequence > 1 else "inputs"
    yield (
        f"For {kind} {advice.batch} × {advice.sequence:,} {what} a replica, in {bytes_text(advice.available)}. "
        "Sends is the share of a step in which communication is exposed; batch is the largest of a replica that fits."
    )
    if advice.inference:
        yield "Step is the prompts' forward, until the first token; tokens/s are those generated after it."
    if advice.smallest is not None:
        yield f"The least GPUs on which it fits: {advice.smallest}."
    if advice.guesses:
        yield f"Guesses: {'; '.join(advice.guesses)}."


__all__ = ["advice_markdown", "render_advice", "render_estimate", "seconds_text"]
