"""`tpplan checkpoint`: what a checkpoint holds, and whether it would load."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tpplan.cli.arguments import add_command, add_format_argument, add_model_arguments
from tpplan.cli.exit_codes import CLEAN, UsageError, exit_code

if TYPE_CHECKING:
    from torch import nn

    from tpplan.checkpoint.stored import Checkpoint
    from tpplan.cli.arguments import Subparsers
    from tpplan.compiler.ir.program import Program
    from tpplan.plan import Diagnostic

_EXAMPLES = """\
  tpplan checkpoint inspect Llama-3.2-1B                                     its tensors
  tpplan checkpoint inspect Llama-3.2-1B --plan llama --model Llama-3.2-1B --tp 4
  tpplan checkpoint check Llama-3.2-1B llama --model Llama-3.2-1B --tp 4     would it load?
"""
_INSPECT = """\
  tpplan checkpoint inspect Llama-3.2-1B
  tpplan checkpoint inspect Llama-3.2-1B/model.safetensors --format json
  tpplan checkpoint inspect Llama-3.2-1B --plan llama --model Llama-3.2-1B --tp 4    bytes that a rank reads
"""
_CHECK = """\
  tpplan checkpoint check Llama-3.2-1B llama --model Llama-3.2-1B --tp 4
  tpplan checkpoint check out my.yaml --model my_package.models:make_model --tp 2 --format github

Headers are read, numbers aren't. Exit codes: 0 it would load, 1 it wouldn't, 2 there is no such model or plan.
"""


def register(subparsers: Subparsers) -> None:
    """Add the command, and those inside it, to the parser."""
    parser = add_command(
        subparsers,
        "checkpoint",
        help="show what a checkpoint holds, or whether it would load",
        description="Look at a checkpoint of safetensors files: their headers alone, no numbers.",
        examples=_EXAMPLES,
    )
    inner = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    inspect = add_command(
        inner,
        "inspect",
        help="show its tensors, dtypes and sizes, and what a rank reads under a plan",
        description="Show a checkpoint's tensors, dtypes and sizes; with a plan, the bytes that a rank reads.",
        examples=_INSPECT,
    )
    inspect.add_argument("path", metavar="PATH", help="a folder, an index or a safetensors file")
    inspect.add_argument("--plan", metavar="PLAN", help="a plan file, or a shipped plan's name; needs --model")
    inspect.add_argument(
        "--format",
        choices=("text", "json"),
        default="text",
        metavar="text|json",
        help="text for people, or every tensor as JSON (default: text)",
    )
    add_model_arguments(inspect, required=False)
    inspect.set_defaults(run=run_inspect)
    check = add_command(
        inner,
        "check",
        help="say whether it would load into a model under a plan",
        description="Compile the plan, and compare the checkpoint with the model; every misfit at once.",
        examples=_CHECK,
    )
    check.add_argument("path", metavar="PATH", help="a folder, an index or a safetensors file")
    check.add_argument("plan", metavar="PLAN", help="a plan file, or a shipped plan's name")
    add_format_argument(check)
    add_model_arguments(check, required=True)
    check.set_defaults(run=run_check)


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print the checkpoint's tensors; a checkpoint that can't be read is raised."""
    if (arguments.plan is None) != (arguments.model is None):
        raise UsageError("--plan and --model go together: they say what a rank reads")
    from tpplan.checkpoint.stored import read_checkpoint

    checkpoint = read_checkpoint(arguments.path)
    program = _compiled(arguments)[1] if arguments.plan is not None else None
    from tpplan.cli.checkpoint_tables import as_json, as_text
    from tpplan.report.quantities import encodable

    shares = _shares(program, checkpoint) if program is not None else {}
    if arguments.format == "json":
        print(as_json(checkpoint, shares))
    else:
        print(encodable(as_text(checkpoint, shares, program.size if program else 0), sys.stdout.encoding))
    for held in checkpoint.warnings:
        print(held.headline, file=sys.stderr)
    return CLEAN


def run_check(arguments: argparse.Namespace) -> int:
    """Print every finding about the plan, the model and the checkpoint; the exit code says whether it would load."""
    from tpplan.checkpoint.stored import read_checkpoint
    from tpplan.plan import PlanError

    findings: list[Diagnostic] = []
    model: nn.Module | None = None
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = read_checkpoint(arguments.path)
        findings += checkpoint.warnings
    except PlanError as error:
        findings += error.diagnostics
    try:
        model, program = _compiled(arguments)
        findings += program.diagnostics
    except PlanError as error:
        findings += error.diagnostics
        model = _model(arguments) if error.diagnostics[0].code != "TP122" else None
    if model is not None and checkpoint is not None:
        findings += _compared(model, checkpoint)
    _show(findings, arguments)
    return exit_code(findings)


def _compared(model: nn.Module, checkpoint: Checkpoint) -> list[Diagnostic]:
    import torch

    from tpplan.checkpoint.buffers import make_buffers
    from tpplan.checkpoint.wanted import match

    _, without = make_buffers(model, torch.device("cpu"), strict=False)
    return [*match(model, checkpoint.tensors, strict=True).findings, *without]


def _model(arguments: argparse.Namespace) -> nn.Module:
    from tpplan.cli.model_reference import load_model

    return load_model(arguments.model, dict(arguments.overrides))[0]


def _compiled(arguments: argparse.Namespace) -> tuple[nn.Module, Program]:
    from tpplan.plan import load_plan

    plan = load_plan(arguments.plan)
    from tpplan.api import compile_plan
    from tpplan.cli.compile_model import DEFAULT_TP
    from tpplan.cli.model_reference import load_model

    sizes = {"batch": arguments.batch, "sequence": arguments.sequence}
    model, inputs = load_model(arguments.model, dict(arguments.overrides), **sizes)
    return model, compile_plan(model, plan, tp=arguments.tp or DEFAULT_TP, inputs=inputs)


def _shares(program: Program, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    from tpplan.checkpoint.share import bytes_by_rank

    return bytes_by_rank(program, checkpoint.tensors)


def _show(findings: list[Diagnostic], arguments: argparse.Namespace) -> None:
    from tpplan.report.diagnostics import Format, render, summary, wants_color

    chosen = Format(arguments.format)
    text = render(findings, chosen, color=wants_color(sys.stdout))
    if text:
        print(text)
    if chosen in (Format.FULL, Format.CONCISE):
        if text and chosen is Format.FULL:
            print()
        good = f"{arguments.path} would load into {arguments.model} at tp={arguments.tp or 2}."
        print(" ".join([*([good] if exit_code(findings) == CLEAN else []), *([summary(findings)] if findings else [])]))
