"""`tpplan demo`: see it work in a minute, without a GPU."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tpplan.cli.arguments import add_command
from tpplan.cli.exit_codes import UsageError

if TYPE_CHECKING:
    from tpplan.cli.arguments import Subparsers

_EXAMPLES = """\
  tpplan demo
"""


def register(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        subparsers,
        "demo",
        help="see it work in a minute, without a GPU",
        description="Shard a small trained model over several processes on this machine, and compare the results.",
        examples=_EXAMPLES,
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    raise UsageError("this build doesn't have the command yet")
