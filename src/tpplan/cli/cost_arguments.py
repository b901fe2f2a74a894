"""`--gpu` and what goes with it: the estimate that commands show beside a program."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tpplan.cli.advise import add_gpu_arguments
from tpplan.cli.arguments import positive

if TYPE_CHECKING:
    from tpplan.compiler.ir.program import Program
    from tpplan.cost.estimates import Estimate


def add_cost_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:  # pyright: ignore
    """Add `--gpu`, `--topology`, and what an estimate takes beside a program; returns the group."""
    add_gpu_arguments(parser, gpu=None)
    group = parser.add_argument_group("with --gpu or --topology")
    group.add_argument("--optimizer", default="adamw", metavar="NAME", help="the optimizer (default: adamw)")
    group.add_argument(
        "--checkpointing", default="none", metavar="KIND", help="of activations: none, selective or full"
    )
    group.add_argument("--dp", type=positive, default=1, metavar="N", help="replicas of the plan's ranks (default: 1)")
    group.add_argument("--fsdp", action="store_true", help="replicas share parameters, gradients and optimizer state")
    return group


def check_costs(arguments: argparse.Namespace) -> None:
    """Look at what is asked for by name, before anything is compiled."""
    if is_priced(arguments):
        from tpplan.cost.asked_costs import asked_cluster

        asked_cluster(arguments.gpu, arguments.topology, arguments.optimizer, arguments.checkpointing)


def is_priced(arguments: argparse.Namespace) -> bool:
    """Whether there is a GPU to tell costs for."""
    return arguments.gpu is not None or arguments.topology is not None


def cost_of(arguments: argparse.Namespace, program: Program) -> Estimate | None:
    """What a program costs on `--gpu` or `--topology`; None if neither is given."""
    if not is_priced(arguments):
        return None
    from tpplan.forecast.estimate import estimate

    return estimate(
        program, arguments.gpu or "h100", optimizer=arguments.optimizer, checkpointing=arguments.checkpointing,
        dp=arguments.dp, fsdp=arguments.fsdp, topology=arguments.topology,
    )  # fmt: skip


__all__ = ["add_cost_arguments", "check_costs", "cost_of", "is_priced"]
