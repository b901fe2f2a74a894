"""Compiling plans for the model that the command line names."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from tpplan.plan import Diagnostic, Plan, PlanError

DEFAULT_TP = 2


def compile_for_arguments(plans: Iterable[Plan], arguments: argparse.Namespace) -> list[Diagnostic]:
    """Compile each plan for `--model`; every finding, whether or not they compile."""
    from tpplan.api import compile_plan
    from tpplan.cli.model_reference import load_model

    sizes = {"batch": arguments.batch, "sequence": arguments.sequence}
    try:
        model, inputs = load_model(arguments.model, dict(arguments.overrides), **sizes)
    except PlanError as error:
        return list(error.diagnostics)
    findings: list[Diagnostic] = []
    for plan in plans:
        try:
            findings += compile_plan(model, plan, tp=arguments.tp or DEFAULT_TP, inputs=inputs).diagnostics
        except PlanError as error:
            findings += error.diagnostics
    return findings
