"""`tpplan schema`: print the JSON Schema of plan files."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tpplan.cli.arguments import add_command
from tpplan.cli.exit_codes import CLEAN

if TYPE_CHECKING:
    from tpplan.cli.arguments import Subparsers

_EXAMPLES = """\
  tpplan schema > plan.schema.json
  # and as the first line of plans beside it, for completion in an editor:
  # yaml-language-server: $schema=plan.schema.json
"""


def register(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        subparsers,
        "schema",
        help="print the JSON Schema of plan files",
        description="Print the JSON Schema of plan files, with which editors complete and check them.",
        examples=_EXAMPLES,
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the schema."""
    import json

    from tpplan.plan.plan_keys import json_schema

    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    return CLEAN
