"""One word for one thing: no class name and no file name stands twice in the package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tpplan.compiler.ir import steps

PACKAGE = Path(__file__).parents[2] / "src" / "tpplan"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.stem not in ("__init__", "__main__"))


def test_no_file_name_stands_twice() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        found[path.stem].append(str(path.relative_to(PACKAGE)))
    assert not {name: places for name, places in found.items() if len(places) > 1}


def test_no_class_name_stands_twice() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    assert not {name: places for name, places in found.items() if len(places) > 1}


def test_files_that_others_know_by_their_place_are_there() -> None:
    assert Path(steps._PASSING_ON).is_file() and Path(steps._LOOKERS[0]).is_file()
