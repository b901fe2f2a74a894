"""`tpplan validate`: check plans by themselves, or against a model."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tpplan.cli.arguments import add_command, add_format_argument, add_model_arguments
from tpplan.cli.compile_model import findings_for, ranks_of, refuse_model_options
from tpplan.cli.exit_codes import CLEAN, exit_code

if TYPE_CHECKING:
    from tpplan.cli.arguments import Subparsers
    from tpplan.plan import Diagnostic, Plan

_EXAMPLES = """\
  tpplan validate plans/*.yaml                              each plan by itself; takes no torch
  tpplan validate llama --model hf:llama --tp 8             a shipped plan against an architecture
  tpplan validate my.yaml --model ./checkpoint --set num_hidden_layers=2
  tpplan validate my.yaml --model ./checkpoint --device cuda  as on a GPU, without one
  tpplan validate my.yaml --format github                   annotations in a GitHub workflow
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
    parser.add_argument("plans", nargs="+", metavar="PLAN", help="a plan file, a shipped plan's name, or - for stdin")
    add_format_argument(parser)
    add_model_arguments(parser, required=False)
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where the model will run, if it isn't the CPU: the sharded model runs there once on fake tensors, which "
        "takes no GPU",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check every plan; the exit code says whether any has errors."""
    from tpplan.plan import check_plan

    if arguments.model is None:
        refuse_model_options(arguments)
    diagnostics: list[Diagnostic] = []
    plans: list[Plan] = []
    for source in arguments.plans:
        plan, findings = check_plan(_standard_input() if source == "-" else source)
        diagnostics += findings
        if plan is not None:
            plans.append(plan)
    if plans and arguments.model is not None:
        diagnostics += findings_for(arguments, plans)
    unique = list(dict.fromkeys(diagnostics))
    _show(unique, arguments)
    return exit_code(unique)


def _standard_input() -> str:
    from tpplan.plan.yaml_source import MAX_BYTES

    # The line break makes it text rather than a path; bytes that aren't UTF-8 are for the reader to report.
    return sys.stdin.buffer.read(MAX_BYTES + 1).decode("utf-8", "surrogateescape") + "\n"


def _show(diagnostics: list[Diagnostic], arguments: argparse.Namespace) -> None:
    from tpplan.report.diagnostics import Format, render, summary, wants_color

    chosen = Format(arguments.format)
    text = render(diagnostics, chosen, color=wants_color(sys.stdout))
    if text:
        print(text)
    if chosen in (Format.FULL, Format.CONCISE):
        if text and chosen is Format.FULL:
            print()
        print(_closing_line(diagnostics, summary(diagnostics), arguments))


def _closing_line(diagnostics: list[Diagnostic], summary: str, arguments: argparse.Namespace) -> str:
    if exit_code(diagnostics) != CLEAN:
        return summary
    count = len(arguments.plans)
    valid = "The plan is valid" if count == 1 else f"All {count} plans are valid"
    against = f" for {arguments.model} at tp={ranks_of(arguments)}" if arguments.model else ""
    return f"{valid}{against}. {summary}" if diagnostics else f"{valid}{against}."
