"""SARIF 2.1.0: findings as code scanning services read them, https://docs.oasis-open.org/sarif/sarif/v2.1.0/."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from tpplan.plan import CATALOGUE, Diagnostic, Severity

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}
_ROOT = "%SRCROOT%"


def in_repository(file: str) -> str:
    """A file's path from the top of the repository that it lies in; one that lies in none as it is.

    The top is the nearest folder with a `.git`; where there is none, as in some containers, GITHUB_WORKSPACE's.
    """
    path = Path(os.path.abspath(file))
    given = os.environ.get("GITHUB_WORKSPACE")
    tops = [top for top in path.parents if (top / ".git").exists()] or ([Path(os.path.abspath(given))] if given else [])
    return path.relative_to(tops[0]).as_posix() if tops and path.is_relative_to(tops[0]) else file


def render_sarif(diagnostics: Sequence[Diagnostic]) -> str:
    """The findings as one run of tpplan, with the entries of the catalogue that they're about."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        driver: dict[str, object] = {"name": "tpplan", "version": version("tpplan")}
    except PackageNotFoundError:
        driver = {"name": "tpplan"}
    codes = sorted({diagnostic.code for diagnostic in diagnostics})
    driver["rules"] = [_rule(code) for code in codes]
    results = [_result(diagnostic, codes.index(diagnostic.code)) for diagnostic in diagnostics]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False)


def _rule(code: str) -> dict[str, object]:
    entry = CATALOGUE[code]
    return {
        "id": code,
        "name": entry.name,
        "shortDescription": {"text": entry.summary},
        "fullDescription": {"text": " ".join(entry.explanation.split())},
        "help": {"text": f"tpplan rule {code}"},
        "defaultConfiguration": {"level": _LEVELS[entry.severity]},
    }


def _result(diagnostic: Diagnostic, rule: int) -> dict[str, object]:
    way_out = [f"help: {diagnostic.help}"] if diagnostic.help else []
    text = "\n".join([diagnostic.message, *way_out, *(f"note: {note}" for note in diagnostic.notes)])
    location = _location(diagnostic)
    return {
        "ruleId": diagnostic.code,
        "ruleIndex": rule,
        "level": _LEVELS[diagnostic.severity],
        "message": {"text": text},
        **({"locations": [location]} if location else {}),
    }


def _location(diagnostic: Diagnostic) -> dict[str, object]:
    span, location = diagnostic.span, dict[str, object]()
    if span is not None and not span.file.startswith("<"):
        start, end = span.start, span.end
        region = {"startLine": start.line, "startColumn": start.column, "endLine": end.line, "endColumn": end.column}
        location["physicalLocation"] = {"artifactLocation": _artifact(span.file), "region": region}
    if diagnostic.subject:
        location["logicalLocations"] = [{"fullyQualifiedName": diagnostic.subject}]
    return location


def _artifact(file: str) -> dict[str, str]:
    path = in_repository(file)
    if os.path.isabs(path):
        return {"uri": Path(path).as_uri()}
    return {"uri": quote(Path(path).as_posix()), "uriBaseId": _ROOT}


__all__ = ["in_repository", "render_sarif"]
