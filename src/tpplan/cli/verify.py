"""`tpplan verify`: prove that a sharded model computes the same."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tpplan.cli.arguments import add_command, add_model_arguments
from tpplan.cli.exit_codes import UsageError

if TYPE_CHECKING:
    from tpplan.cli.arguments import Subparsers

_EXAMPLES = """\
  tpplan verify llama --model hf:llama --tp 4 --set num_hidden_layers=2
"""


def register(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        subparsers,
        "verify",
        help="prove that a sharded model computes the same",
        description="Compare outputs and every gradient of the sharded program with those of the unsharded model.",
        examples=_EXAMPLES,
    )
    parser.add_argument("plan", metavar="PLAN", help="a plan file, or a shipped plan's name")
    add_model_arguments(parser, required=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    raise UsageError("this build doesn't have the command yet")
