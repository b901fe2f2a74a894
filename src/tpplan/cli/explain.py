"""`tpplan explain`: show what a plan makes of a model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tpplan.cli.arguments import add_command, add_model_arguments
from tpplan.cli.exit_codes import UsageError

if TYPE_CHECKING:
    from tpplan.cli.arguments import Subparsers

_EXAMPLES = """\
  tpplan explain llama --model hf:llama --tp 8
  tpplan explain llama --model hf:llama --tp 8 model.layers.0.self_attn
"""


def register(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        subparsers,
        "explain",
        help="show what a plan makes of a model",
        description="Show what each module becomes, every collective, its bytes, the memory of a rank, and why.",
        examples=_EXAMPLES,
    )
    parser.add_argument("plan", metavar="PLAN", help="a plan file, or a shipped plan's name")
    parser.add_argument("module", nargs="?", metavar="MODULE", help="only this module and what is inside it")
    add_model_arguments(parser, required=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    raise UsageError("this build doesn't have the command yet")
