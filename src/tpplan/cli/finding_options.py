"""How commands that check something show what they found, and what their exit code says of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tpplan.cli.exit_codes import CLEAN, FINDINGS, UsageError, exit_code

if TYPE_CHECKING:
    from tpplan.plan import Diagnostic

FORMATS = ("full", "concise", "json", "github", "sarif")
PLACED = ("github", "sarif")
"""Formats in which what has no place is shown at the head of the plan."""


def add_finding_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--format`, `--strict` and `--ignore`."""
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="full",
        metavar="|".join(FORMATS),
        help="how findings are written (default: full)",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 on warnings as well")
    parser.add_argument(
        "--ignore",
        type=_codes,
        action="extend",
        default=[],
        metavar="CODE",
        help="leave out warnings and notes with this code, or with several, separated by commas; may be given again",
    )


def _codes(text: str) -> list[str]:
    from tpplan.cli.rule import find_entry

    try:
        return [find_entry(word).code for word in text.split(",") if word.strip()]
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def show_findings(diagnostics: Iterable[Diagnostic], arguments: argparse.Namespace, good: str) -> int:
    """Print findings and a closing line, `good` if they let the command pass; returns the exit code.

    Errors are never left out: what they say is wrong doesn't run, whatever a command was told to ignore.
    """
    from tpplan.plan import Severity
    from tpplan.report.diagnostics import Format, render, summary, wants_color

    unique = list(dict.fromkeys(diagnostics))
    kept = [held for held in unique if held.severity is Severity.ERROR or held.code not in arguments.ignore]
    code = exit_code(kept)
    if code == CLEAN and arguments.strict and any(held.severity is Severity.WARNING for held in kept):
        code = FINDINGS
    chosen = Format(arguments.format)
    text = render(kept, chosen, color=wants_color(sys.stdout))
    if text:
        print(text)
    if chosen in (Format.FULL, Format.CONCISE):
        if text and chosen is Format.FULL:
            print()
        print(" ".join([*([good] if code == CLEAN else []), *([summary(kept)] if kept else [])]))
    stubborn = sorted({held.code for held in kept if held.code in arguments.ignore})
    if stubborn:
        print(f"tpplan: errors can't be ignored: {', '.join(stubborn)}", file=sys.stderr)
    return code


__all__ = ["FORMATS", "PLACED", "add_finding_arguments", "show_findings"]
