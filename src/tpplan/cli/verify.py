"""`tpplan verify`: prove that a sharded model computes the same."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tpplan.cli.arguments import AUTO_HELP, add_command, add_model_arguments, add_text_format_argument, terminal_width
from tpplan.cli.compile_model import model_and_inputs, plan_named, ranks_of
from tpplan.cli.exit_codes import CLEAN, FINDINGS
from tpplan.progress import doing, tell

if TYPE_CHECKING:
    from tpplan.cli.arguments import Subparsers
    from tpplan.parity import ParityReport

_EXAMPLES = """\
  tpplan verify llama --model hf:llama --tp 4 --set num_hidden_layers=2 --set hidden_size=512
  tpplan verify my.yaml --model my_package.models:make_model --tp 2 4 --processes
  tpplan verify llama --model ./config.json --dtype float32 --format json

The model is run on made-up numbers, unsharded and sharded, forward and backward, on the CPU. Exit codes: 0 the sharded
model computes the same, 1 it diverges or the plan doesn't fit, 2 it couldn't be run.
"""
_DTYPES = ("float64", "float32", "bfloat16", "float16")


def register(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        subparsers,
        "verify",
        help="prove that a sharded model computes the same",
        description="Compare outputs and every gradient of the sharded program with those of the unsharded model.",
        examples=_EXAMPLES,
    )
    parser.add_argument("plan", metavar="PLAN", help=AUTO_HELP)
    parser.add_argument(
        "--processes", action="store_true", help="run a process for each rank, with gloo, instead of simulated ranks"
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        metavar="|".join(_DTYPES),
        help="what to compute in, whatever dtype the model has (default: float64, or float32 for models over 2 GiB)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and inputs (default: 0)")
    add_text_format_argument(parser, "the whole report as JSON")
    add_model_arguments(parser, required=True, partial=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify, and print the report; findings that keep the plan from compiling are raised."""
    plan = plan_named(arguments.plan)
    model, inputs = model_and_inputs(arguments, float32=True)

    import torch

    from tpplan.parity import verify

    with doing("verifying"):
        report = verify(
            model,
            plan,
            ranks_of(arguments),
            inputs,
            processes=arguments.processes,
            dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
            seed=arguments.seed,
            progress=tell,
            partial=arguments.partial,
        )
    _print(report, arguments.format)
    return CLEAN if report.ok else FINDINGS


def _print(report: ParityReport, chosen: str) -> None:
    if chosen == "json":
        import json

        print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
        return
    from tpplan.report.diagnostics import wants_color
    from tpplan.report.parity_tables import render_parity

    print(render_parity(report, width=terminal_width(40), color=wants_color(sys.stdout)))
