"""`tpplan checkpoint`: what a checkpoint holds, and whether it would load."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from tpplan.cli.arguments import (
    AUTO_HELP,
    add_command,
    add_model_arguments,
    add_text_format_argument,
)
from tpplan.cli.compile_model import (
    compile_for,
    findings_for,
    model_and_inputs,
    plan_checked,
    plan_named,
    ranks_text,
    refuse_model_options,
)
from tpplan.cli.exit_codes import CLEAN, UsageError, exit_code
from tpplan.cli.finding_options import add_finding_arguments, show_findings

if TYPE_CHECKING:
    from torch import nn

    from tpplan.checkpoint.stored import Checkpoint
    from tpplan.cli.arguments import Subparsers
    from tpplan.compiler.ir.program import Program
    from tpplan.plan import Diagnostic, Plan

_T = TypeVar("_T")
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
_DEQUANTIZE = "read quantised weights as the numbers that they stand for"


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
    inspect = _add_action(
        inner,
        "inspect",
        run_inspect,
        help="show its tensors, dtypes and sizes, and what a rank reads under a plan",
        description="Show a checkpoint's tensors, dtypes and sizes; with a plan, the bytes that a rank reads.",
        examples=_INSPECT,
    )
    inspect.add_argument("--plan", metavar="PLAN", help=f"{AUTO_HELP}; needs --model")
    inspect.add_argument("--dequantize", action="store_true", help=_DEQUANTIZE)
    add_text_format_argument(inspect, "every tensor as JSON")
    add_model_arguments(inspect, required=False, partial=True)
    check = _add_action(
        inner,
        "check",
        run_check,
        help="say whether it would load into a model under a plan",
        description="Compile the plan, and compare the checkpoint with the model; every misfit at once.",
        examples=_CHECK,
    )
    check.set_defaults(together=True)
    check.add_argument("plan", metavar="PLAN", help=AUTO_HELP)
    check.add_argument("--dequantize", action="store_true", help=_DEQUANTIZE)
    add_finding_arguments(check)
    add_model_arguments(check, required=True, partial=True)


def _add_action(
    subparsers: Subparsers, name: str, run: Callable[[argparse.Namespace], int], **words: str
) -> argparse.ArgumentParser:
    """A command inside of this one, on the checkpoint at PATH."""
    parser = add_command(subparsers, name, **words)
    parser.add_argument("path", metavar="PATH", help="a folder, an index or a safetensors file")
    parser.set_defaults(run=run)
    return parser


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print the checkpoint's tensors; a checkpoint that can't be read is raised."""
    if (arguments.plan is None) != (arguments.model is None):
        raise UsageError("--plan and --model go together: they say what a rank reads")
    if arguments.model is None:
        refuse_model_options(arguments)
        if arguments.dequantize:
            raise UsageError("--dequantize goes with --plan and --model")
    from tpplan.checkpoint.files import find_checkpoint

    find_checkpoint(arguments.path)
    plan = None if arguments.plan is None else plan_named(arguments.plan)
    given = None if arguments.model is None else model_and_inputs(arguments)

    from tpplan.checkpoint.stored import read_checkpoint

    checkpoint = read_checkpoint(arguments.path)
    program: Program | None = None
    shares: Mapping[str, Sequence[int]] = {}
    if plan is not None and given is not None:
        plain = _as_asked(checkpoint, given[0], arguments)
        program = compile_for(arguments, plan, *given)
        shares = _shares(program, plain, given[0])
    from tpplan.cli.checkpoint_tables import as_json, as_text
    from tpplan.report.quantities import encodable

    if arguments.format == "json":
        print(as_json(checkpoint, shares))
    else:
        print(encodable(as_text(checkpoint, shares, program.size if program else 0), sys.stdout.encoding))
    for held in checkpoint.warnings:
        print(held.headline, file=sys.stderr)
    return CLEAN


def run_check(arguments: argparse.Namespace) -> int:
    """Print every finding about the plan, the model and the checkpoint; the exit code says whether it would load."""
    from tpplan.checkpoint.files import find_checkpoint
    from tpplan.cli.model_reference import named_model

    plan, findings = plan_checked(arguments.plan, arguments.model)
    _, unfound = _tried(lambda: find_checkpoint(arguments.path))
    _, unnamed = _tried(lambda: named_model(arguments.model))
    findings += [*unfound, *unnamed]
    if exit_code(findings) == CLEAN and plan is not None:
        findings += _misfits(arguments, plan)
    good = f"{arguments.path} would load into {arguments.model} at {ranks_text(arguments)}."
    return show_findings(findings, arguments, good)


def _misfits(arguments: argparse.Namespace, plan: Plan | str) -> list[Diagnostic]:
    from tpplan.checkpoint.stored import read_checkpoint

    checkpoint, findings = _tried(lambda: read_checkpoint(arguments.path))
    findings += () if checkpoint is None else checkpoint.warnings
    loaded, wrong = _tried(lambda: model_and_inputs(arguments))
    findings += wrong
    if loaded is None:
        return findings
    plain: Checkpoint | None = None
    if checkpoint is not None:
        plain, wrong = _tried(lambda: _as_asked(checkpoint, loaded[0], arguments))
        findings += wrong
    findings += findings_for(arguments, [plan], *loaded)
    return findings + ([] if plain is None else _compared(loaded[0], plain))


def _as_asked(checkpoint: Checkpoint, model: nn.Module, arguments: argparse.Namespace) -> Checkpoint:
    """The checkpoint as `tpplan.from_pretrained` reads it; the model gets the weights that stay quantised."""
    from tpplan.checkpoint.meter import Meter
    from tpplan.hf.quantised import as_plain, keep_quantised

    plain = as_plain(checkpoint, arguments.dequantize, Meter())
    keep_quantised(model, plain)
    return plain


def _tried(make: Callable[[], _T]) -> tuple[_T | None, list[Diagnostic]]:
    """What `make` gives, or what it finds wrong."""
    from tpplan.plan import PlanError

    try:
        return make(), []
    except PlanError as error:
        return None, list(error.diagnostics)


def _compared(model: nn.Module, checkpoint: Checkpoint) -> list[Diagnostic]:
    import torch

    from tpplan.checkpoint.buffers import make_buffers
    from tpplan.checkpoint.converted import by_model_names
    from tpplan.checkpoint.wanted import match
    from tpplan.runtime.parameters.taken_apart import taken_apart

    with taken_apart(model):
        tensors, wrong = by_model_names(model, checkpoint.tensors)
        _, without = make_buffers(model, torch.device("cpu"), strict=False)
        return [*(wrong or match(model, tensors, strict=True).findings), *without]


def _shares(program: Program, checkpoint: Checkpoint, model: nn.Module) -> Mapping[str, Sequence[int]]:
    from tpplan.checkpoint.converted import by_model_names
    from tpplan.checkpoint.share import bytes_by_rank
    from tpplan.runtime.parameters.taken_apart import taken_apart

    with taken_apart(model):
        return bytes_by_rank(program, by_model_names(model, checkpoint.tensors)[0], dict(model.named_buffers()))
