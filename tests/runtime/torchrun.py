"""A script as torchrun starts it, in processes that needn't import what it imports.

They are forked from one that has imported torch, transformers and tpplan. That torchrun itself starts what README shows
is for tests/house/test_readme.py.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from tests.runtime.world import start_forked

SECONDS = 280.0


class Ran(NamedTuple):
    """What all processes wrote, one after the other."""

    stdout: str
    stderr: str


def torchrun(script: Path, processes: int, *options: str, folder: Path) -> Ran:
    """Run the script in `folder`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as logs:
        context = start_forked(_run, (str(script), options, str(folder), logs, processes, port), processes, False)
        until = time.monotonic() + SECONDS
        try:
            while not context.join(timeout=5.0):
                assert time.monotonic() < until, f"{script.name} takes more than {SECONDS:.0f} s"
        except Exception as error:
            error.add_note(_written(logs, processes).stderr)
            raise
        finally:
            for process in context.processes:
                process.kill()
        return _written(logs, processes)


def _written(logs: str, processes: int) -> Ran:
    return Ran(
        *("".join(Path(logs, f"{name}-{rank}").read_text() for rank in range(processes)) for name in Ran._fields)
    )


def _run(rank: int, script: str, options: tuple[str, ...], folder: str, logs: str, processes: int, port: int) -> None:
    for descriptor, name in enumerate(Ran._fields, 1):
        with open(Path(logs, f"{name}-{rank}"), "w") as log:
            os.dup2(log.fileno(), descriptor)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ |= {name: str(number) for name, number in ranks.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1"}
    os.chdir(folder)
    sys.path.insert(0, str(Path(script).parent))
    sys.argv = [script, *options]
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:
        traceback.print_exc()
        raise
