"""A plot of communication against kernels over the degree of tensor parallelism, as SVG; docs/scaling.svg is one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from tpplan.cost.advice import Advice

_LEFT, _TOP, _WIDTH, _HEIGHT = 60, 40, 520, 280
_COLOURS = ("#0b6e99", "#d98e04", "#3a7d44", "#8c4a9e", "#7f7f7f")
Line = Sequence[tuple[int, float]]
"""Of degrees, from 1 on, the share of communication."""


def advice_svg(advice: Advice) -> str:
    """A line without sequence parallelism and one with it, of the rows that compile."""
    held = [(row, row.step) for row in advice if row.step is not None and not row.fsdp]
    shares = [(row, step.exposed_seconds / step.compute_seconds) for row, step in held]
    lines = {
        name: [(row.tp, share) for row, share in shares if row.sequence_parallel is split or row.tp == 1]
        for name, split in (("tensor parallel", False), ("and sequence parallel", True))
        if any(row.sequence_parallel is split for row, _ in shares)
    }
    size = f"{advice.batch} × {advice.sequence:,}"
    return shares_svg(lines, f": {advice.model} on {advice.gpus} {advice.gpu}, {size}")


def shares_svg(lines: Mapping[str, Line], about: str = "") -> str:
    """A line of each name; `about` ends the heading."""
    degrees = sorted({tp for line in lines.values() for tp, _ in line})
    peak = max([share for line in lines.values() for _, share in line], default=0) or 0.2
    each = math.ceil(peak / 2)  # fifths between two lines of the grid, of which there are ten at the most
    most = math.ceil(peak * 5 / each) * each / 5
    width = math.log2(degrees[-1] / degrees[0]) if len(degrees) > 1 else 1

    def at(tp: int, share: float) -> tuple[float, float]:
        across = math.log2(tp / degrees[0]) / width
        return round(_LEFT + across * _WIDTH, 1), round(_TOP + (1 - share / most) * _HEIGHT, 1)

    bottom = _TOP + _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 260} {bottom + 50}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">exposed communication, as a share of kernels{escape(about)}</text>',
        f'<text x="{_LEFT + _WIDTH / 2}" y="{bottom + 40}" text-anchor="middle">tensor parallel degree</text>',
    ]
    for step in range(0, round(most * 5) + 1, each):
        y = round(_TOP + (1 - step / 5 / most) * _HEIGHT, 1)
        parts.append(f'<path d="M{_LEFT} {y}h{_WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{step / 5:.0%}</text>')
    parts += [f'<text x="{at(tp, 0)[0]}" y="{bottom + 20}" text-anchor="middle">{tp}</text>' for tp in degrees]
    free = math.inf
    for place, (name, line) in sorted(enumerate(lines.items()), key=lambda held: held[1][1][-1][1]):
        points, colour = [at(*point) for point in line], _COLOURS[place % len(_COLOURS)]
        free = min(points[-1][1] + 4, free - 14)
        drawn = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points]
        parts.append(f'<text x="{_LEFT + _WIDTH + 10}" y="{free}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


__all__ = ["advice_svg", "shares_svg"]
