"""`--gpu` and what goes with it: options, the estimate that commands show beside a program, and tables of costs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from tpplan.cli.arguments import positive, terminal_width
from tpplan.cli.exit_codes import UsageError

if TYPE_CHECKING:
    from tpplan.compiler.ir.program import Program
    from tpplan.cost.estimates import Estimate


DEFAULT_GPU = "h100"


def add_gpu_arguments(parser: argparse.ArgumentParser, gpu: str | None) -> None:
    """Add `--gpu` and `--topology`."""
    default = f" (default: {gpu})" if gpu else ""
    parser.add_argument("--gpu", default=gpu, metavar="NAME", help=f"h100, h100-pcie, h200, a100 or b200{default}")
    parser.add_argument("--topology", metavar="FILE", help="a YAML file of GPUs and links, in place of --gpu")


def add_cost_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:  # pyright: ignore
    """Add `--gpu`, `--topology`, and what an estimate takes beside a program; returns the group."""
    add_gpu_arguments(parser, gpu=None)
    group = parser.add_argument_group("with --gpu or --topology")
    group.add_argument("--optimizer", metavar="NAME", help="the optimizer (default: adamw)")
    group.add_argument(
        "--checkpointing", metavar="KIND", help="of activations: none, selective or full (default: none)"
    )
    group.add_argument("--dp", type=positive, metavar="N", help="replicas of the plan's ranks (default: 1)")
    group.add_argument("--fsdp", action="store_true", help="replicas share parameters, gradients and optimizer state")
    return group


def check_costs(arguments: argparse.Namespace, *, drawn: bool = False) -> None:
    """Look at what is asked for by name, before anything is compiled; `drawn` has costs without `--gpu`, too."""
    usual = {"optimizer": "adamw", "checkpointing": "none", "dp": 1, "fsdp": False, "assumptions": False}
    for name, value in usual.items():
        if not drawn and not is_priced(arguments) and getattr(arguments, name, None):
            raise UsageError(f"--{name} is of an estimate, which takes --gpu or --topology")
        if (
            name in ("optimizer", "checkpointing", "fsdp")
            and getattr(arguments, name, None)
            and is_of_prompts(arguments)
        ):
            raise UsageError(f"--{name} is of training; leave out --inference")
        setattr(arguments, name, getattr(arguments, name, None) or value)
    if arguments.fsdp and arguments.dp == 1:
        raise UsageError("--fsdp lets replicas share their state, and there is one; say how many with --dp")
    if drawn or is_priced(arguments):
        from tpplan.cost.asked_costs import asked_cluster

        asked_cluster(arguments.gpu or DEFAULT_GPU, arguments.topology, arguments.optimizer, arguments.checkpointing)


def is_priced(arguments: argparse.Namespace) -> bool:
    """Whether there is a GPU to tell costs for."""
    return arguments.gpu is not None or arguments.topology is not None


def is_of_prompts(arguments: argparse.Namespace) -> bool:
    """Whether costs are those of generation."""
    return getattr(arguments, "inference", False)


def cost_of(arguments: argparse.Namespace, program: Program) -> Estimate | None:
    """What a program costs on `--gpu` or `--topology`; None if neither is given."""
    if not is_priced(arguments):
        return None
    from tpplan.forecast.estimate import estimate

    return estimate(
        program, arguments.gpu or DEFAULT_GPU, optimizer=arguments.optimizer, checkpointing=arguments.checkpointing,
        dp=arguments.dp, fsdp=arguments.fsdp, topology=arguments.topology, inference=is_of_prompts(arguments),
    )  # fmt: skip


def print_cost(cost: Estimate, assumptions: bool) -> None:
    """Print an estimate below what is told of a program."""
    from tpplan.report.diagnostics import wants_color
    from tpplan.report.estimate_tables import render_estimate
    from tpplan.report.quantities import encodable

    text = render_estimate(cost, terminal_width(), wants_color(sys.stdout), assumptions)
    print("\n" + encodable(text, sys.stdout.encoding))


def print_table(chosen: str, rich: Callable[[int, bool], str], **others: Callable[[], str]) -> None:
    """Print a table in the format that was chosen; for a terminal by its width, and whether it has colors."""
    from tpplan.report.diagnostics import wants_color
    from tpplan.report.quantities import encodable

    text = rich(terminal_width(), wants_color(sys.stdout)) if chosen == "rich" else others[chosen]()
    print(encodable(text, sys.stdout.encoding))


__all__ = [
    "add_cost_arguments",
    "add_gpu_arguments",
    "check_costs",
    "cost_of",
    "is_priced",
    "print_cost",
    "print_table",
]
