"""The model that the command line names, its example inputs, and plans compiled for it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tpplan.cli.exit_codes import UsageError
from tpplan.cli.finding_options import PLACED
from tpplan.plan.vocabulary import AUTO
from tpplan.progress import doing

if TYPE_CHECKING:
    from torch import nn

    from tpplan.compiler.ir.program import Program
    from tpplan.plan import Diagnostic, Plan

DEFAULT_TP = 2


def ranks_of(arguments: argparse.Namespace) -> int:
    """The number of ranks: `--tp`, or its default."""
    return arguments.tp or DEFAULT_TP


def ranks_text(arguments: argparse.Namespace) -> str:
    """Every number of ranks that was asked for: `tp=2`, or `tp=2, tp=4`."""
    return ", ".join(f"tp={size}" for size in arguments.sizes or [DEFAULT_TP])


def plan_named(text: str) -> Plan | str:
    """The plan of a file or of a shipped plan's name; "auto" stays what it is, for one to be found for the model."""
    from tpplan.plan import load_plan

    return text if _is_to_be_found(text) else load_plan(text)


def plan_checked(text: str, model: str | None) -> tuple[Plan | str | None, list[Diagnostic]]:
    """As `plan_named`, with every finding about the plan in place of an error; without a model none can be found."""
    from tpplan.plan import check_plan

    if model is not None and _is_to_be_found(text):
        return text, []
    plan, findings = check_plan(text)
    return plan, [*findings]


def _is_to_be_found(text: str) -> bool:
    from tpplan.plan import find_plan

    return text == AUTO and find_plan(text) is None


def model_and_inputs(
    arguments: argparse.Namespace, *, sized: bool = True, priced: bool = False, **options: bool
) -> tuple[nn.Module, Any]:
    """The model of `--model` on `meta`, and example inputs; None to have these made up.

    Args:
        arguments: with those of `add_model_arguments`.
        sized: whether to make inputs where `--batch` or `--sequence` is given.
        priced: whether to make inputs of `usual_sizes`, and those of a step in training: labels, and no cache.
        options: further ones of `load_model`.

    Raises:
        PlanError: TP122, if there is no such model.
    """
    from tpplan.cli.model_reference import load_model

    sizes = {"batch": arguments.batch, "sequence": arguments.sequence} if sized and not priced else {}
    with doing("building the model"):
        model, inputs = load_model(arguments.model, dict(arguments.overrides), **sizes, **options)
        if priced and inputs is None:
            from tpplan.inputs import example_call, step_settings, with_labels

            _, made = example_call(model, ranks_of(arguments), **usual_sizes(arguments, model))
            inputs = {**step_settings(model, inference=False), **with_labels(model, made)}
        return model, inputs


def usual_sizes(arguments: argparse.Namespace, model: nn.Module) -> dict[str, int]:
    """What costs are told for, if nothing else is asked for: 4096 tokens, or what the model and the ranks can take."""
    from tpplan.inputs import usual_length

    ranks, longest = ranks_of(arguments), usual_length(model)
    return {"batch": arguments.batch or 1, "sequence": arguments.sequence or longest // ranks * ranks or longest}


def compile_for(
    arguments: argparse.Namespace, plan: Plan | str, model: nn.Module, inputs: Any, size: int | None = None
) -> Program:
    """The program of `plan` for a model on `size` ranks, or those of `--tp`; what keeps it from compiling is raised."""
    from tpplan.api import compile_plan

    options = {name: held for name in ("device", "partial") if (held := getattr(arguments, name, None))}
    return compile_plan(model, plan, tp=size or ranks_of(arguments), inputs=inputs, **options)


def findings_for(
    arguments: argparse.Namespace, plans: Iterable[Plan | str], model: nn.Module, inputs: Any
) -> list[Diagnostic]:
    """Compile each plan at each number of ranks; every finding, whether or not they compile."""
    from tpplan.plan import PlanError

    findings: list[Diagnostic] = []
    sizes = arguments.sizes or [DEFAULT_TP]
    for plan in plans:
        found: dict[Diagnostic, list[int]] = {}
        for size in sizes:
            try:
                diagnostics = compile_for(arguments, plan, model, inputs, size).diagnostics
            except PlanError as error:
                diagnostics = error.diagnostics
            for diagnostic in diagnostics:
                found.setdefault(diagnostic, []).append(size)
        findings += (_told(diagnostic, plan, sizes, met, arguments.format) for diagnostic, met in found.items())
    return findings


def _told(diagnostic: Diagnostic, plan: Plan | str, sizes: Sequence[int], met: Sequence[int], shown: str) -> Diagnostic:
    """A finding with the numbers of ranks at which it was met, if not at all, and with a place where one is wanted."""
    from tpplan.plan import Position, Span

    if len(met) < len(sizes):
        where = ", ".join(f"tp={size}" for size in met)
        diagnostic = replace(diagnostic, message=f"{diagnostic.message} (at {where})")
    if diagnostic.span is None and shown in PLACED and not isinstance(plan, str) and plan.sources:
        diagnostic = replace(diagnostic, span=Span(plan.sources[0], Position(1, 1), Position(1, 2)))
    return diagnostic


def refuse_model_options(arguments: argparse.Namespace) -> None:
    """Raise a `UsageError` for an option that says something about a model, where none is named."""
    options = {
        "--device": getattr(arguments, "device", None),
        "--partial": getattr(arguments, "partial", None),
        "--tp": arguments.tp,
        "--set": arguments.overrides,
        "--batch": arguments.batch,
    }
    for option, value in (options | {"--sequence": arguments.sequence}).items():
        if value:
            raise UsageError(f"{option} needs --model")
