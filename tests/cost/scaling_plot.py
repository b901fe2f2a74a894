"""docs/scaling.svg: communication against kernels, over the degree and the hidden size, from docs/scaling.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_LEFT, _TOP, _WIDTH, _HEIGHT = 60, 40, 520, 280
_COLOURS = ("#0b6e99", "#d98e04", "#3a7d44", "#8c4a9e", "#7f7f7f")
Line = Sequence[tuple[int, float]]
"""Of degrees, from 1 on, the share of communication."""


def svg(lines: Mapping[str, Line]) -> str:
    """A line of each model."""
    degrees = sorted({tp for line in lines.values() for tp, _ in line})
    most = math.ceil(max(share for line in lines.values() for _, share in line) * 5) / 5

    def at(tp: int, share: float) -> tuple[float, float]:
        across = math.log2(tp / degrees[0]) / math.log2(degrees[-1] / degrees[0])
        return round(_LEFT + across * _WIDTH, 1), round(_TOP + (1 - share / most) * _HEIGHT, 1)

    bottom = _TOP + _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 260} {bottom + 50}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">exposed communication, as a share of kernels</text>',
        f'<text x="{_LEFT + _WIDTH / 2}" y="{bottom + 40}" text-anchor="middle">tensor parallel degree</text>',
    ]
    for step in range(round(most * 5) + 1):
        _, y = at(degrees[0], step / 5)
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
        parts.append(f'<text x="{_LEFT + _WIDTH + 10}" y="{free}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])
