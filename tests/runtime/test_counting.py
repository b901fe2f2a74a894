"""What counts collectives doesn't change them: its hooks on all modules are left out of proofs."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import tpplan
from tests.marking import in_turns
from tests.plans.parity import counted
from tests.runtime.test_caches import tiny
from tpplan.compat.process_groups import fake_process_group
from tpplan.runtime.modules.module_runtime import RUNTIME

pytest.importorskip("transformers")


@pytest.mark.parametrize(("name", "recorded"), in_turns(["gpt2", "llama"], [False, True], quick=1))
def test_a_call_that_is_counted_is_proved_as_any_other(name: str, recorded: bool) -> None:
    stock, example = tiny(name)
    with fake_process_group(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = tpplan.parallelize(stock.float(), name, mesh, example).eval()
        for _ in range(2):
            with CommDebugMode() as mode, torch.set_grad_enabled(recorded):
                model(input_ids=example["input_ids"][:, :4], use_cache=False)
            program = vars(model)[RUNTIME].guard.program
            assert counted(mode) == program.count_collectives(backward=False)
