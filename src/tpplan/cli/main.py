# PYTHON_ARGCOMPLETE_OK
"""The entry point: finds the command, runs it, and turns whatever happens into an exit code."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING

from tpplan.cli import (
    advise,
    bench,
    checkpoint,
    demo,
    diff,
    env,
    explain,
    export,
    plans,
    rule,
    schema,
    suggest,
    validate,
    verify,
)
from tpplan.cli.arguments import PICTURES, with_sizes_apart
from tpplan.cli.completion import complete
from tpplan.cli.exit_codes import BROKEN_PIPE, CLEAN, FAILED, INTERRUPTED, UsageError, exit_code
from tpplan.cli.mistakes import CommandParser, MisuseError, parsed
from tpplan.progress import shown

if TYPE_CHECKING:
    from tpplan.plan import Diagnostic

_COMMANDS = (
    validate,
    explain,
    diff,
    verify,
    suggest,
    advise,
    export,
    checkpoint,
    demo,
    bench,
    plans,
    rule,
    schema,
    env,
)
_EXAMPLES = """\
examples:
  tpplan validate plans/llama.yaml                     check a plan by itself
  tpplan validate llama --model hf:llama --tp 8        check it against a model
  tpplan suggest --model hf:llama --tp 8               write a plan for a model
  tpplan rule TP012                                    what a code means

exit codes: 0 clean, 1 findings, 2 used wrongly or failed
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; nothing but the code gets out."""
    _ready_streams()
    words = with_sizes_apart(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _parsed_and_run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return BROKEN_PIPE
    except OSError as error:  # a full disk, a file that may not be written
        with suppress(OSError):
            _trace(error, "--traceback" in words)
            where = f": {error.filename}" if error.filename else ""
            print(f"tpplan: {error.strerror or error}{where}", file=sys.stderr)
        return FAILED
    finally:
        _drop_unwritten()


def _parsed_and_run(words: Sequence[str]) -> int:
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow
        complete(parser)
    try:
        namespace = parsed(parser, words)
    except SystemExit as exit_request:
        return exit_request.code if isinstance(exit_request.code, int) else FAILED
    except MisuseError as error:
        print(error, file=sys.stderr)
        return FAILED
    sizes: list[int] = list(dict.fromkeys(getattr(namespace, "sizes", None) or ()))
    namespace.sizes, namespace.tp = sizes, sizes[0] if sizes else None
    if len(sizes) < 2 or getattr(namespace, "together", False):
        return _run(namespace)
    return _run_each(namespace, sizes)


def _run_each(parsed: argparse.Namespace, sizes: list[int]) -> int:
    """Run the command for one number of ranks after the other: text under a line of its own, JSON in one array."""
    codes: list[int] = []
    written: list[str] = []
    shown = getattr(parsed, "format", "")
    as_json = shown == "json"
    if shown in PICTURES:
        print(f"tpplan {parsed.command}: --format {shown} is one file; give --tp one number", file=sys.stderr)
        return FAILED
    for size in sizes:
        one = argparse.Namespace(**{**vars(parsed), "tp": size, "sizes": [size]})
        if as_json:
            with redirect_stdout(StringIO()) as held:
                codes.append(_run(one))
            written += [held.getvalue().rstrip()] if held.getvalue().strip() else []
        else:
            print(f"{'' if size == sizes[0] else chr(10)}tp={size}", flush=True)
            codes.append(_run(one))
        if codes[-1] == INTERRUPTED:
            return INTERRUPTED
    if as_json:
        print("[\n" + ",\n".join(written) + "\n]")
    return max(codes)


def _run(parsed: argparse.Namespace) -> int:
    """Run the command, and make an exit code of whatever happens."""
    try:
        with shown():
            return parsed.run(parsed)
    except OSError:
        raise
    except KeyboardInterrupt:
        print("tpplan: interrupted", file=sys.stderr)
        return INTERRUPTED
    except UsageError as error:
        print(f"{_called(parsed)}: {error}", file=sys.stderr)
        return FAILED
    except Exception as error:
        return _report(error, bool(getattr(parsed, "traceback", False)))


def _called(parsed: argparse.Namespace) -> str:
    return " ".join(filter(None, ["tpplan", parsed.command, getattr(parsed, "action", "")]))


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="tpplan",
        description="A compiler for tensor parallelism in PyTorch: checks plans, explains them and proves them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.set_defaults(run=functools.partial(_show_help, parser))
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in _COMMANDS:
        command.register(subparsers)
    return parser


def _show_help(parser: argparse.ArgumentParser, _: argparse.Namespace) -> int:
    parser.print_help()
    return CLEAN


class _Version(argparse.Action):
    """Looks the version up only when asked: importlib.metadata takes longer than everything else in `--help`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import tpplan

        print(f"tpplan {tpplan.__version__}")
        parser.exit()


def _report(error: Exception, show_traceback: bool) -> int:
    from tpplan.plan import InternalError, TpplanError

    if isinstance(error, TpplanError) and error.diagnostics and not isinstance(error, InternalError):
        return _show_findings(error.diagnostics)
    _trace(error, show_traceback)
    if not isinstance(error, InternalError):
        message = str(error).strip().splitlines()
        error = InternalError(f"{type(error).__name__}: {message[0]}" if message else type(error).__name__)
    shows = "--traceback or TPPLAN_TRACEBACK=1 shows where it happened"
    return _show_findings(tuple(replace(found, notes=(shows,)) for found in error.diagnostics))


def _trace(error: Exception, wanted: bool) -> None:
    if wanted or os.environ.get("TPPLAN_TRACEBACK") not in (None, "", "0"):
        import traceback

        traceback.print_exception(error)


def _show_findings(diagnostics: tuple[Diagnostic, ...]) -> int:
    from tpplan.report.diagnostics import render, summary, wants_color

    print(render(diagnostics, color=wants_color(sys.stderr)), file=sys.stderr)
    print(f"\n{summary(diagnostics)}", file=sys.stderr)
    return exit_code(diagnostics)


def _ready_streams() -> None:
    """Make streams that were closed fail like others where they're written to; narrow encodings are no failure."""
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _drop_unwritten() -> None:
    """Leave nothing for Python to write when it ends, which would fail once more."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
