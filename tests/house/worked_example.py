"""Pages that change tpplan: their `diff` blocks are applied to a copy of the package, and their Python runs by it.

Python before the first `diff` runs by tpplan as it is, Python after it by the changed copy, in a process of its own; a
block before it that prints nothing (there's no `text` block below it) runs by both. A `diff` block begins with
`+++ FILE`; `@@` parts its places, each of which must be in the file once.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCKS = re.compile(r"```(python|diff)\n(.*?)```(?:\n```text\n(.*?)```)?", re.DOTALL)


def run_page(page: str, folder: Path) -> tuple[list[str], list[str]]:
    """What a page's Python prints, before its changes and after them, and what the page shows; as two lists."""
    blocks = _BLOCKS.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    first = next(i for i, (language, _, _) in enumerate(blocks) if language == "diff")
    before, after = blocks[:first], blocks[first:]
    definitions = "".join(text for language, text, shown in before if language == "python" and not shown)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec("".join(text for language, text, _ in before if language == "python"), {})
    shutil.copytree(ROOT / "src" / "tpplan", folder / "tpplan")
    for language, text, _ in after:
        if language == "diff":
            _change(text, folder)
    changed = definitions + "".join(text for language, text, _ in after if language == "python")
    shown = ["".join(text for _, _, text in part) for part in (before, after)]
    return [printed.getvalue(), _run(changed, folder)], shown


def _change(diff: str, folder: Path) -> None:
    head, *lines = diff.splitlines(keepends=True)
    path = folder / head.removeprefix("+++ src/").strip()
    text = path.read_text(encoding="utf-8")
    for old, new in _places(lines):
        assert text.count(old) == 1, f"{head.strip()}: this is {text.count(old)} times in the file:\n{old}"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def _places(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Of each place, its text before and after."""
    for place in re.split(r"^@@\n", "".join(lines), flags=re.MULTILINE):
        held = place.splitlines(keepends=True)
        assert all(line[0] in " +-\n" for line in held), place
        if held:
            before = "".join(line[1:] or "\n" for line in held if not line.startswith("+"))
            yield before, "".join(line[1:] or "\n" for line in held if not line.startswith("-"))


def _run(code: str, folder: Path) -> str:
    script = folder / "page.py"
    script.write_text(code, encoding="utf-8")
    paths = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
