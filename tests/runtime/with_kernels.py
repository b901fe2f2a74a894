"""What processes do for the tests of models with kernels; on CPU tensors these are their formulas."""

from __future__ import annotations

import copy

import torch

import tpplan
from tests.kernels.launches import counted
from tests.runtime.vocabulary import TOKENS, VOCABULARY, gradient_error, llama
from tests.runtime.world import Member
from tpplan import kernels
from tpplan.runtime.classes import class_rows

CHOICES = {"residual_norm": "triton", "cross_entropy": "triton"}


def steps(member: Member, rules: dict[str, object]) -> tuple[list[float], dict[str, int]]:
    """Of two training steps of a Llama, the errors of the loss and of the gradients; how often each kernel ran."""
    stock = llama()
    with counted(kernels, "residual_rms_norm") as norms, counted(class_rows, "PARTS") as losses:
        plan = {"version": 1, "modules": rules, "kernels": CHOICES}
        ids = torch.randint(0, VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(1))
        given = {"input_ids": ids, "labels": ids, "use_cache": False}
        sharded = tpplan.parallelize(copy.deepcopy(stock), plan, member.mesh(), inputs=given)
        norms.clear()
        losses.clear()
        errors: list[float] = []
        for number in range(2):
            given = {**given, "input_ids": (ids + number) % VOCABULARY}
            ours, expected = sharded(**given).loss, stock(**given).loss
            ours.backward()
            expected.backward()
            errors.append(abs(float(ours.detach()) - float(expected.detach())) / abs(float(expected.detach())))
            errors.append(gradient_error(stock, sharded))
    return errors, {"norm": norms.total(), "loss": losses.total()}
