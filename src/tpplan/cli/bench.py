"""`tpplan bench`: measure what a sharded model costs to run and to compile."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from tpplan.bench import BENCHMARKS
from tpplan.cli.arguments import add_command, add_output_argument
from tpplan.cli.exit_codes import CLEAN, UsageError
from tpplan.cli.mistakes import no_such

if TYPE_CHECKING:
    from tpplan.cli.arguments import Subparsers

_BEFORE = {"training": "alternatives"}
_KERNELS = "kernels"
_PIPED_WIDTH = 160
_EXAMPLES = """\
  tpplan bench                              all of them; takes minutes
  tpplan bench overhead --json figures.json
  tpplan bench compile --docs docs          write docs/benchmarks.md and docs/benchmarks/
  tpplan bench alternatives --format html > bench.html
  tpplan bench kernels --tune               on a GPU: from which size on each Triton kernel pays
"""


def register(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        subparsers,
        "bench",
        help="measure the overhead of a sharded model",
        description="Count collectives (collectives), time a toy model against the unsharded one and against "
        "parallelize_module (overhead), and what a training loop does with gradients (loop), time the compiler on a "
        "model of 405B parameters (compile), load and save a checkpoint of 2 GiB (checkpoint), measure a loss over a "
        "split vocabulary (loss), time steps with collectives beside products (overlap), time steps, host overhead "
        "and a rank's compute of one model unsharded, by tpplan, by parallelize_module, by transformers' own plan and "
        "written by hand (alternatives), and time generation (serving) and first requests (requests) on two processes. "
        "None of them needs a GPU. `kernels --tune` does: it measures from which number of elements on each Triton "
        "kernel is faster than torch's own operator, and keeps it for `auto`.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "benchmarks", nargs="*", type=_name, metavar="BENCHMARK", help=f"{', '.join(BENCHMARKS)} (default: all)"
    )
    parser.add_argument(
        "--format", choices=("rich", "json", "html"), default="rich", metavar="rich|json|html",
        help="how figures are written; html is one page with plots (default: rich)",
    )  # fmt: skip
    add_output_argument(parser, "the raw figures", "--json")
    add_output_argument(parser, "benchmarks.md and benchmarks/", "--docs", folder=True)
    parser.add_argument("--quick", action="store_true", help="only try whether it runs; the figures mean nothing")
    parser.add_argument("--tune", action="store_true", help="with `kernels`: measure and keep their thresholds")
    parser.set_defaults(run=run)


def _name(text: str) -> str:
    name = _BEFORE.get(text, text)
    if name not in (*BENCHMARKS, _KERNELS):
        raise argparse.ArgumentTypeError(no_such(text, BENCHMARKS))
    return name


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmarks one after the other, and show and write their figures."""
    if arguments.tune or _KERNELS in arguments.benchmarks:
        return _tune(arguments)
    from rich.console import Console

    from tpplan.bench.page import write_page
    from tpplan.bench.result_tables import show
    from tpplan.bench.running import BenchmarkError
    from tpplan.bench.running import run as run_benchmark

    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False)
    results: list[dict[str, Any]] = []
    for name in dict.fromkeys(arguments.benchmarks or BENCHMARKS):
        try:
            result = run_benchmark(name, arguments.quick, lambda text: print(text, file=sys.stderr))
        except BenchmarkError as error:
            raise UsageError(str(error)) from None
        results.append(result)
        if arguments.format == "rich":
            show(result, console)
    if arguments.format == "json":
        print(json.dumps(results, indent=2))
    elif arguments.format == "html":
        from tpplan.bench.plots_page import html_of

        print(html_of(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    if arguments.docs is not None:
        print(f"wrote {write_page(arguments.docs, results)}", file=sys.stderr)
    return CLEAN


def _tune(arguments: argparse.Namespace) -> int:
    """Measure the thresholds of kernels on this machine, print them, and keep them."""
    if not arguments.tune:
        raise UsageError("for `kernels` add --tune; their speed is measured by `python -m tpplan.bench.kernels`")
    if arguments.benchmarks != [_KERNELS] or arguments.json or arguments.docs or arguments.quick:
        raise UsageError("--tune goes with `kernels` alone: `tpplan bench kernels --tune`")
    from tpplan.bench.kernels_tune import text_of_thresholds, tune
    from tpplan.bench.running import BenchmarkError

    try:
        found, notes = tune(lambda text: print(text, file=sys.stderr, flush=True))
    except BenchmarkError as error:
        raise UsageError(str(error)) from None
    print(text_of_thresholds(found))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return CLEAN
