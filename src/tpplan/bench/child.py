"""One measurement in a process of its own: `python -m tpplan.bench.child NAME ARGUMENTS`, JSON in and out."""

from __future__ import annotations

import json
import sys
from typing import Any


def measure(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run one measurement of the benchmark `name` in this process."""
    if name == "overhead":
        from tpplan.bench import overhead

        return overhead.measure(**arguments)
    if name == "loop":
        from tpplan.bench import loop

        return loop.measure(**arguments)
    if name == "compile":
        from tpplan.bench import compile_time

        compile_time.use_one_core()
        return compile_time.measure(**arguments)
    if name == "checkpoint":
        from tpplan.bench import checkpoint_times as checkpoint

        return checkpoint.measure(**arguments)
    if name == "loss":
        from tpplan.bench import loss_times as loss

        return loss.measure(**arguments)
    if name == "training":
        from tpplan.bench import training

        return training.measure(**arguments)
    if name == "serving":
        from tpplan.bench import serving

        return serving.measure(**arguments)
    if name == "requests":
        from tpplan.bench import requests

        return requests.measure(**arguments)
    from tpplan.bench import collectives, generation_collectives
    from tpplan.compat.process_groups import fake_process_group

    size, plans = int(arguments.get("size", 2)), tuple(arguments.get("plans", ()))
    counted = generation_collectives if arguments.get("of") == "generation" else collectives
    with fake_process_group(size):
        return counted.measure(plans, size)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], json.loads(sys.argv[2]))))
