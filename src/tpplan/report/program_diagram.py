"""The picture of a program as SVG, and as Mermaid.

in:  a `Picture`
out: text; whatever names the model or the plan has, they are escaped

The SVG is as wide as a phone. A collective is a button in it, with the key of its crossing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape as _escape

from tpplan.report.estimate_tables import seconds_text
from tpplan.report.program_picture import DrawnReshard, ModuleBox, PassCost, Picture, parameter_text
from tpplan.report.quantities import bytes_text

STYLE = """\
.tp text{font:10.5px ui-monospace,Menlo,Consolas,monospace;fill:#24292f;fill:var(--ink)}
.tp .box{fill:#fff;fill:var(--box);stroke:#afb8c1;stroke:var(--line)}
.tp .block{fill:#eef2ff;fill:var(--block);stroke:#6478d3;stroke:var(--accent);stroke-width:1.5}
.tp .name{font-weight:700}.tp .quiet{fill:#57606a;fill:var(--quiet)}
.tp .edge{fill:#3b4fb0;fill:var(--accent)}
.tp .c rect{fill:#ffe2b8;fill:var(--send);stroke:#b35900;stroke:var(--sends)}
.tp .c.local rect{fill:#e6e9ec;fill:var(--local);stroke:#8c959f;stroke:var(--line)}
"""
_COLORS = """\
.tp{--ink:#24292f;--box:#fff;--line:#afb8c1;--block:#eef2ff;--accent:#3b4fb0;--quiet:#57606a;--send:#ffe2b8;
--sends:#b35900;--local:#e6e9ec}
@media(prefers-color-scheme:dark){.tp{--ink:#e6edf3;--box:#161b22;--line:#4c5561;--block:#171d33;--accent:#9db0ff;
--quiet:#9aa4af;--send:#4a3210;--sends:#e0973d;--local:#2a3038}}
"""
_WIDTH, _INSET, _LINE, _GAP, _CHARACTER = 360, 8, 15, 7, 6.4
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]+")
_UNSAFE = re.compile(r"[^\w\s.,:()→·∂×+/-]")


def svg(picture: Picture, *, alone: bool = True) -> str:
    """The diagram as SVG.

    Args:
        picture: what to draw.
        alone: whether it is a file of its own, with its colours; a page has them itself.
    """
    canvas = _Canvas(picture.size)
    bottom = canvas.stack(picture.boxes, _INSET, _INSET, _WIDTH - 2 * _INSET)
    style = f"<style>{_COLORS}{STYLE}</style>" if alone else ""
    head = f'<svg class="tp" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom}"'
    size = f' width="{_WIDTH}" height="{bottom}"' if alone else ' role="group"'
    title = f"<title>{escape(picture.title)}</title>"
    return "\n".join([f"{head}{size}>", title + style, *canvas.parts, "</svg>"])


def mermaid(picture: Picture) -> str:
    """The same as a Mermaid flowchart."""
    lines = ["flowchart TD"]
    _mermaid_boxes(picture.boxes, lines, "  ", picture.size, iter(range(1_000_000_000)))
    return "\n".join([*lines, "  classDef sends fill:#ffe2b8,stroke:#b35900,color:#24292f"])


def escape(text: str) -> str:
    """Text as HTML and XML show it, in which control characters are blanks."""
    return _escape(_CONTROL.sub(" ", text))


def cost_text(way: str, cost: PassCost) -> str:
    """`backward all-reduce 28.0 MiB 142.5 µs`; without numbers where nothing is sent."""
    time = f" {seconds_text(cost.seconds)}" if cost.bytes and cost.seconds is not None else ""
    return f"{way} {cost.name}" + (f" {bytes_text(cost.bytes)}{time}" if cost.bytes else "")


def pass_lines(crossing: DrawnReshard) -> Iterator[str]:
    """A line for the forward and one for the backward, where anything happens."""
    for way, cost in zip(("forward", "backward"), crossing.passes, strict=True):
        if cost.name != "none":
            yield cost_text(way, cost)


def box_title(box: ModuleBox) -> str:
    """`self_attn`, or `model.layers.* × 32`."""
    return f"{box.name} × {box.count}" if box.is_block and box.count > 1 else box.name


class _Canvas:
    """Draws boxes below one another, and knows how far down it is."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[str] = []
        self.last = (0.0, 0.0, "")  # where an arrow may end that the next box's would repeat

    def stack(self, boxes: tuple[ModuleBox, ...], x: float, y: float, width: float) -> float:
        """Draw boxes from `y` on; returns where the last one ends, with a gap."""
        for box in boxes:
            y = self.box(box, x, y, width)
        return y

    def box(self, box: ModuleBox, x: float, y: float, width: float) -> float:
        """Draw a box with what is at its edges and in it."""
        for crossing in box.crossings:
            if crossing.way == "in":
                y = self.crossing(crossing, x, y, width)
        if not any(c.way == "in" for c in box.crossings) and self.last != (x, y, box.entering):
            y = self.edge(box.entering, x, y, width)
        top, place = y, len(self.parts)
        y = self.text(
            box_title(box), x + 6, y + _LINE - 3, width - 12, "name", f"{box.full_name}: {box.kind}", box.style
        )
        for name, parameter in box.parameters:
            y = self.text(parameter_text(name, parameter, self.size), x + 6, y, width - 12, "quiet")
        y -= 6
        for crossing in box.crossings:
            if crossing.way == "mid":
                y = self.crossing(crossing, x + _INSET, y + _GAP, width - 2 * _INSET)
        if box.inside:
            y = self.stack(box.inside, x + _INSET, y + _GAP, width - 2 * _INSET)
        kind = "block" if box.is_block else "box"
        self.parts.insert(
            place, f'<rect class="{kind}" x="{x}" y="{top}" width="{width}" height="{y - top:g}" rx="5"/>'
        )
        outs = [crossing for crossing in box.crossings if crossing.way == "out"]
        for crossing in outs:
            y = self.crossing(crossing, x, y, width)
        y = y if outs else self.edge(box.leaving, x, y, width)
        self.last = (x, y, box.leaving)
        return y

    def edge(self, placement: str, x: float, y: float, width: float) -> float:
        """An arrow with the placement beside it; nothing where that isn't known."""
        if not placement:
            return y
        middle = x + width / 2
        self.parts.append(f'<path class="edge" d="M{middle:g} {y + 17:g}l-3-5h2.2v-10h1.6v10h2.2z"/>')
        self.text(placement, middle + 8, y + 14, width / 2 - 8, "edge")
        return y + 18

    def crossing(self, crossing: DrawnReshard, x: float, y: float, width: float) -> float:
        """Its placement before, the collectives as a button, its placement after."""
        y = y if self.last == (x, y, crossing.source) else self.edge(crossing.source, x, y, width)
        lines = list(pass_lines(crossing)) or ["nothing is sent"]
        sends = any(cost.bytes for cost in crossing.passes)
        height = _LINE * len(lines) + 4
        label = escape(f"{crossing.module} {crossing.way} {crossing.path}: {'; '.join(lines)}; {crossing.origin}")
        kind = "c" if sends else "c local"
        self.parts.append(
            f'<g class="{kind}" data-to="{crossing.key}" role="button" tabindex="0" aria-label="{label}">'
        )
        self.parts.append(f"<title>{label}</title>")
        self.parts.append(f'<rect x="{x + 3:g}" y="{y}" width="{width - 6:g}" height="{height}" rx="8"/>')
        for number, line in enumerate(lines):
            self.text(line, x + 10, y + _LINE * (number + 1) - 3, width - 20, "")
        self.parts.append("</g>")
        return self.edge(crossing.target, x, y + height, width)

    def text(
        self, text: str, x: float, y: float, width: float, kind: str, more: str = "", beside: str = ""
    ) -> float:  # fmt: skip
        """A line, cut where there is no room; `more` is shown on hovering, `beside` on the right."""
        room = int(width / _CHARACTER) - (len(beside) + 1 if beside else 0)
        cut = text if len(text) <= room else f"{text[: max(room - 1, 1)]}…"
        title = f"<title>{escape(more or text)}</title>" if more or cut != text else ""
        kind = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text{kind} x="{x:g}" y="{y:g}">{title}{escape(cut)}</text>')
        if beside:
            self.parts.append(
                f'<text class="quiet" text-anchor="end" x="{x + width:g}" y="{y:g}">{escape(beside)}</text>'
            )
        return y + _LINE


def _mermaid_boxes(
    boxes: tuple[ModuleBox, ...], lines: list[str], indent: str, size: int, numbers: Iterator[int]
) -> str:
    """Write boxes below one another; returns the id of the first."""
    before = first = ""
    for box in boxes:
        key = f"n{next(numbers)}"
        text = " ".join(filter(None, (box_title(box), box.style)))
        label = [text, *(parameter_text(name, p, size) for name, p in box.parameters)]
        if box.inside:
            lines.append(f'{indent}subgraph {key}["{_mermaid_text(label)}"]')
            _mermaid_boxes(box.inside, lines, f"{indent}  ", size, numbers)
            lines.append(f"{indent}end")
        else:
            edges = [f"in {box.entering}", f"out {box.leaving}"] if box.entering or box.leaving else []
            lines.append(f'{indent}{key}["{_mermaid_text([*label, *edges])}"]')
        start = end = key
        for crossing in box.crossings:
            lines.append(f'{indent}{crossing.key}{{{{"{_mermaid_text([*pass_lines(crossing)] or ["local"])}"}}}}')
            lines.append(f"{indent}class {crossing.key} sends")
            if crossing.way == "out":
                lines.append(f'{indent}{end} -->|"{_mermaid_text([crossing.source])}"| {crossing.key}')
                end = crossing.key
            else:
                lines.append(f'{indent}{crossing.key} -->|"{_mermaid_text([crossing.target])}"| {key}')
                start = crossing.key if start == key else start
        if before:
            lines.append(f"{indent}{before} ~~~ {start}")
        before, first = end, first or start
    return first


def _mermaid_text(lines: list[str]) -> str:
    return "<br/>".join(_UNSAFE.sub(lambda found: f"#{ord(found[0])};", " ".join(line.split())) for line in lines)


__all__ = ["STYLE", "box_title", "cost_text", "escape", "mermaid", "pass_lines", "svg"]
