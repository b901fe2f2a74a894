"""Wrong arguments of the public functions: our error names the argument, what came and what is taken."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

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


TAKEN_AS_THEY_COME = {
    "operator": "an object of torch.library of any kind; what isn't one is an OperatorRuleError",
    "rule": "what isn't one is an OperatorRuleError",
    "rename": "ranks agree on what fails",
    "plan": "of `known_plan`, where ranks agree on what fails",
    "inputs": "of `example_call`, likewise",
    "options": "of transformers' `generate`",
}


def test_each_argument_of_each_public_function_is_checked() -> None:
    functions = [
        held
        for place in (tpplan, tpplan.loss, tpplan.generation)
        for name in place.__all__
        if inspect.isfunction(held := getattr(place, name)) and inspect.signature(held).parameters
    ]
    assert len(functions) >= 20
    for function in functions:
        kinds = function.taken
        unchecked = set(inspect.signature(function).parameters) - set(kinds)
        assert unchecked <= set(TAKEN_AS_THEY_COME), (function.__name__, unchecked)
        assert not [name for name, kind in kinds.items() if kind.fits(object())], function.__name__


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: tpplan.check_stages("x", PLAN),
            "`stages` takes a torch.nn.Module, or a list of them, not the text 'x'",
        ),  # pyright: ignore
        (lambda: tpplan.check_stages([MLP(), None], PLAN), "`stages` takes a torch.nn.Module, or a list of them"),  # pyright: ignore
        (lambda: compiled(tp=int), "`tp` takes a number of ranks, at least 1, not the class `int`"),
        (lambda: compiled(device=True), "`device` takes a device of torch, or None, not True"),
        (lambda: tpplan.verify(MLP(), PLAN, 2, (X,), seed="0"), "`seed` takes a whole number, not the text '0'"),
        (lambda: tpplan.verify(MLP(), PLAN, 2, (X,), timeout=0), "`timeout` takes a number of seconds, more than 0"),
        (lambda: tpplan.verify(MLP(), PLAN, 2, (X,), progress=True), "`progress` takes a function, or None, not True"),
        (lambda: tpplan.load_weights(MLP(), None), "`source` takes a path, as text or a Path, not None"),
        (lambda: tpplan.load_weights(MLP(), "x", rename="a"), "`rename` takes a mapping of text to text, or None"),
        (lambda: tpplan.load_weights(MLP(), "x", rename={"a": 1}), "`rename` takes"),
        (lambda: tpplan.load_weights(MLP(), "x", strict=None), "`strict` takes True or False, not None"),
        (lambda: tpplan.load_weights(MLP(), "x", progress=1), "`progress` takes True, False, None or a function"),
        (lambda: tpplan.save_weights(MLP(), "x", file_bytes="5GB"), "`file_bytes` takes a whole number, not"),
        (lambda: tpplan.init_weights(MLP(), build=MLP()), "`build` takes a function that makes the model"),
        (lambda: tpplan.init_weights(MLP(), device=1.5), "`device` takes"),
        (lambda: tpplan.observe(MLP(), "print"), "`hook` takes a function, not the text 'print'"),
        (lambda: tpplan.estimate(MLP()), "`program` takes a Program, which `tpplan.compile_plan` makes, not an? `MLP`"),
        (lambda: tpplan.estimate(compiled(), 100), "`gpu` takes text, not the number 100"),
        (lambda: tpplan.estimate(compiled(), dp=0), "`dp` takes a whole number, at least 1, not the number 0"),
        (lambda: tpplan.estimate(compiled(), overlap=2), "`overlap` takes a number from 0 to 1, not the number 2"),
        (
            lambda: tpplan.advise(MLP(), "8", batch=1, sequence=1),
            "`gpus` takes a whole number, at least 1",
        ),
        (lambda: tpplan.advise(MLP, 8, batch=1, sequence=1), "`model` takes .*: make one of it"),
        (lambda: tpplan.advise(gpus=8), "missing a required argument: 'model'"),  # pyright: ignore
        (lambda: tpplan.advise(MLP(), 8, batch="1"), "`batch` takes a whole number"),  # pyright: ignore
        (
            lambda: tpplan.clip_grad_norm_(MLP(), 1.0),
            "`parameters` takes .*: pass `model.parameters",
        ),
        (lambda: tpplan.clip_grad_norm_([], "1"), "`max_norm` takes a number, not the text '1'"),
        (lambda: tpplan.register_operator("a::b", "n -> n", linear="x"), "`linear` takes a list of arguments' names"),
        (lambda: tpplan.loss.cross_entropy(X, [0, 1]), "`target` takes a tensor, not a `list`"),
        (lambda: tpplan.loss.cross_entropy(X, X, mesh="tp"), "`mesh` takes a DeviceMesh, a ProcessGroup, or None"),
        (lambda: tpplan.generation.top_k(X, 0), "`k` takes a whole number, at least 1, not the number 0"),
        (lambda: tpplan.generation.argmax(X.tolist()), "`logits` takes a tensor, not a `list`"),
    ],
)
def test_whatever_is_passed_is_looked_at_before_anything_is_made_of_it(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(tpplan.ArgumentError, match=says):
        call()


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (
            {"up": ColwiseParallel, "down": RowwiseParallel()},
            "`ColwiseParallel` is a class of styles: write `ColwiseParallel..",
        ),
        ({"up": ColwiseParallel}, "TP217 .*`ColwiseParallel` is a class of styles"),
        ("Auto", "did you mean `auto`"),
    ],
)
def test_what_was_nearly_a_plan_is_told(plan: Any, says: str) -> None:
    with pytest.raises(tpplan.PlanError, match=says):
        compiled(plan=plan)


def test_a_model_that_doesn_t_generate_isn_t_warmed_up() -> None:
    with pytest.raises(tpplan.ArgumentError, match="`MLP` has no `generate`"):
        tpplan.warm_up(MLP())


def test_signatures_are_shown_as_they_were_written() -> None:
    names = ["model", "plan", "tp", "inputs", "device", "partial"]
    assert list(inspect.signature(tpplan.compile_plan).parameters) == names
    assert tpplan.compile_plan.__name__ == "compile_plan" and tpplan.compile_plan.__doc__


def test_what_torch_takes_is_taken() -> None:
    numpy = pytest.importorskip("numpy")
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.tensor([1.0, 2.0, 4.0])
    assert tpplan.clip_grad_norm_([weight], 1.0, norm_type="inf") == 4
    assert tpplan.compile_plan(MLP(), PLAN, numpy.int64(2), (X,)).size == 2
