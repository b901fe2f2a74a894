"""`tpplan export`: write a plan in another library's words."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tpplan.cli.arguments import AUTO_HELP, add_command, add_model_arguments, add_output_argument
from tpplan.cli.compile_model import compile_for, model_and_inputs, plan_named, ranks_of, refuse_model_options
from tpplan.cli.exit_codes import CLEAN, UsageError

if TYPE_CHECKING:
    from tpplan.cli.arguments import Subparsers
    from tpplan.plan import Plan
    from tpplan.suggest import Exported

_EXAMPLES = """\
  tpplan export llama --to transformers --out tp_plan.json
  tpplan export my.yaml --to transformers --model ./checkpoint --tp 4

The file has `base_model_tp_plan`, for a config.json that transformers or vLLM's transformers backend reads, and
`tp_plan` with the whole model's names, for transformers' DistributedConfig(tp_plan=…). The compiled program is what is
exported; what no style of transformers does is an error. Without --model, a shipped plan is compiled for the
architecture whose name it has, and any other plan is exported word by word. `tpplan suggest --from-hf` is the way
back.
"""


def register(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        subparsers,
        "export",
        help="write a plan in another library's words",
        description="Write a plan as the tensor-parallel plan that another library reads.",
        examples=_EXAMPLES,
    )
    parser.add_argument("plan", metavar="PLAN", help=f"{AUTO_HELP} for --model")
    parser.add_argument("--to", choices=("transformers",), required=True, help="the library that is to read it")
    add_output_argument(parser, "it (default: standard output)", "-o", "--out")
    add_model_arguments(parser, required=False)
    parser.set_defaults(run=run, together=True)


def run(arguments: argparse.Namespace) -> int:
    """Write the plan; findings that keep it from being written are raised."""
    exported = _exported(arguments, plan_named(arguments.plan))
    if arguments.out is None:
        print(exported.to_json(), end="")
    else:
        try:
            arguments.out.write_text(exported.to_json(), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"can't write {arguments.out}: {error.strerror}") from None
        print(f"tpplan export: wrote {arguments.out}", file=sys.stderr)
    if exported.notes:
        from tpplan.report.diagnostics import render, wants_color

        print(render(exported.notes, color=wants_color(sys.stderr)), file=sys.stderr)
    return CLEAN


def _exported(arguments: argparse.Namespace, plan: Plan | str) -> Exported:
    if arguments.model is None:
        arguments.model = _architecture(arguments.plan)
    if arguments.model is None:
        refuse_model_options(arguments)
        from tpplan.plan import load_plan
        from tpplan.suggest import export_rules

        return export_rules(load_plan(plan) if isinstance(plan, str) else plan)  # none is found without a model
    model, inputs = model_and_inputs(arguments)
    from tpplan.suggest import export_program

    sizes = arguments.sizes or [ranks_of(arguments)]
    if isinstance(plan, str):
        from tpplan.api import suggest_plan

        plan = suggest_plan(model, max(sizes), inputs=inputs)
    whole = plan.with_whole_sequences()
    found = {n: export_program(compile_for(arguments, whole, model, inputs, n), plan, model) for n in sizes}
    first = found[sizes[0]]
    other = next((size for size in sizes if found[size].to_json() != first.to_json()), None)
    if other is not None:
        raise UsageError(f"at tp={other} the program needs other styles than at tp={sizes[0]}; export one at a time")
    return first


def _architecture(source: str) -> str | None:
    """The architecture that a shipped plan is named after."""
    from tpplan.hf.configs import known_types
    from tpplan.hf.library import UnusableError
    from tpplan.plan import shipped_plan_names

    kind = source.removesuffix("-sequence")
    if source not in shipped_plan_names() or Path(source).exists():
        return None
    try:
        return f"hf:{kind}" if kind in known_types() else None
    except UnusableError:
        return None
