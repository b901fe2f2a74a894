"""`tpplan explain --inference`: what a plan costs where nothing is trained."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tpplan.cli.arguments import terminal_width
from tpplan.cli.compile_model import model_and_inputs, ranks_of, usual_sizes
from tpplan.cli.exit_codes import CLEAN

if TYPE_CHECKING:
    from tpplan.plan import Plan


def show_inference(arguments: argparse.Namespace, plan: Plan | str) -> int:
    """Print the costs of inference as text or JSON; findings that keep the plan from compiling are raised."""
    from tpplan.asked import plan_of
    from tpplan.calls.inference_cost import inference
    from tpplan.report.diagnostics import wants_color
    from tpplan.report.inference_tables import inference_json, render_inference
    from tpplan.report.quantities import encodable
    from tpplan.served import served

    model, inputs = model_and_inputs(arguments, sized=False)
    sizes = {} if inputs is not None else usual_sizes(arguments, model)
    chosen, _ = plan_of(plan, model, ranks_of(arguments), inputs)
    inner = served(model, chosen, ranks_of(arguments), inputs, partial=arguments.partial, **sizes)
    view = inference(inner.model, inner.plan, ranks_of(arguments), *inner.call)
    if arguments.format == "json":
        print(inference_json(view))
    else:
        text = render_inference(view, width=terminal_width(), color=wants_color(sys.stdout))
        print(encodable(text, sys.stdout.encoding))
    return CLEAN
