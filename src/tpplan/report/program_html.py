"""A program as one HTML file: a diagram, a rank's memory, the time line of a step, and tables.

in:  a program, its estimate and the GPUs where there are any, the texts of the plan's files
out: HTML that loads nothing; every text of the model or the plan is escaped

`html_parts.py` has what other pages share with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tpplan.cost.traffic import gradient_sum_traffic
from tpplan.report.estimate_tables import seconds_text
from tpplan.report.html_parts import Cell, html_card, html_row, html_table, whole_page
from tpplan.report.program_diagram import STYLE, box_title, escape, pass_lines, svg
from tpplan.report.program_picture import DrawnReshard, ModuleBox, parameter_text, picture_of
from tpplan.report.quantities import NOTHING, bytes_text, count_text, path_text, shape_text

if TYPE_CHECKING:
    from tpplan.compiler.ir.program import Program
    from tpplan.cost.cluster import Cluster
    from tpplan.cost.estimates import Estimate, TimeSlice

_COLORS = ("#4c78c9", "#6fa8a0", "#9a7fc0", "#d08c4a", "#c0616b", "#8a9a5b")
_LEGEND = """R: each rank holds the whole. S(d): split along dim d. P: the ranks' sum is the value. R·∂P: R, with a \
gradient that is P. summed: a parameter's P gradient, added up once a step. Bytes are what each rank sends in ring \
algorithms in a step, in one of equal layers."""
_HINT = """Choose a collective in the diagram or in the table: its bytes, its time, and the line of the plan that it \
follows from."""


def html_page(
    program: Program,
    cost: Estimate | None = None,
    cluster: Cluster | None = None,
    plans: Mapping[str, str] | None = None,
    unpriced: str = "",
) -> str:
    """The page.

    Args:
        program: what to show.
        cost: its estimate on `cluster`; without it, neither memory nor time are shown.
        plans: the text of each file of the plan, by its name in reasons.
        unpriced: why there is no estimate.
    """
    return _Page(program, cost, cluster, plans or {}, unpriced).html()


class _Page:
    """Writes the parts."""

    def __init__(
        self, program: Program, cost: Estimate | None, cluster: Cluster | None, plans: Mapping[str, str], unpriced: str
    ) -> None:
        self.program, self.cost, self.cluster, self.unpriced = program, cost, cluster, unpriced
        self.picture = picture_of(program, cluster)
        self.plans = {name: text.splitlines() for name, text in plans.items()}
        self.files = {name: f"plan{number}" for number, name in enumerate(plans)}

    def html(self) -> str:
        """All of it."""
        costs = self.memory() + self.time_line()
        plans = "".join(self.plan(name) for name in self.plans)
        notes = "".join(self.notes())
        return whole_page(
            self.picture.title, self.header(),
            f'''<div class="cards">{"".join(self.cards())}</div>
<div class="columns">
<section aria-labelledby="h1"><h2 id="h1">Modules, placements and collectives</h2>
<div class="pan" tabindex="0" role="region" aria-labelledby="h1">{svg(self.picture, alone=False)}</div></section>
<div class="side"><div id="told" role="status"><p>{_HINT}</p></div>
{costs}{plans}</div>
</div>
{self.collectives()}{self.modules()}{notes}''',
            style=STYLE,
        )  # fmt: skip

    def header(self) -> str:
        """What is shown, and for which call."""
        program = self.program
        inputs = ", ".join(f"{path_text(i.path)} {shape_text(i.shape)} {i.dtype}" for i in program.inputs)
        mode = "training" if program.training else "evaluation"
        on = f"{count_text(program.size, 'rank')} of axis {program.axis}, in {mode}, called with {inputs}"
        return f"<h1>{escape(program.model)} with plan {escape(program.plan)}</h1><p>{escape(on)}</p>"

    def cards(self) -> Iterator[str]:
        """The numbers that decide."""
        sent = [c.count * cost.bytes for c in self.picture.crossings() for cost in c.passes]
        sums = gradient_sum_traffic(self.program).total
        axis = f"a step over {self.program.axis}"
        yield html_card(f"each rank sends in {axis}", bytes_text(sum(sent) + sums))
        yield html_card(f"collectives in {axis}", f"{sum(self.program.count_collectives().values()):,}")
        cost = self.cost
        if cost is not None:
            fits = "of" if cost.fits else "does not fit in"
            yield html_card(f"memory of a rank, {fits} {bytes_text(cost.available)}", bytes_text(cost.memory.total))
            yield html_card(f"a step on {cost.gpu}", seconds_text(cost.step.total_seconds))
            yield html_card("of it exposed communication", seconds_text(cost.step.exposed_seconds))
            yield html_card(f"{'tokens' if cost.sequence > 1 else 'inputs'} a second", f"{cost.tokens_per_second:,.0f}")
            if cost.mfu is not None:
                yield html_card("MFU", f"{cost.mfu:.1%}")

    def memory(self) -> str:
        """The bar of a rank's memory in its parts, and below it how much of the GPU's that is."""
        if self.cost is None:
            return f"<p>{escape(self.unpriced)}</p>" if self.unpriced else ""
        parts = [(name, held) for name, held in self.cost.memory.parts.items() if held]
        whole = self.cost.memory.total
        share = min(100 * whole / self.cost.available, 100)
        colors = list(zip(parts, _COLORS, strict=False))
        bar = "".join(
            f'<span style="width:{held / whole:.4%};background:{color}" title="{name} {bytes_text(held)}"></span>'
            for (name, held), color in colors
        )
        key = "".join(
            f'<li><i style="background:{color}"></i>{name} <span class="num">{bytes_text(held)}</span></li>'
            for (name, held), color in colors
        )
        free = self.cost.available - self.cost.memory.total
        left = f"{bytes_text(free)} are free" if free >= 0 else f"{bytes_text(-free)} too much"
        around = f"checkpointing {escape(self.cost.checkpointing)}, {'fsdp' if self.cost.fsdp else 'dp'} {self.cost.dp}"
        told = f"{escape(self.cost.optimizer)}, {around}: {left}"
        thin = f'<div class="bar thin"><span style="width:{share:.3f}%;background:var(--accent)"></span></div>'
        head = f"<h2>Memory of a rank: {bytes_text(whole)} of {bytes_text(self.cost.available)}</h2>"
        return f'{head}<div class="bar">{bar}</div>{thin}<ul class="key">{key}</ul><p>{told}.</p>'

    def time_line(self) -> str:
        """One repeated block on two streams, forward and backward."""
        line = self.cost.step.line if self.cost is not None else ()
        if not line:
            return ""
        end = max(held.start + held.seconds for held in line)
        keys = {
            (c.first, cost.name, back): c.key
            for c in self.picture.crossings()
            for back, cost in zip((False, True), c.passes, strict=True)
        }
        rects = "".join(_slice(held, end, keys.get((held.module, held.name, held.backward))) for held in line)
        busy = {
            stream: sum(held.seconds for held in line if held.stream == stream)
            for stream in ("compute", "communication")
        }
        turn = next((held.start for held in line if held.backward), end)
        share = 100 * turn / end if end else 100
        told = ", ".join(f"{seconds_text(seconds)} of {stream}" for stream, seconds in busy.items())
        if hidden := sum(held.hidden for held in line):
            told += f", of which {seconds_text(hidden)} beside products"
        return (
            f'<h2>Time line of one block: {seconds_text(end)}</h2><svg class="line" role="group" aria-label="{told}">'
            f'<text x="4" y="13">forward</text><text x="{share:.2f}%" y="13" dx="4">backward</text>{rects}'
            f'<line x1="{share:.2f}%" x2="{share:.2f}%" y1="0" y2="100%" stroke="var(--line)"/></svg>'
            f'<p>Above compute, below communication: {told}.</p>'
        )  # fmt: skip

    def plan(self, name: str) -> str:
        """A file of the plan, whose lines reasons lead to."""
        lines = "".join(
            f'<li id="{self.files[name]}-{number}">{escape(line) or " "}</li>'
            for number, line in enumerate(self.plans[name], 1)
        )
        return f'<h2>{escape(name)}</h2><ol class="plan" tabindex="0" aria-label="{escape(name)}">{lines}</ol>'

    def collectives(self) -> str:
        """The table of reshards."""
        headings = ("module", "×", "at", "tensor", "placement", "forward", "bytes", "time")
        rows = [(c, self.crossing_cells(c)) for c in self.picture.crossings()]
        told = "".join(f'<template id="{c.key}-told">{self.told(c)}</template>' for c, _ in rows)
        body = [html_row(cells, f' id="{c.key}" data-line="{escape(self.line(c.origin))}"') for c, cells in rows]
        headings = (*headings, "backward", "bytes", "time", "why")
        return html_table("Collectives and local operations", "reshards", headings, body) + told

    def crossing_cells(self, crossing: DrawnReshard) -> list[Cell]:
        """A row of the table."""
        cells: list[Cell] = [
            (f'<button type="button" data-to="{crossing.key}">{escape(crossing.module or "the model")}</button>', None),
            (str(crossing.count), crossing.count), (crossing.way, None),
            (escape(f"{crossing.path} {crossing.whole}"), None), (escape(crossing.moved), None),
        ]  # fmt: skip
        for cost in crossing.passes:
            time = seconds_text(cost.seconds) if cost.seconds else NOTHING
            cells.append((NOTHING if cost.name == "none" else escape(cost.name), None))
            cells += [(bytes_text(cost.bytes) if cost.bytes else NOTHING, cost.bytes), (time, cost.seconds or 0)]
        return [*cells, (self.reason(crossing.origin), None)]

    def told(self, crossing: DrawnReshard) -> str:
        """What is told of a chosen collective."""
        times = f" × {crossing.count}" if crossing.count > 1 else ""
        name = f"<b>{escape((crossing.module or 'the model') + times)}</b>"
        moved = f"{crossing.way} {crossing.path} {crossing.whole}: {crossing.moved}"
        lines = "<br>".join(map(escape, pass_lines(crossing))) or "nothing is sent"
        return f'{name}<br>{escape(moved)}<br><span class="num">{lines}</span><br>{self.reason(crossing.origin, True)}'

    def modules(self) -> str:
        """The table of modules and parameters."""
        body: list[str] = []
        for box in self.picture.walk():
            held = [parameter_text(name, parameter, self.picture.size) for name, parameter in box.parameters]
            sizes = sum(parameter.local_bytes for _, parameter in box.parameters) * box.count
            cells: list[Cell] = [
                (escape(box.full_name or box_title(box)), None), (str(box.count), box.count), (escape(box.kind), None),
                (escape(box.style) or NOTHING, None), (_edges(box), None),
                ("<br>".join(map(escape, held)) or NOTHING, None),
                (bytes_text(sizes) if sizes else NOTHING, sizes), (self.reason(box.origin), None),
            ]  # fmt: skip
            body.append(html_row(cells))
        headings = ("module", "×", "class", "style", "in → out", "parameters", "bytes of a rank", "why")
        return html_table("Modules and parameters", "modules", headings, body)

    def notes(self) -> Iterator[str]:
        """Warnings, guesses, and what the signs mean."""
        if self.program.diagnostics:
            yield "<h2>Findings</h2>"
            yield "".join(f"<p>{escape(found.headline)}</p>" for found in self.program.diagnostics)
        yield f"<h2>Signs</h2><p>{escape(_LEGEND)}</p>"
        if self.cost is not None and self.cluster is not None:
            yield f"<p>Times are estimates for {escape(self.cluster.title)}.</p>"
            yield "".join(f"<p>A guess: {escape(guess)}.</p>" for guess in self.cost.guesses)

    def line(self, origin: str) -> str:
        """The id of the plan's line that a reason names; empty if it names none that is shown."""
        for name, lines in self.plans.items():
            number = re.search(rf"(?<![^\s(]){re.escape(name)}:(\d+)", origin)
            if number is not None and 0 < int(number[1]) <= len(lines):
                return f"{self.files[name]}-{number[1]}"
        return ""

    def reason(self, origin: str, whole: bool = False) -> str:
        """The reason, as a link to the plan's line; with its text if `whole`."""
        line = self.line(origin)
        text = escape(origin) or NOTHING
        if not line:
            return text
        file, _, number = line.partition("-")
        name = next(name for name, key in self.files.items() if key == file)
        shown = f"<br><code>{escape(self.plans[name][int(number) - 1].strip())}</code>" if whole else ""
        return f'<a href="#{line}">{text}</a>{shown}'


def _slice(held: TimeSlice, end: float, key: str | None) -> str:
    """A kernel or collective on its stream; one of the diagram's is a button."""
    top = 20 if held.stream == "compute" else 46
    way = "backward" if held.backward else "forward"
    hidden = f", {seconds_text(held.hidden)} of it beside products" if held.hidden > 0 else ""
    told = f"{held.module} {held.name}, {way}: {seconds_text(held.seconds)}{hidden}, {bytes_text(held.bytes)}"
    label = escape(told)
    acts = f' data-to="{key}" role="button" tabindex="0" aria-label="{label}"' if key else ""
    kind = f"{held.stream} {way}"
    return (
        f'<rect class="{kind}" x="{100 * held.start / end:.3f}%" y="{top}" '
        f'width="{100 * held.seconds / end:.3f}%" height="22"{acts}><title>{label}</title></rect>'
    )


def _edges(box: ModuleBox) -> str:
    known = box.entering or box.leaving
    return escape(f"{box.entering or NOTHING} → {box.leaving or NOTHING}") if known else NOTHING


__all__ = ["html_page"]
