"""Changes in the process beyond the model: none at import; `parallelize` makes those listed; a call undoes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"

# What stands where: of everything that a change of ours touches, and of what import might.
LOOK = """
import sys, torch, accelerate, transformers.trainer
import torch.optim.optimizer as steps
from torch import nn
from torch.nn.modules import module
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

OWNERS = (
    accelerate.Accelerator, accelerate.accelerator.ParallelismConfig, accelerate.accelerator.AcceleratedOptimizer,
    accelerate.accelerator.AcceleratedScheduler, transformers.trainer.Trainer, DTensor, torch.Tensor, nn.Module,
    nn.Parameter, nn.parallel.DistributedDataParallel, torch.optim.Optimizer, torch.optim.AdamW,
    FSDPParamGroup,
)

def tables():
    found = {f"{o.__name__}.{n}": id(v) for o in OWNERS for n, v in vars(o).items() if callable(v)}
    for name, held in [*vars(module).items(), *vars(steps).items()]:
        if name.startswith("_global") and hasattr(held, "values"):  # torch registers some itself as it goes
            found[name] = len([hook for hook in held.values() if not hook.__module__.startswith("torch")])
    return found | {
        "excepthook": id(sys.excepthook), "displayhook": id(sys.displayhook), "meta_path": len(sys.meta_path),
        "safe": len(torch.serialization.get_safe_globals()), "dtype": str(torch.get_default_dtype()),
        "modes": len(torch.overrides._get_current_function_mode_stack()), "grad": torch.is_grad_enabled(),
    }

def changed(before):
    after = tables()
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))

def step(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return optimizer

step(nn.Linear(8, 8))  # torch wraps steps itself then
"""


def run(script: str) -> list[str]:
    variables = {**os.environ, "PYTHONPATH": str(SOURCES)}
    command = [sys.executable, "-W", "ignore", "-c", LOOK + script]
    finished = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert not finished.returncode, finished.stderr
    return finished.stdout.splitlines()


@pytest.mark.slow
def test_importing_any_file_of_the_package_changes_nothing() -> None:
    pytest.importorskip("accelerate")
    script = """
import importlib, pkgutil
before = tables()
import tpplan
for name in [m.name for m in pkgutil.walk_packages(tpplan.__path__, "tpplan.")]:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(changed(before))
"""
    assert run(script) == ["[]"]


@pytest.mark.slow
def test_parallelize_makes_the_changes_that_are_listed_and_undo_takes_them_back() -> None:
    pytest.importorskip("accelerate")
    script = """
import tpplan, tpplan.api
from tpplan.compat.process_groups import fake_process_group
from torch.distributed.device_mesh import init_device_mesh
with fake_process_group(2):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    def made():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        plan = {"version": 1, "modules": {"0": "colwise", "1": "rowwise"}}
        return tpplan.parallelize(model, plan, mesh, torch.ones(2, 8))
    before = tables()
    made()
    first = changed(before)
    print([name for name in first if name.startswith(("Accelerator.", "Trainer."))] != [])
    print("FSDPParamGroup.__init__" in first)
    print([name for name in first if "." not in name])
    print(len(tpplan.process_changes()))
    made()
    print(changed(before) == first)
    tpplan.undo_process_changes()
    print(changed(before), len(tpplan.process_changes()))
    model = made()
    print(changed(before) == first)
    optimizer = step(model)
    tpplan.undo_process_changes()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()  # by DTensor's dispatch
    print(changed(before))
"""
    listed = ["_global_module_registration_hooks", "_global_optimizer_pre_hooks", "meta_path", "safe"]
    assert run(script) == ["True", "True", str(listed), "6", "True", "[] 0", "True", "[]"]
