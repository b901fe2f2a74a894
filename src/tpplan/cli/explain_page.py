"""`tpplan explain --format html`, `svg` and `mermaid`: the program as a picture."""

from __future__ import annotations

import argparse
import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tpplan.cli.cost_arguments import cost_of
from tpplan.cli.exit_codes import CLEAN

if TYPE_CHECKING:
    from tpplan.compiler.ir.program import Program
    from tpplan.plan import Plan

_GPU = "h100"  # of a page for which none is named


def show_page(arguments: argparse.Namespace, plan: Plan | str, program: Program) -> int:
    """Print the picture, in UTF-8 whatever the terminal has; its findings go to stderr."""
    from tpplan.cost.cluster import cluster_of
    from tpplan.report.diagnostics import Format, render
    from tpplan.report.program_diagram import mermaid, svg
    from tpplan.report.program_picture import picture_of

    program = _in_order(program)
    if arguments.format == "html":
        text = _page(arguments, plan, program)
    else:
        wanted = arguments.topology or arguments.gpu
        picture = picture_of(program, cluster_of(wanted) if wanted else None)
        text = svg(picture) if arguments.format == "svg" else mermaid(picture)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    print(text)
    if program.diagnostics:
        print(render(program.diagnostics, Format.CONCISE), file=sys.stderr)
    return CLEAN


def _in_order(program: Program) -> Program:
    """The program with its work, in which modules stand as they are called; as it is, if the model can't tell."""
    try:
        return replace(program, work=program.measure.at())
    except Exception:  # whatever the model's code can't do without numbers: boxes stand in the model's order, then
        return program


def _page(arguments: argparse.Namespace, plan: Plan | str, program: Program) -> str:
    """The page; where no GPU is named, one is taken, and it's no error that the program has no estimate."""
    from tpplan.cost.cluster import cluster_of
    from tpplan.cost.cost_errors import CostError
    from tpplan.report.program_html import html_page

    named = arguments.gpu is not None or arguments.topology is not None
    arguments.gpu = arguments.gpu or _GPU
    cost, unpriced = None, ""
    try:
        cost = cost_of(arguments, program)
    except CostError as error:
        if named:
            raise
        unpriced = f"There is no estimate: {error.diagnostics[0].message}."
    return html_page(program, cost, cluster_of(arguments.topology or arguments.gpu), _texts(plan), unpriced)


def _texts(plan: Plan | str) -> dict[str, str]:
    """The plan's files, as far as they can be read again; a plan that was found has none."""
    found: dict[str, str] = {}
    for name in () if isinstance(plan, str) else plan.sources:
        try:
            found[name] = Path(name).read_text(encoding="utf-8-sig")
        except (OSError, ValueError):
            continue
    return found


__all__ = ["show_page"]
