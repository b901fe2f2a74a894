"""`tpplan explain --premises`: what the proof of the example call stands on."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from tpplan.cli.arguments import terminal_width
from tpplan.cli.compile_model import model_and_inputs, ranks_of
from tpplan.cli.exit_codes import CLEAN

if TYPE_CHECKING:
    from tpplan.plan import Plan


def show_premises(arguments: argparse.Namespace, plan: Plan | str) -> int:
    """Print the premises as text or JSON; findings that keep the plan from compiling are raised."""
    from tpplan.asked import plan_of
    from tpplan.calls.premises import premises_of
    from tpplan.compiler.request import Request
    from tpplan.rehearsal.prove import prove
    from tpplan.report.diagnostics import wants_color
    from tpplan.report.premise_table import render_premises
    from tpplan.report.quantities import encodable
    from tpplan.served import served

    model, inputs = model_and_inputs(arguments)
    chosen, _ = plan_of(plan, model, ranks_of(arguments), inputs)
    inner = served(model, chosen, ranks_of(arguments), inputs, partial=arguments.partial)
    compiled = prove(Request(inner.model, inner.plan, ranks_of(arguments), *inner.call))
    found = premises_of(compiled, type(inner.model).forward, *inner.call)
    if arguments.format == "json":
        print(json.dumps([asdict(premise) for premise in found], indent=2))
    else:
        text = render_premises(found, width=terminal_width(), color=wants_color(sys.stdout))
        print(encodable(text, sys.stdout.encoding))
    return CLEAN
