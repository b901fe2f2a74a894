"""`tpplan diff`: what changes from one plan to another."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpplan.cli.arguments import add_command, add_model_arguments
from tpplan.cli.compile_model import compile_for, model_and_inputs, plan_named
from tpplan.cli.cost_arguments import add_cost_arguments, check_costs, cost_of, is_priced, print_table
from tpplan.cli.exit_codes import CLEAN, FINDINGS, UsageError

if TYPE_CHECKING:
    from tpplan.cli.arguments import Subparsers
    from tpplan.compiler.ir.program import Program
    from tpplan.report.program_compare import ComparedProgram

_HELP = "a plan file, a shipped plan's name, auto to have one found, or a file of `tpplan explain --format json`"
_EXAMPLES = """\
  tpplan diff llama llama-sequence --model hf:llama --tp 8
  tpplan diff old.yaml new.yaml --model ./config.json --tp 8 --gpu h100 --format markdown --exit-code
  tpplan diff before.json after.json

Exit codes: 0, or with --exit-code 1 where something got worse: more collectives, bytes, memory, time or warnings; 2 if
one of the two can't be read, or if they can't be compared.
"""


def register(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        subparsers,
        "diff",
        help="show what changes from one plan to another",
        description="Compare two plans for a model, or two programs: placements, collectives, bytes, memory, time.",
        examples=_EXAMPLES,
    )
    parser.add_argument("before", metavar="A", help=_HELP)
    parser.add_argument("after", metavar="B", help="likewise")
    parser.add_argument(
        "--format",
        choices=("rich", "json", "markdown"),
        default="rich",
        metavar="rich|json|markdown",
        help="text for people, data, or a comment for a pull request (default: rich)",
    )
    parser.add_argument("--exit-code", action="store_true", help="exit with 1 if something got worse")
    add_cost_arguments(parser)
    add_model_arguments(parser, required=False, partial=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the diff; findings that keep one of the two from compiling are raised."""
    check_costs(arguments)
    compared = _compared(arguments)
    from tpplan.report.diff_tables import diff_markdown, render_diff
    from tpplan.report.program_compare import compare

    diff = compare(*compared)
    print_table(
        arguments.format,
        json=diff.to_json,
        markdown=lambda: diff_markdown(diff),
        rich=lambda width, color: render_diff(diff, width, color),
    )
    return FINDINGS if arguments.exit_code and diff.worse else CLEAN


def _compared(arguments: argparse.Namespace) -> list[ComparedProgram]:
    names = (arguments.before, arguments.after)
    sources = [_program_data(name) or plan_named(name) for name in names]
    written = {i: _program(source, names[i]) for i, source in enumerate(sources) if isinstance(source, dict)}
    if len(written) == 2:
        _tell_unused(arguments)
    elif arguments.model is None:
        raise UsageError("a plan is compared for a model: name one with --model REF, or give two programs in JSON")
    elif arguments.tp is None and written:
        arguments.tp = next(iter(written.values())).size
    labelled = any("labels" in held.path for program in written.values() for held in program.inputs)
    priced = labelled if written else is_priced(arguments)
    called = model_and_inputs(arguments, priced=priced) if len(written) < 2 else ()
    programs = [written.get(i) or compile_for(arguments, plan, *called) for i, plan in enumerate(sources)]  # pyright: ignore
    from tpplan.report.program_compare import ComparedProgram

    return [
        ComparedProgram(
            name, program,
            None if isinstance(source, dict) and "diagnostics" not in source else program.diagnostics,
            _cost(arguments, program, name),
        )
        for name, source, program in zip(names, sources, programs, strict=True)
    ]  # fmt: skip


def _cost(arguments: argparse.Namespace, program: Program, name: str) -> Any:
    """The estimate, if a GPU is given; where a program carries no work, the error says which it is."""
    from tpplan.plan import TpplanError

    try:
        return cost_of(arguments, program)
    except TpplanError as error:
        if error.code != "TP222":
            raise
        raise type(error)(replace(found, subject=name) for found in error.diagnostics) from error


def _tell_unused(arguments: argparse.Namespace) -> None:
    """What says something about a model says nothing where both programs are given."""
    given = {"--model": arguments.model, "--tp": arguments.tp, "--set": arguments.overrides}
    given |= {"--batch": arguments.batch, "--sequence": arguments.sequence}
    unused = [option for option, value in given.items() if value]
    if unused:
        print(f"tpplan diff: both are programs, which need no {', '.join(unused)}", file=sys.stderr)


def _program_data(name: str) -> dict[str, Any] | None:
    """The JSON object of a program; None if `name` isn't a file of JSON, or if that is a plan.

    Raises:
        PlanError: TP230, it ends in `.json`, and is something else.
    """
    path = Path(name)
    try:
        data = path.read_bytes() if path.is_file() else b""
    except (OSError, ValueError):  # `load_plan` says what is wrong
        return None
    is_json = path.suffix == ".json" and bool(path.name)
    if not data or not (is_json or data.lstrip()[:1] == b"{"):
        return None
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError) as error:
        if is_json:
            raise _not_a_program(name, f"it isn't JSON: {error}") from None
        return None
    if isinstance(plain, dict) and ("extends" in plain or isinstance(plain.get("modules"), dict)):  # pyright: ignore
        return None
    if not isinstance(plain, dict) or not isinstance(plain.get("modules"), list):  # pyright: ignore
        raise _not_a_program(name, "it has no list of `modules`")
    return plain  # pyright: ignore[reportUnknownVariableType]


def _program(plain: dict[str, Any], name: str) -> Program:
    from tpplan.compiler.ir.program import Program

    try:
        return Program.from_dict(plain)
    except (ValueError, TypeError) as error:
        raise _not_a_program(name, _first_mistake(error)) from None


def _first_mistake(error: Exception) -> str:
    """The first of pydantic, with its place; or the text of another."""
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    first = errors(include_url=False, include_input=False)[0]
    return f"`{'.'.join(map(str, first['loc']))}`: {first['msg']}"


def _not_a_program(name: str, why: str) -> Exception:
    from tpplan.plan import PlanError

    return PlanError.of(
        "TP230", f"this isn't a program: {why}", subject=name,
        help="write one by `tpplan explain PLAN --model REF --tp N --format json`, of this version of tpplan",
    )  # fmt: skip


__all__ = ["register", "run"]
