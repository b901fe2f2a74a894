"""Every error that a user may catch is importable from `tpplan`."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import tpplan

# A command's own, which no function of the package lets out.
COMMANDS = ("tpplan.cli", "tpplan.bench", "tpplan.demo")


def test_every_error_below_the_base_is_exported() -> None:
    for module in pkgutil.walk_packages(tpplan.__path__, "tpplan."):
        if not module.name.startswith((*COMMANDS, "tpplan.__main__", "tpplan.kernels.")):
            importlib.import_module(module.name)
    waiting: list[type[BaseException]] = [tpplan.TpplanError]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__.startswith("tpplan.") and not kind.__module__.startswith(COMMANDS):
            assert getattr(tpplan, kind.__name__) is kind and kind.__name__ in tpplan.__all__
    for name in ("UnprovedCallError", "CheckpointError", "VerifyError", "UnevenShardError"):
        assert issubclass(getattr(tpplan, name), tpplan.TpplanError)


def test_an_error_loads_no_torch_before_it_is_asked_for() -> None:
    program = "import sys, tpplan; tpplan.PlanError; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "False"
