"""`tpplan rule`: what a diagnostic code means."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tpplan.cli.arguments import add_command
from tpplan.cli.exit_codes import CLEAN, UsageError

if TYPE_CHECKING:
    from tpplan.cli.arguments import Subparsers
    from tpplan.plan import CatalogueEntry

_EXAMPLES = """\
  tpplan rule TP012                     by code; tp12 will do
  tpplan rule unmatched-pattern         by name
  tpplan rule                           the list of all
  tpplan rule --all --markdown          the reference page
"""


def register(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        subparsers,
        "rule",
        help="explain a diagnostic code, or list them all",
        description="Explain a diagnostic code: its cause, the way out, and a plan before and after.",
        examples=_EXAMPLES,
    )
    parser.add_argument("code", nargs="?", metavar="CODE", help="a code such as TP012, or its name")
    parser.add_argument("--all", action="store_true", help="explain every code")
    parser.add_argument("--markdown", action="store_true", help="write Markdown; needs --all")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one entry, all of them, or the list."""
    from tpplan.plan import CATALOGUE
    from tpplan.report.catalogue import entry_text, index_text, markdown_page

    if arguments.code is not None and arguments.all:
        raise UsageError("give a code or --all, not both")
    if arguments.markdown and not arguments.all:
        raise UsageError("--markdown needs --all")
    if arguments.all:
        entries = CATALOGUE.values()
        text = markdown_page(entries) if arguments.markdown else "\n\n".join(entry_text(entry) for entry in entries)
    else:
        text = index_text(CATALOGUE.values()) if arguments.code is None else entry_text(find_entry(arguments.code))
    print(text)
    return CLEAN


def find_entry(wanted: str) -> CatalogueEntry:
    """The entry of a code or name.

    Raises:
        UsageError: there is none; it says which is near.
    """
    from tpplan.plan.catalogue import CATALOGUE, entry_of
    from tpplan.plan.nearest import did_you_mean

    found = entry_of(wanted)
    if found is not None:
        return found
    names = [entry.name for entry in CATALOGUE.values()]
    nearest = did_you_mean(wanted, names) or (did_you_mean(wanted, [code.lower() for code in CATALOGUE]) or "").upper()
    raise UsageError(
        f"there is no code {wanted!r}; " + (f"did you mean {nearest}?" if nearest else "`tpplan rule` lists all")
    )
