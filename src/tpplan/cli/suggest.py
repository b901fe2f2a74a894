"""`tpplan suggest`: write a plan for a model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tpplan.cli.arguments import add_command, add_model_arguments
from tpplan.cli.exit_codes import UsageError

if TYPE_CHECKING:
    from tpplan.cli.arguments import Subparsers

_EXAMPLES = """\
  tpplan suggest --model hf:gpt2 --tp 4
  tpplan suggest --model ./checkpoint --tp 8 -o my.yaml
"""


def register(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        subparsers,
        "suggest",
        help="write a plan for a model",
        description="Find a plan for a model, prove it, and write it out.",
        examples=_EXAMPLES,
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write the plan (default: standard output)")
    add_model_arguments(parser, required=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    raise UsageError("this build doesn't have the command yet")
