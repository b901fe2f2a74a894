"""`tpplan explain --inference`: what a plan costs where nothing is trained."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from tpplan.cli.arguments import terminal_width
from tpplan.cli.compile_model import model_and_inputs, ranks_of, usual_sizes
from tpplan.cli.cost_arguments import cost_of, is_priced, print_cost
from tpplan.cli.exit_codes import CLEAN

if TYPE_CHECKING:
    from tpplan.cost.estimates import Estimate
    from tpplan.plan import Plan
    from tpplan.served import Served


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
    cost = _cost(arguments, inner)
    if arguments.format == "json":
        plain = inference_json(view)
        print(plain if cost is None else json.dumps({**json.loads(plain), "estimate": cost.to_dict()}, indent=2))
    else:
        text = render_inference(view, width=terminal_width(), color=wants_color(sys.stdout))
        print(encodable(text, sys.stdout.encoding))
        if cost is not None:
            print_cost(cost, arguments.assumptions)
    return CLEAN


def _cost(arguments: argparse.Namespace, inner: Served) -> Estimate | None:
    """What the prompt, and a token after it, take on `--gpu`, if that is given."""
    if not is_priced(arguments):
        return None
    from tpplan.compiler.request import Request
    from tpplan.forecast.degrees import measured_program
    from tpplan.inputs import step_settings

    keywords = {**step_settings(inner.model, inference=True), **inner.keywords}
    request = Request(inner.model, inner.plan, ranks_of(arguments), inner.arguments, keywords, training=False)
    return cost_of(arguments, measured_program(request))
