"""`tpplan plans`: the plans that ship with tpplan."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from tpplan.cli.arguments import add_command
from tpplan.cli.exit_codes import CLEAN, UsageError

if TYPE_CHECKING:
    from tpplan.cli.arguments import Subparsers

_SCHEMA_LINE = re.compile(r"\A# yaml-language-server:.*\n")  # of the schema beside the shipped plans
_EXAMPLES = """\
  tpplan plans                          all, with the models that they are for
  tpplan plans qwen                     those with `qwen` in their name or their model's
  tpplan plans 'llama*'                 a glob
  tpplan plans --show llama             the plan itself
"""


def register(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        subparsers,
        "plans",
        help="list the plans that ship with tpplan, or show one",
        description="List the plans that ship with tpplan, each with the model that it's for.",
        examples=_EXAMPLES,
    )
    parser.add_argument("pattern", nargs="?", metavar="PATTERN", help="a part of a name or of a model's, or a glob")
    parser.add_argument("--show", metavar="NAME", help="print a plan's file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the list, or one plan."""
    from tpplan.plan.shipped import shipped_help, shipped_plans
    from tpplan.plan.written import schema_comment

    if arguments.show is not None:
        if arguments.pattern is not None:
            raise UsageError("give a PATTERN or --show, not both")
        name = arguments.show.removesuffix(".yaml")
        found = next((plan for plan in shipped_plans() if plan.name == name), None)
        if found is None:
            raise UsageError(f"no plan `{arguments.show}` ships with tpplan; {shipped_help(arguments.show)}")
        text = found.path.read_text(encoding="utf-8")
        print(_SCHEMA_LINE.sub(lambda _: schema_comment(), text), end="")
        return CLEAN
    pattern: str = arguments.pattern or "*"
    listed = [plan for plan in shipped_plans() if plan.matches(pattern)]
    if not listed:
        raise UsageError(f"no shipped plan matches `{pattern}`; `tpplan plans` lists them all")
    widths = [max(len(plan.name) for plan in listed), max(len(plan.model) for plan in listed)]
    for plan in listed:
        print(f"{plan.name:<{widths[0]}}  {plan.model:<{widths[1]}}  {plan.summary}")
    return CLEAN
