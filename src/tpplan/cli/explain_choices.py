"""`tpplan explain MODULE --why`: the next best of each placement that the plan leaves open, with its price."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from tpplan.cli.compile_model import ranks_of

if TYPE_CHECKING:
    from torch import nn

    from tpplan.forecast.runner_up import RunnerUp
    from tpplan.plan import Pattern, Plan


def show_choices(
    arguments: argparse.Namespace, plan: Plan | str, subject: tuple[nn.Module, Any], wanted: Pattern
) -> None:
    """Print a line for each end of a rule that no pin decides."""
    from tpplan.asked import plan_of
    from tpplan.forecast.runner_up import runners_up
    from tpplan.report.quantities import encodable
    from tpplan.served import served

    model, inputs = subject
    chosen, _ = plan_of(plan, model, ranks_of(arguments), inputs)
    inner = served(model, chosen, ranks_of(arguments), inputs, partial=arguments.partial)
    lines = [_line(found) for found in runners_up(inner, ranks_of(arguments), wanted)]
    head = "What the plan leaves open, and the next best, by a step's collectives on NVLink at 450 GB/s, 3 µs a step:"
    print("\n" + encodable("\n".join([head, *(lines or ["nothing"])]), sys.stdout.encoding))


def _line(found: RunnerUp) -> str:
    from tpplan.report.estimate_tables import seconds_text

    where = f"  {found.rule}, {found.end}: "
    if found.pin is None:
        why = next(iter(found.refused.values()), "")
        return f"{where}no other placement compiles{f' ({why})' if why else ''}"
    sign = "-" if found.seconds < 0 else "+"
    counted = ", ".join(f"{name} {times}" for name, times in sorted(found.collectives.items()))
    return f"{where}next is `{found.pin}`, {sign}{seconds_text(abs(found.seconds))} ({counted})"


__all__ = ["show_choices"]
