"""The model that the command line names, its example inputs, and plans compiled for it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tpplan.cli.exit_codes import UsageError

if TYPE_CHECKING:
    from torch import nn

    from tpplan.compiler.ir.program import Program
    from tpplan.plan import Diagnostic, Plan

DEFAULT_TP = 2


def ranks_of(arguments: argparse.Namespace) -> int:
    """The number of ranks: `--tp`, or its default."""
    return arguments.tp or DEFAULT_TP


def model_and_inputs(arguments: argparse.Namespace, *, sized: bool = True, **options: bool) -> tuple[nn.Module, Any]:
    """The model of `--model` on `meta`, and example inputs; None to have these made up.

    Args:
        arguments: with those of `add_model_arguments`.
        sized: whether to make inputs where `--batch` or `--sequence` is given.
        options: further ones of `load_model`.

    Raises:
        PlanError: TP122, if there is no such model.
    """
    from tpplan.cli.model_reference import load_model

    sizes = {"batch": arguments.batch, "sequence": arguments.sequence} if sized else {}
    return load_model(arguments.model, dict(arguments.overrides), **sizes, **options)


def compile_for(arguments: argparse.Namespace, plan: Plan, model: nn.Module, inputs: Any) -> Program:
    """The program of `plan` for a model on the ranks of `--tp`; findings that keep it from compiling are raised."""
    from tpplan.api import compile_plan

    options = {"device": device} if (device := getattr(arguments, "device", None)) else {}
    return compile_plan(model, plan, tp=ranks_of(arguments), inputs=inputs, **options)


def findings_for(arguments: argparse.Namespace, plans: Iterable[Plan]) -> list[Diagnostic]:
    """Compile each plan for `--model`; every finding, whether or not they compile."""
    from tpplan.plan import PlanError

    try:
        model, inputs = model_and_inputs(arguments)
    except PlanError as error:
        return list(error.diagnostics)
    findings: list[Diagnostic] = []
    for plan in plans:
        try:
            findings += compile_for(arguments, plan, model, inputs).diagnostics
        except PlanError as error:
            findings += error.diagnostics
    return findings


def refuse_model_options(arguments: argparse.Namespace) -> None:
    """Raise a `UsageError` for an option that says something about a model, where none is named."""
    options = {
        "--device": getattr(arguments, "device", None),
        "--tp": arguments.tp,
        "--set": arguments.overrides,
        "--batch": arguments.batch,
    }
    for option, value in (options | {"--sequence": arguments.sequence}).items():
        if value:
            raise UsageError(f"{option} needs --model")
