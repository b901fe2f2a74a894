"""Compiling a plan for the model that the command line names."""

from __future__ import annotations

import argparse

from tpplan.plan import CompileError, Diagnostic, Plan

DEFAULT_TP = 2


def compile_for_arguments(plan: Plan, arguments: argparse.Namespace) -> list[Diagnostic]:
    """Compile `plan` for `--model`; every finding, whether or not it compiles."""
    from tpplan.api import compile_plan
    from tpplan.cli.model_reference import load_model

    try:
        model, inputs = load_model(
            arguments.model, dict(arguments.overrides), batch=arguments.batch, sequence=arguments.sequence
        )
        program = compile_plan(model, plan, tp=arguments.tp or DEFAULT_TP, inputs=inputs)
    except CompileError as error:
        return list(error.diagnostics)
    return list(program.diagnostics)
