"""One measurement in a process of its own: `python -m tpplan.bench.child NAME ARGUMENTS`, JSON in and out."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

_MODULES = {
    "compile": "compile_time",
    "checkpoint": "checkpoint_times",
    "loss": "loss_times",
    "overlap": "overlap_times",
}


def measure(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run one measurement of the benchmark `name` in this process."""
    if name != "collectives":
        module = import_module(f"tpplan.bench.{_MODULES.get(name, name)}")
        if name == "compile":
            module.use_one_core()
        return module.measure(**arguments)
    from tpplan.bench import collectives, generation_collectives
    from tpplan.compat.process_groups import fake_process_group

    size, plans = int(arguments.get("size", 2)), tuple(arguments.get("plans", ()))
    counted = generation_collectives if arguments.get("of") == "generation" else collectives
    with fake_process_group(size):
        return counted.measure(plans, size)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], json.loads(sys.argv[2]))))
