"""The kernels against float64, in Triton's interpreter: the tests of numerics/, in a session of their own.

Triton reads TRITON_INTERPRET when it is imported, and every kernel in the process is then interpreted. To run a file by
itself: `TRITON_INTERPRET=1 pytest tests/kernels/numerics/test_norms.py`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

NUMERICS = Path(__file__).parent / "numerics"
ROOT = Path(__file__).parents[2]


def interpreter_is_broken() -> str:
    """Why Triton's interpreter can't run here, or nothing."""
    if importlib.util.find_spec("triton") is None:
        return "triton isn't installed"
    from importlib.metadata import version

    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    return "the interpreter of triton before 3.7 needs numpy before 2.4" if triton < (3, 7) and numpy >= (2, 4) else ""


def run_interpreted(*arguments: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *arguments, str(NUMERICS)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    assert " passed" in done.stdout, done.stdout


needs_interpreter = pytest.mark.skipif(bool(interpreter_is_broken()), reason=interpreter_is_broken())


@needs_interpreter
def test_kernels_are_right_when_interpreted() -> None:
    run_interpreted()


@pytest.mark.slow
@needs_interpreter
def test_kernels_are_right_when_interpreted_for_more_sizes() -> None:
    run_interpreted("-m", "slow")
