"""`tpplan validate`: check plans by themselves, or against a model."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tpplan.cli.arguments import PLAN_HELP, add_command, add_model_arguments
from tpplan.cli.compile_model import findings_for, model_and_inputs, plan_checked, ranks_text, refuse_model_options
from tpplan.cli.finding_options import add_finding_arguments, show_findings

if TYPE_CHECKING:
    from tpplan.cli.arguments import Subparsers
    from tpplan.plan import Diagnostic, Plan

_EXAMPLES = """\
  tpplan validate plans/*.yaml                              each plan by itself; takes no torch
  tpplan validate llama --model hf:llama --tp 8             a shipped plan against an architecture
  tpplan validate my.yaml --model ./checkpoint --set num_hidden_layers=2
  tpplan validate my.yaml --model ./checkpoint --device cuda  as on a GPU, without one
  tpplan validate my.yaml --model ./checkpoint --tp 2 4 8   at several numbers of ranks
  tpplan validate my.yaml --format github --strict          annotations in a GitHub workflow; warnings fail
  tpplan validate - < my.yaml                               from standard input
"""


def register(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        subparsers,
        "validate",
        help="check plans by themselves, or against a model",
        description="Check plans, and report every finding at its place. With --model, compile them for that model.",
        examples=_EXAMPLES,
    )
    parser.add_argument("plans", nargs="+", metavar="PLAN", help=f"{PLAN_HELP}, auto, or - for stdin")
    add_finding_arguments(parser)
    add_model_arguments(parser, required=False, partial=True)
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where the model will run, if it isn't the CPU: the sharded model runs there once on fake tensors, which "
        "takes no GPU",
    )
    parser.set_defaults(run=run, together=True)


def run(arguments: argparse.Namespace) -> int:
    """Check every plan; the exit code says whether any has errors."""
    from tpplan.plan import PlanError

    if arguments.model is None:
        refuse_model_options(arguments)
    diagnostics: list[Diagnostic] = []
    plans: list[Plan | str] = []
    for source in arguments.plans:
        plan, findings = plan_checked(_standard_input() if source == "-" else source, arguments.model)
        diagnostics += findings
        if plan is not None:
            plans.append(plan)
    if plans and arguments.model is not None:
        try:
            diagnostics += findings_for(arguments, plans, *model_and_inputs(arguments))
        except PlanError as error:
            diagnostics += error.diagnostics
    count = len(arguments.plans)
    valid = "The plan is valid" if count == 1 else f"All {count} plans are valid"
    against = f" for {arguments.model} at {ranks_text(arguments)}" if arguments.model else ""
    return show_findings(diagnostics, arguments, f"{valid}{against}.")


def _standard_input() -> str:
    from tpplan.plan.yaml_source import MAX_BYTES

    # The line break makes it text rather than a path; bytes that aren't UTF-8 are for the reader to report.
    return sys.stdin.buffer.read(MAX_BYTES + 1).decode("utf-8", "surrogateescape") + "\n"
