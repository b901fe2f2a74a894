"""`tpplan explain`: show what a plan makes of a model."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from tpplan.cli.arguments import (
    AUTO_HELP,
    PICTURES,
    add_command,
    add_model_arguments,
    add_text_format_argument,
    terminal_width,
)
from tpplan.cli.compile_model import compile_for, model_and_inputs, plan_named
from tpplan.cli.cost_arguments import add_cost_arguments, check_costs, cost_of, is_priced, print_cost
from tpplan.cli.exit_codes import CLEAN, UsageError
from tpplan.cli.explain_kernels import tell_of_kernels, where_it_pays

if TYPE_CHECKING:
    from torch import nn

    from tpplan.cli.arguments import Subparsers
    from tpplan.compiler.ir.program import Program
    from tpplan.cost.estimates import Estimate
    from tpplan.plan import Pattern

_EXAMPLES = """\
  tpplan explain llama --model hf:llama --tp 8
  tpplan explain llama --model hf:llama --tp 8 --batch 1 --sequence 4096
  tpplan explain llama --model hf:llama --tp 8 model.layers.0.self_attn     why it is so
  tpplan explain llama --model hf:llama --tp 8 'model.layers.*.mlp'         equal layers once
  tpplan explain llama --model hf:llama --tp 8 --format json > program.json
  tpplan explain llama --model Llama-3.2-1B --tp 8 --inference --batch 4 --sequence 8192
  tpplan explain llama --model hf:llama --tp 8 --premises                   what later calls must have
  tpplan explain llama --model hf:llama --tp 8 --gpu h100 --dp 8            memory and time of a step
  tpplan explain llama --model hf:llama --tp 8 model.layers.0.mlp --why    and what the next best choices are
  tpplan explain llama --model hf:llama --tp 8 --format html > llama.html   a page with a diagram and tables
"""


def register(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        subparsers,
        "explain",
        help="show what a plan makes of a model",
        description="Show what each module becomes, every collective, its bytes, the memory of a rank, and why.",
        examples=_EXAMPLES,
    )
    parser.add_argument("plan", metavar="PLAN", help=AUTO_HELP)
    parser.add_argument(
        "module", nargs="?", metavar="MODULE", help="why this module, or those of a pattern, became what they did"
    )
    whole = "the whole program as JSON, a page of HTML, or the diagram alone; rich is text"
    add_text_format_argument(parser, whole, *PICTURES, "rich")
    parser.add_argument(
        "--why", action="store_true",
        help="with MODULE, also the next best of each placement that the plan leaves open, and what more it takes",
    )  # fmt: skip
    parser.add_argument(
        "--inference",
        action="store_true",
        help="show a rank's parameters, its cache for --batch prompts of --sequence tokens (default: 1 of 4096), and a "
        "forward without gradients",
    )
    parser.add_argument(
        "--premises",
        action="store_true",
        help="show what the proof stands on: the arguments, sizes, modes and numbers of a call that runs by it",
    )
    group = add_cost_arguments(parser)
    group.add_argument("--assumptions", action="store_true", help="show every number that the estimate rests on")
    add_model_arguments(parser, required=True, partial=True)
    _take_module_behind_options(parser)
    parser.set_defaults(run=run)


def _take_module_behind_options(parser: argparse.ArgumentParser) -> None:
    """Let MODULE stand last. By itself argparse gives an optional positional up at the first option (until 3.12)."""
    plain = parser.parse_known_args

    def parse(args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        parser.parse_known_args = plain
        try:
            return parser.parse_known_intermixed_args(args, namespace)
        finally:
            parser.parse_known_args = parse

    parser.parse_known_args = parse


def run(arguments: argparse.Namespace) -> int:
    """Compile the plan and print the program; findings that keep it from compiling are raised."""
    drawn = arguments.format in PICTURES
    if arguments.module is not None and (drawn or arguments.format == "json"):
        raise UsageError(f"--format {arguments.format} is the whole program; leave out MODULE")
    if drawn and (arguments.premises or arguments.inference):
        raise UsageError(f"--format {arguments.format} shows a step; leave out --premises and --inference")
    if arguments.module is not None and arguments.inference:
        raise UsageError("--inference is about the whole model; leave out MODULE")
    if arguments.premises and (arguments.module is not None or arguments.inference):
        raise UsageError("--premises are of the whole call; leave out MODULE and --inference")
    if is_priced(arguments) and (arguments.module is not None or arguments.premises):
        raise UsageError("--gpu is about a step of the whole model; leave out MODULE and --premises")
    if arguments.why and arguments.module is None:
        raise UsageError("--why is about a module; give MODULE")
    check_costs(arguments, drawn=arguments.format == "html")
    plan = plan_named(arguments.plan)
    if arguments.inference:
        from tpplan.cli.explain_inference import show_inference

        return show_inference(arguments, plan)
    if arguments.premises:
        from tpplan.cli.explain_premises import show_premises

        return show_premises(arguments, plan)
    wanted = _pattern(arguments.module) if arguments.module is not None else None
    model, inputs = model_and_inputs(arguments, priced=is_priced(arguments) or arguments.format == "html")
    if wanted is not None:
        _require_match(wanted, model)
    program = compile_for(arguments, plan, model, inputs)
    if drawn:
        from tpplan.cli.explain_page import show_page

        return show_page(arguments, plan, program)
    cost = cost_of(arguments, program)
    if arguments.format == "json":
        _print_json(program, cost)
    else:
        _print_text(program, wanted)
        if arguments.why and wanted is not None:
            from tpplan.cli.explain_choices import show_choices

            show_choices(arguments, plan, (model, inputs), wanted)
        tell_of_kernels(program)
        if cost is not None:
            print_cost(cost, arguments.assumptions)
    return CLEAN


def _pattern(text: str) -> Pattern:
    from tpplan.plan import Pattern, PatternError

    try:
        return Pattern.parse(text)
    except PatternError as error:
        raise UsageError(f"{text!r} is neither a module nor a pattern: {error.message}") from None


def _require_match(wanted: Pattern, model: nn.Module) -> None:
    from tpplan.plan.nearest import Suggestions

    names: list[str] = list(dict(model.named_modules()))  # pyright: ignore[reportUnknownArgumentType]
    if not any(wanted.matches(name) for name in names):
        raise UsageError(f"the model has no module `{wanted.text}`; {Suggestions(names).help_for(wanted)}")


def _print_json(program: Program, cost: Estimate | None) -> None:
    from tpplan.report.diagnostics import Format, render

    text = program.to_json()
    if cost is not None:
        text = json.dumps({**json.loads(text), "estimate": cost.to_dict()}, indent=2, sort_keys=True)
    print(text)
    findings = render(program.diagnostics, Format.CONCISE)
    if findings:
        print(findings, file=sys.stderr)


def _print_text(program: Program, wanted: Pattern | None) -> None:
    from tpplan.report.diagnostics import wants_color
    from tpplan.report.program_page import render_program
    from tpplan.report.program_why import render_why
    from tpplan.report.quantities import encodable

    color, width = wants_color(sys.stdout), terminal_width()
    if wanted is None:
        text = render_program(program, width=width, color=color, where_it_pays=where_it_pays)
    else:
        text = render_why(program, wanted, width=width, color=color)
    print(encodable(text, sys.stdout.encoding))
