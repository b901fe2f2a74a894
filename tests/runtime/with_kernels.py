"""What processes do for the tests of models with kernels; on CPU tensors these are their formulas."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any
from unittest import mock

import torch

import tpplan
from tests.runtime.vocabulary import TOKENS, VOCABULARY, gradient_error, llama
from tests.runtime.world import Member
from tpplan import kernels
from tpplan.kernels import backend
from tpplan.runtime import class_rows

CHOICES = {"residual_norm": "triton", "cross_entropy": "triton"}


def steps(member: Member, rules: dict[str, object]) -> tuple[list[float], dict[str, int]]:
    """Of two training steps of a Llama, the errors of the loss and of the gradients; how often each kernel ran."""
    stock = llama()
    calls: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*given: Any, **keywords: Any) -> Any:
            calls[name] += not given[0].is_meta
            return function(*given, **keywords)

        return call

    with (
        mock.patch.object(backend, "runs_kernels", lambda tensor: not tensor.is_meta),
        mock.patch.object(kernels, "available", lambda device: kernels.Backend("triton", "for the test")),
        mock.patch.object(kernels, "residual_rms_norm", counted("norm", kernels.residual_rms_norm)),
        mock.patch.object(class_rows, "PARTS", counted("loss", class_rows.PARTS)),
    ):
        plan = {"version": 1, "modules": rules, "kernels": CHOICES}
        ids = torch.randint(0, VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(1))
        given = {"input_ids": ids, "labels": ids, "use_cache": False}
        sharded = tpplan.parallelize(copy.deepcopy(stock), plan, member.mesh(), inputs=given)
        calls.clear()
        errors: list[float] = []
        for number in range(2):
            given = {**given, "input_ids": (ids + number) % VOCABULARY}
            ours, expected = sharded(**given).loss, stock(**given).loss
            ours.backward()
            expected.backward()
            errors.append(abs(float(ours.detach()) - float(expected.detach())) / abs(float(expected.detach())))
            errors.append(gradient_error(stock, sharded))
    return errors, dict(calls)
