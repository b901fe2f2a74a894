"""Plant each bug in a copy of the tree, run the tests that should notice, and print which turned red.

    python -m tests.mutations              all of them
    python -m tests.mutations guard norm   those whose names have one of these words

Exits with 1 if a bug survived, or if its text isn't in the code any more.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutations.bugs import BUGS, Bug

ROOT = Path(__file__).resolve().parents[2]
_FAILED = re.compile(r"^(?:FAILED|ERROR) tests/(\S+)", re.MULTILINE)
_PARTS = ("src", "tests", "plans", "pyproject.toml", "README.md", "docs")


def misplaced(bugs: tuple[Bug, ...] = BUGS) -> list[str]:
    """Bugs whose text, or whose tests, aren't there any more."""
    found: list[str] = []
    for bug in bugs:
        path = ROOT / "src" / "tpplan" / bug.file
        count = path.read_text(encoding="utf-8").count(bug.text) if path.exists() else 0
        if count != 1:
            found.append(f"{bug.name}: its text is {count} times in {bug.file}")
        found += [f"{bug.name}: there's no tests/{test}" for test in bug.tests if not (ROOT / "tests" / test).exists()]
    return found


def red_tests(bug: Bug, tree: Path) -> list[str]:
    """The tests that fail with the bug in `tree`, up to three of them; the tree is put back."""
    path = tree / "src" / "tpplan" / bug.file
    stock = path.read_text(encoding="utf-8")
    path.write_text(stock.replace(bug.text, bug.replacement), encoding="utf-8")
    files = [f"tests/{test}" for test in bug.tests]
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--maxfail=3", "-p", "no:cacheprovider", *files]
    own = {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1", "TPPLAN_TEST_EVERY_CASE": "1"}
    environment = os.environ | own
    try:
        run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    finally:
        path.write_text(stock, encoding="utf-8")
    failed = _FAILED.findall(run.stdout)
    if run.returncode not in (0, 1) and not failed:
        raise SystemExit(f"{bug.name}: pytest itself failed\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    return failed


def main(words: list[str]) -> int:
    """Run, and print the table."""
    lost = misplaced()
    if lost:
        print("\n".join(lost))
        return 1
    chosen = [bug for bug in BUGS if not words or any(word in bug.name for word in words)]
    survived = 0
    with tempfile.TemporaryDirectory(prefix="tpplan-mutations-") as folder:
        tree = Path(folder)
        for part in _PARTS:
            source = ROOT / part
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, tree / part)
        for bug in chosen:
            red = red_tests(bug, tree)
            survived += not red
            print(f"{bug.name:48} {', '.join(red) if red else 'SURVIVED'}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} bugs were noticed")
    return 1 if survived else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
