"""Rules that couldn't be tried where a program was compiled: tried at the first call, and told until then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.ops.operators import Between, define, with_backward
from tests.runtime.test_owner import difference
from tests.runtime.world import Member, world
from tpplan.calls.assumed import Assumed
from tpplan.report.parity_tables import render_parity

RULES: dict[str, Any] = {"version": 1, "modules": {"up": "colwise", "down": "rowwise", "scale": "colwise"}}


class Kernel:
    """An operator that runs once there is a device for it."""

    def __init__(self, name: str, audit: bool = True, is_true: bool = True) -> None:
        self.runs, self.is_true, self.calls = False, is_true, 0
        self.operator: Any = define(
            name, "(Tensor x, Tensor weight) -> Tensor", self.run, fake=lambda x, w: torch.empty_like(x)
        )
        with_backward(self.operator, lambda x, weight: x * weight, 2)
        tpplan.register_operator(self.operator, "... f, f -> ... f", audit=audit)

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        self.calls += 1
        if not self.runs:
            raise RuntimeError("no device for it")
        return x * weight if self.is_true else functional.layer_norm(x, x.shape[-1:], weight)


def x(length: int = 6) -> Tensor:
    return torch.randn(2, length, 16, generator=torch.Generator().manual_seed(length)).double()


def model(kernel: Kernel) -> nn.Module:
    torch.manual_seed(0)
    return Between(kernel.operator).double()


def called_once(member: Member, audit: bool, is_true: bool) -> Any:
    kernel = Kernel(f"kernel_{audit}_{is_true}", audit, is_true)
    ours = tpplan.parallelize(model(kernel), RULES, member.mesh(), inputs=(x(),))
    kernel.runs = True
    try:
        made = ours(x())
    except tpplan.OperatorRuleError as error:
        with pytest.raises(tpplan.OperatorRuleError):
            ours(x())
        return str(error), kernel.calls
    with torch.inference_mode():
        ours(x(9))
    calls = kernel.calls
    with torch.inference_mode():
        for length in (6, 9):
            ours(x(length))
    later = kernel.calls - calls
    again = tpplan.compile_plan(model(kernel), RULES, 2, (x(),)).assumed
    return difference(made, model(kernel)(x())), calls, later, again


@pytest.mark.processes
def test_they_are_tried_at_the_first_call() -> None:
    for error, calls, later, again in world(2).run(called_once, True, True):
        assert error < 1e-12 and calls > 10 and not again
        assert later == 2


@pytest.mark.processes
def test_one_that_isnt_true_raises_on_every_rank_before_it_is_used() -> None:
    for message, _ in world(2).run(called_once, True, False):
        assert "TP151" in message and "`f` can't be split" in message


@pytest.mark.processes
def test_what_isnt_to_be_tried_never_is() -> None:
    for error, calls, _, again in world(2).run(called_once, False, True):
        assert error < 1e-12 and calls == 2 and len(again) == 1


def test_one_rank_alone_may_find_it_untrue() -> None:
    class Holds:
        def __call__(self, device: torch.device) -> str:
            return ""

    held: Any = Holds()
    assumed = Assumed([held])
    assert assumed.is_open(torch.device("cpu")) and not assumed.is_open(torch.device("meta"))
    with pytest.raises(tpplan.OperatorRuleError, match=r"TP151.*rank 1 of the axis found"):
        assumed.settle(torch.device("cpu"), lambda what, mine: [mine, ("TP151", [])])
    assert assumed.is_open(torch.device("cpu"))
    assumed.settle(torch.device("cpu"), lambda what, mine: [mine, ("", ["it can't run"])])
    assert not assumed.is_open(torch.device("cpu")) and assumed.is_open(torch.device("cuda"))
    assumed.settle(torch.device("cuda"), lambda what, mine: [mine, mine])
    assert not assumed.is_open(torch.device("cuda"))


def test_reports_tell_them() -> None:
    kernel = Kernel("kernel", audit=False)
    kernel.runs = True
    report = tpplan.verify(model(kernel), RULES, 2, inputs=(x(),))
    assert report.ok and len(report.assumed) == 1 and "audit=False" in report.assumed[0]
    assert report.to_dict()["assumed"] == [*report.assumed]
    assert "Assumed of operators, as it couldn't be tried" in render_parity(report)
    assert f"assumed: {report.assumed[0]}" in str(report)
