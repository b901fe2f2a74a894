"""`tpplan suggest`: write a plan for a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpplan.cli.arguments import add_command, add_model_arguments, add_output_argument
from tpplan.cli.compile_model import compile_for, model_and_inputs, ranks_of
from tpplan.cli.exit_codes import CLEAN, FINDINGS, UsageError

if TYPE_CHECKING:
    from torch import nn

    from tpplan.cli.arguments import Subparsers

_EXAMPLES = """\
  tpplan suggest --model hf:llama --tp 8 -o llama.yaml
  tpplan suggest --model ./config.json --tp 4 --sequence-parallel
  tpplan suggest --model my_package.models:make_model --tp 2 4             a plan for both numbers of ranks
  tpplan suggest --model hf:qwen3 --from-hf                 the plan that the model brings along, in tpplan's words
  tpplan suggest --model ./checkpoint --from-deepspeed ds_config.json
  tpplan suggest --model hf:gpt2 --tp 4 | tpplan validate - --model hf:gpt2 --tp 4

Linear layers are paired by the flow of the data between them, not by their names, and the compiler proves the plan
before it is written. Comments say what is left whole, and why.
"""


def register(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        subparsers,
        "suggest",
        help="write a plan for a model",
        description="Find a plan for a model from the flow of its data, prove it, and write it with comments.",
        examples=_EXAMPLES,
    )
    add_output_argument(parser, "the plan (default: standard output)", "-o", "--output")
    parser.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="split the stream between the blocks along the sequence as well",
    )
    parser.add_argument(
        "--training",
        action="store_true",
        help="call the model with labels, so that the head's result stays split for the loss",
    )
    parser.add_argument(
        "--from-hf",
        action="store_true",
        help="write the plan that a transformers model brings along, in tpplan's words; it isn't proved; the exit code "
        "is 1 if a line has no counterpart",
    )
    parser.add_argument(
        "--from-deepspeed",
        metavar="FILE",
        type=Path,
        help="write what DeepSpeed's AutoTP config says, in tpplan's words; it isn't proved",
    )
    add_model_arguments(parser, required=True)
    parser.set_defaults(run=run, together=True)


def run(arguments: argparse.Namespace) -> int:
    """Write the plan; findings that keep one from being found are raised."""
    source = "--from-hf" if arguments.from_hf else "--from-deepspeed" if arguments.from_deepspeed else ""
    if source and arguments.sequence_parallel:
        raise UsageError(f"{source} writes the plan as it is; leave out --sequence-parallel")
    if arguments.from_hf and arguments.from_deepspeed:
        raise UsageError("--from-hf and --from-deepspeed are two plans; leave out one of them")
    if arguments.from_deepspeed and not arguments.from_deepspeed.is_file():
        raise UsageError(f"--from-deepspeed: there is no file {arguments.from_deepspeed}")
    model, inputs = model_and_inputs(arguments)
    text, left_out = _text(model, inputs, arguments)
    for line in left_out:
        print(f"tpplan suggest: left out: {line}", file=sys.stderr)
    code = FINDINGS if left_out else CLEAN
    if arguments.output is None:
        print(text, end="")
        return code
    from tpplan.plan.written import schema_comment

    text = text.replace(schema_comment(), schema_comment(arguments.output.parent), 1)
    try:
        arguments.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"can't write {arguments.output}: {error.strerror}") from None
    print(f"tpplan suggest: wrote {arguments.output}", file=sys.stderr)
    return code


def _text(model: nn.Module, inputs: Any, arguments: argparse.Namespace) -> tuple[str, Sequence[str]]:
    """The plan, and what of another library's plan it lacks."""
    from tpplan.asked import plan_name

    if arguments.from_hf:
        from tpplan.suggest import import_plan

        left_out: list[str] = []
        return import_plan(model, plan_name(model), left_out), left_out
    if arguments.from_deepspeed:
        from tpplan.suggest import import_deepspeed

        return import_deepspeed(model, arguments.from_deepspeed, plan_name(model)), ()
    return _found(model, inputs, arguments), ()


def _found(model: nn.Module, inputs: Any, arguments: argparse.Namespace) -> str:
    """A plan that is proved at each number of ranks: the one found at the largest, or else at a smaller one."""
    from tpplan.api import suggest_text
    from tpplan.plan import CompileError, load_plan

    sizes = sorted(arguments.sizes or [ranks_of(arguments)], reverse=True)
    first: CompileError | None = None
    for size in sizes:
        try:
            text = suggest_text(model, size, arguments.sequence_parallel, inputs, training=arguments.training)
            for other in sizes:
                if other != size:
                    compile_for(arguments, load_plan(text), model, inputs, other)
            return text
        except CompileError as error:
            first = first or error
    assert first is not None
    raise first
