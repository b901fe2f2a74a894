"""`tpplan advise`: which degrees of parallelism to take."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tpplan.cli.arguments import MODEL_HELP, add_command, override, positive
from tpplan.cli.cost_arguments import add_gpu_arguments, print_table
from tpplan.cli.exit_codes import CLEAN, UsageError
from tpplan.progress import doing

if TYPE_CHECKING:
    from tpplan.cli.arguments import Subparsers

_EXAMPLES = """\
  tpplan advise --model hf:llama --gpus 8 --set dtype=bfloat16
  tpplan advise --model Llama-3.1-70B --gpus 64 --gpu h200 --seq 8192
  tpplan advise --model Llama-3.1-70B --gpus 8 --inference --seq 8192 --batch 4
  tpplan advise --model Llama-3.1-8B --gpus 8 --target-memory 70GiB --format markdown
  tpplan advise --model Llama-3.1-8B --gpus 8 --format svg > shares.svg
"""


def register(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        subparsers,
        "advise",
        help="which degrees of parallelism to take for a model on given GPUs",
        description="Compile a model for each degree of tensor parallelism, estimate each, and recommend one.",
        examples=_EXAMPLES,
    )
    parser.add_argument("--model", metavar="REF", required=True, help=MODEL_HELP)
    parser.add_argument("--gpus", type=positive, metavar="N", required=True, help="how many GPUs there are")
    add_gpu_arguments(parser, gpu="h100")
    parser.add_argument(
        "--seq", "--sequence", dest="sequence", type=positive, metavar="S",
        help="tokens of each sequence (default: 4096, or as many as the model has positions for)",
    )  # fmt: skip
    parser.add_argument(
        "--batch",
        type=positive,
        metavar="B",
        help="sequences of a replica (default: 1, or those of the model's inputs)",
    )
    parser.add_argument("--inference", action="store_true", help="for generation after a prompt, not for training")
    parser.add_argument("--target-memory", metavar="SIZE", help="bytes that a rank may take, such as 70GiB")
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help="the optimizer (default: adamw)")
    parser.add_argument(
        "--set", dest="overrides", type=override, action="append", default=[], metavar="KEY=VALUE",
        help="override a field of the model's config; may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--format", choices=("rich", "json", "markdown", "svg"), default="rich", metavar="rich|json|markdown|svg",
        help="how the table is written; svg plots communication against kernels by degree (default: rich)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table; a choice that isn't possible is a row with its reason, and no error."""
    from tpplan.cli.model_reference import load_model
    from tpplan.cost.asked_costs import asked_cluster, bytes_of

    cluster = asked_cluster(arguments.gpu, arguments.topology, arguments.optimizer)
    try:
        target = None if arguments.target_memory is None else bytes_of(arguments.target_memory)
    except ValueError as error:
        raise UsageError(f"--target-memory: {error}") from None
    with doing("building the model"):
        model, inputs = load_model(arguments.model, dict(arguments.overrides))
    from tpplan.forecast.degrees import advise
    from tpplan.plan import ArgumentError
    from tpplan.report.estimate_tables import advice_markdown, render_advice
    from tpplan.report.shares_plot import advice_svg

    try:
        advice = advise(
            model, arguments.gpus, batch=arguments.batch, sequence=arguments.sequence,
            inference=arguments.inference, target_memory=target, optimizer=arguments.optimizer, topology=cluster,
            inputs=inputs,
        )  # fmt: skip
    except ArgumentError as error:  # of a size that the model's own inputs aren't of
        raise UsageError(str(error).removeprefix("advise: ")) from None
    print_table(
        arguments.format,
        json=advice.to_json,
        markdown=lambda: advice_markdown(advice),
        svg=lambda: advice_svg(advice),
        rich=lambda width, color: render_advice(advice, width, color),
    )
    return CLEAN


__all__ = ["register", "run"]
