"""`tpplan bench`: measure the overhead of a sharded model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tpplan.cli.arguments import add_command
from tpplan.cli.exit_codes import UsageError

if TYPE_CHECKING:
    from tpplan.cli.arguments import Subparsers

_EXAMPLES = """\
  tpplan bench
"""


def register(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        subparsers,
        "bench",
        help="measure the overhead of a sharded model",
        description="Measure a sharded model against the unsharded one and against parallelize_module.",
        examples=_EXAMPLES,
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    raise UsageError("this build doesn't have the command yet")
