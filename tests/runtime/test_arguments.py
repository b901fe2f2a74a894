"""Wrong arguments of the public functions: our error names the argument, what came and what is taken."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan as typed

tpplan: Any = typed  # what is passed here is wrong on purpose
X = torch.zeros(2, 8)
PLAN = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.down(self.up(x)) * scale


def compiled(model: Any = None, plan: Any = PLAN, tp: Any = 2, inputs: Any = (X,), **more: Any) -> Any:
    return tpplan.compile_plan(MLP() if model is None else model, plan, tp, inputs, **more)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: compiled(tp="2"), "`tp` takes a number of ranks, at least 1, not the text '2': write 2"),
    (lambda: compiled(tp=0), "`tp` takes a number of ranks, at least 1, not the number 0"),
    (lambda: compiled(tp=2.0), "`tp` takes a number of ranks, at least 1, not the number 2.0"),
    (lambda: compiled(tp=True), "not True"),
    (lambda: compiled(tp=None), "not None"),
    (lambda: compiled(MLP), "`model` takes a torch.nn.Module, not the class `MLP`: make one of it"),
    (lambda: compiled("meta-llama/Llama-3.2-1B"), "`tpplan.from_pretrained` does both"),
    (lambda: compiled([MLP()]), "not a `list`"),
    (lambda: compiled(plan=None), '`plan` takes a Plan, .*, not None: write "auto" to have one found'),
    (lambda: compiled(plan=3), "not the number 3"),
    (lambda: compiled(plan=[PLAN]), "not a `list`"),
    (lambda: compiled(inputs="x"), "`inputs` takes an example call: .*, not the text 'x'"),
    (lambda: compiled(inputs=X.numpy()), "not a `ndarray`"),
    (lambda: compiled(device=1.5), "`device` takes a device of torch, or None, not the number 1.5"),
    (lambda: compiled(device="gpu"), "'gpu' isn't a device of torch"),
    (lambda: tpplan.verify(MLP(), PLAN, "2", (X,)), "^verify: `tp`"),
    (lambda: tpplan.verify(MLP(), None, 2, (X,)), "`plan` takes"),
    (lambda: tpplan.verify(MLP(), PLAN, 2, (X,), dtype="float32"), "`dtype` .*: write `torch.float32`"),
    (lambda: tpplan.suggest_plan(MLP, 2), "`model` takes"),
    (lambda: tpplan.suggest_plan(MLP(), 2, sequence_parallel="yes"), "`sequence_parallel` takes True or False"),
    (lambda: tpplan.parallelize(MLP(), PLAN, 2, (X,)), "`mesh` takes a DeviceMesh, or None, not the number 2: `tp=2`"),
    (lambda: tpplan.parallelize(MLP(), PLAN, "cuda"), "`mesh` takes"),
    (lambda: tpplan.parallelize(MLP, PLAN), "`model` takes"),
    (lambda: tpplan.parallelize(MLP(), PLAN, tp="2"), "`tp` takes"),
    (lambda: tpplan.parallelize(MLP()), "missing a required argument: 'plan'; it takes `model`, `plan`"),
    (lambda: tpplan.parallelize(MLP(), PLAN, inptus=(X,)), "unexpected keyword argument 'inptus'"),
    (lambda: tpplan.from_pretrained(MLP(), "auto"), "`folder` takes a path"),
    (lambda: tpplan.from_pretrained("x", "auto", 4), "`mesh` takes"),
    (lambda: tpplan.load_weights("checkpoint", MLP()), "^load_weights: `model` takes"),
    (lambda: tpplan.save_weights(MLP(), None), "`folder` takes a path"),
    (lambda: tpplan.init_weights(MLP), "`model` takes"),
    (lambda: tpplan.warm_up("llama"), "`model` takes"),
    (lambda: tpplan.observe("up", print), "`module` takes"),
    (lambda: tpplan.load_plan(3), "^load_plan: `source` takes"),
    (lambda: tpplan.check_plan(None), "`source` takes .*: `tpplan.suggest_plan` finds one"),
]


@pytest.mark.parametrize(("call", "says"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_a_wrong_argument_is_named(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(tpplan.ArgumentError, match=says) as caught:
        call()
    assert isinstance(caught.value, tpplan.TpplanError) and isinstance(caught.value, (TypeError, ValueError))


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ((), "missing a required argument: 'x'(.|\n)*nothing came"),
        ({}, "missing a required argument: 'x'"),
        ({"y": X}, "missing a required argument: 'x'(.|\n)*`y` came"),
        ({"x": X, "mask": X}, "unexpected keyword argument 'mask'"),
        ((X, 1, 2), "too many positional arguments(.|\n)*3 positional came"),
    ],
)
def test_inputs_that_don_t_bind_are_told_with_what_forward_takes(inputs: Any, says: str) -> None:
    with pytest.raises(tpplan.CompileError, match=says) as caught:
        compiled(inputs=inputs)
    assert caught.value.code == "TP110" and "`inputs` don't fit `MLP.forward(x, scale)`" in str(caught.value)


def test_a_list_and_one_tensor_are_calls_as_well() -> None:
    assert compiled(inputs=[X]).digest == compiled(inputs=X).digest == compiled(inputs={"x": X}).digest


def test_signatures_are_shown_as_they_were_written() -> None:
    names = ["model", "plan", "tp", "inputs", "device", "partial"]
    assert list(inspect.signature(tpplan.compile_plan).parameters) == names
    assert tpplan.compile_plan.__name__ == "compile_plan" and tpplan.compile_plan.__doc__
