"""The table that tutorials on tensor parallelism tell of one MLP, by the model: correctness, sharding, performance.

`python -m tests.cost.mlp_table` prints it. 4096 to 11008 to 4096, a batch of 16 × 128, on an H100: 7.59 ms on one GPU
and 3.99 ms on two (1.90 ×), about 3.5 × on four and 5 to 6 × on eight; weights of 360.7 MB, 180.4 MB on each of two.
Those are float32: two matrices of 4096 × 11008 take 360.7 MB at four bytes an entry, and 3.7e11 FLOPs in 7.59 ms are
49 TFLOP/s, which is three quarters of the 66.9 that an H100 has in float32, and a tenth of its 495 in TF32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tpplan
from tpplan.cost.estimates import Estimate

HIDDEN, INNER, BATCH, LENGTH = 4096, 11008, 16, 128
PLAN = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
TOLD = {1: (7.59, 1.0, 1.0), 2: (3.99, 1.9, 1.9), 4: (None, 3.5, 3.5), 8: (None, 5.0, 6.0)}


class TutorialMlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def estimates() -> dict[int, Estimate]:
    """A forward on 1, 2, 4 and 8 H100s."""
    with torch.device("meta"):
        model, x = TutorialMlp(HIDDEN, INNER), torch.empty(BATCH, LENGTH, HIDDEN)
    programs = {tp: tpplan.compile_plan(model, PLAN, tp, x) for tp in TOLD}
    return {tp: tpplan.estimate(program, "h100", inference=True) for tp, program in programs.items()}


def performance() -> str:
    found = estimates()
    lines = ["| GPUs | weights, MB | told, ms | estimated, ms | told | estimated |", "|---|---|---|---|---|---|"]
    for tp, cost in found.items():
        seconds = cost.step.total_seconds
        told, least, most = TOLD[tp]
        speedup = found[1].step.total_seconds / seconds
        shown = f"{least:g} ×" if least == most else f"{least:g} to {most:g} ×"
        weights = f"{cost.memory.parameters / 1e6:.1f}"
        lines.append(f"| {tp} | {weights} | {told or ''} | {seconds * 1e3:.2f} | {shown} | {speedup:.2f} × |")
    return "\n".join(lines)


def correctness() -> str:
    model, x = TutorialMlp(256, 688), torch.randn(2, 16, 256)
    found = {dtype: tpplan.verify(model, PLAN, 2, x, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    shown = ", ".join(f"{report.max_error:.2e} in {report.dtype}" for report in found.values() if report.ok)
    return f"largest relative error of two ranks, a sixteenth as wide: {shown}"


if __name__ == "__main__":
    print("correctness:", correctness())
    print(
        "sharding:   ",
        f"{HIDDEN * INNER * 8 / 1e6:.1f} MB of weights, {HIDDEN * INNER * 4 / 1e6:.1f} MB on each of two",
    )
    print("performance:")
    print(performance())
