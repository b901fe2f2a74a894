"""A trace says which tensor is which, in which module call, and nothing that the model's results don't need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.compiler.toys import Mlp, Normed, frame_of, operations, traced, x_BSH
from tpplan.compiler.ir.observations import CaptureSettings
from tpplan.compiler.ir.trace import Frame, Operation, Trace
from tpplan.compiler.trace.branches import record_model
from tpplan.compiler.trace.capture import BodyError
from tpplan.plan import CompileError


def made(trace: Trace) -> Iterator[int]:
    """The values that operations and crossings make, in order."""
    for frame in trace.recorded.walk():
        yield from (crossing.target for crossing in (*frame.entries, *frame.exits))
        for node in frame.body:
            if isinstance(node, Operation):
                yield from (output for output in node.outputs if output is not None)


class Add(nn.Module):
    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return one + other


class Calls(nn.Module):
    """Calls one module in a way that a test gives."""

    def __init__(self, inner: nn.Module, how: Any) -> None:
        super().__init__()
        self.inner = inner
        self.how = how

    def forward(self, x: Tensor) -> Any:
        return self.how(self.inner, x)


def test_every_value_is_made_once() -> None:
    trace = traced(Calls(Mlp(), lambda inner, x: inner(x) + inner(x.mul(2)).add_(1)), x_BSH())
    values = list(made(trace))
    assert len(values) == len(set(values))


def test_a_tensor_passed_twice_is_one_value_inside() -> None:
    trace = traced(Calls(Add(), lambda inner, x: inner(x, x)), x_BSH())
    frame = frame_of(trace, "inner")
    (operation,) = frame.body
    assert isinstance(operation, Operation)
    assert operation.inputs[0] == operation.inputs[1] == frame.entries[0].target
    assert {crossing.target for crossing in frame.entries} == {frame.entries[0].target}


def test_two_tensors_stay_two_values() -> None:
    trace = traced(Calls(Add(), lambda inner, x: inner(x, x.mul(2))), x_BSH())
    frame = frame_of(trace, "inner")
    assert [crossing.path for crossing in frame.entries] == [("one",), ("other",)]
    assert frame.entries[0].target != frame.entries[1].target


@pytest.mark.parametrize(
    "how",
    [
        lambda inner, x: inner(x, x.mul(2)),
        lambda inner, x: inner(x, other=x.mul(2)),
        lambda inner, x: inner(other=x.mul(2), one=x),
    ],
)
def test_positional_and_keyword_arguments_have_the_same_names(how: Any) -> None:
    frame = frame_of(traced(Calls(Add(), how), x_BSH()), "inner")
    assert {crossing.path for crossing in frame.entries} == {("one",), ("other",)}


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Nested(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"pair": Pair(x + 1, x + 2), "list": [x + 3, (x + 4,)], "text": "kept", "none": None}


def test_results_in_nested_containers_have_paths() -> None:
    trace = traced(Nested(), x_BSH())
    assert [crossing.path for crossing in trace.root.exits] == [
        ("pair", 0),
        ("pair", 1),
        ("list", 0),
        ("list", 1, 0),
    ]


def test_results_of_transformers_are_found_by_their_keys() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    class Model(nn.Module):
        def forward(self, x: Tensor) -> BaseModelOutput:
            return BaseModelOutput(last_hidden_state=x + 1, hidden_states=(x, x + 2))  # pyright: ignore

    paths = [crossing.path for crossing in traced(Model(), x_BSH()).root.exits]
    assert paths == [("last_hidden_state",), ("hidden_states", 0), ("hidden_states", 1)]


def test_calls_of_a_shared_module_are_counted() -> None:
    trace = traced(Calls(Mlp(), lambda inner, x: inner(inner(x))), x_BSH())
    assert [(f.module, f.call) for f in trace.root.walk() if f.module == "inner.up"] == [
        ("inner.up", 0),
        ("inner.up", 1),
    ]
    first, second = frame_of(trace, "inner", 0), frame_of(trace, "inner", 1)
    assert second.entries[0].source == first.exits[0].target


def test_a_module_that_control_flow_skips_has_no_frame() -> None:
    trace = traced(Calls(Mlp(), lambda inner, x: inner.up(x)), x_BSH())
    assert [f.module for f in trace.root.walk()] == ["", "inner.up"]


def test_operations_that_nobody_reads_are_dropped() -> None:
    trace = traced(Calls(Mlp(), lambda inner, x: (x.exp(), inner(x.sin()), x.cos())[2]), x_BSH())
    assert operations(trace.root) == ["cos"]
    assert operations(trace.recorded) == ["exp", "sin", "cos"]


def test_an_operation_that_nobody_reads_but_that_writes_to_a_buffer_is_kept() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.detach().sum()  # pyright: ignore
            return x.cos()

    assert operations(traced(Counts(), x_BSH()).root) == ["detach", "sum", "add_", "cos"]


def test_a_tensor_left_in_an_attribute_is_kept() -> None:
    class Leaves(nn.Module):
        left: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.left = x.exp()
            return x.cos()

    trace = traced(Calls(Leaves(), lambda inner, x: inner(x)), x_BSH())
    assert list(trace.effects.kept.values()) == ["inner.left"]
    assert operations(frame_of(trace, "inner")) == ["exp", "cos"]


def test_what_an_in_place_operation_overwrites_is_known_if_it_is_read_again() -> None:
    def read_again(_: nn.Module, x: Tensor) -> Tensor:
        y = x.mul(2)
        view = y.view(-1)
        y.add_(1)
        return view.sum() + y.sum()

    def forgotten(_: nn.Module, x: Tensor) -> Tensor:
        y = x.mul(2)
        y.view(-1)
        return y.add_(1)

    def overwritten(how: Any) -> list[int]:
        trace = traced(Calls(nn.Identity(), how), x_BSH())
        (write,) = (n for n in trace.root.body if isinstance(n, Operation) and "add_" in n.name)
        return list(write.overwritten)

    assert len(overwritten(read_again)) == 1
    assert overwritten(forgotten) == []


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * x).contiguous() + 0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


@pytest.mark.parametrize(
    "how",
    [
        lambda inner, x: Square.apply(inner.up(x)),
        lambda inner, x: checkpoint(lambda y: inner.up(y).exp(), x, use_reentrant=True),
        lambda inner, x: checkpoint(lambda y: inner.up(y).exp(), x, use_reentrant=False),
    ],
    ids=["function", "reentrant", "checkpoint"],
)
def test_gradients_flow_through_functions_with_a_backward_of_their_own(how: Any) -> None:
    trace = traced(Calls(Mlp(), how), x_BSH().requires_grad_())
    assert all(trace.values[crossing.source].differentiable for crossing in trace.root.exits)
    for frame in trace.root.walk():
        for node in frame.body:
            if isinstance(node, Operation):
                assert all(trace.values[o].differentiable for o in node.outputs if o is not None), node.name


def test_values_made_without_gradients_have_none() -> None:
    def quiet(inner: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = inner.up(x).mean()
        return inner(x) * scale + inner.up(x).detach().sum()

    trace = traced(Calls(Mlp(), quiet), x_BSH())
    by_name = {n.name: n for n in trace.root.body if isinstance(n, Operation)}
    assert not trace.values[by_name["aten.mean.default"].outputs[0] or 0].differentiable
    assert not trace.values[by_name["aten.sum.default"].outputs[0] or 0].differentiable
    assert trace.values[by_name["aten.mul.Tensor"].outputs[0] or 0].differentiable


def test_a_forward_that_reads_numbers_is_refused_and_a_test_of_a_mask_is_an_assumption() -> None:
    class Reads(Normed):
        def after(self, h: Tensor, x: Tensor) -> Any:
            return self.proj(h) * h.sum().item()

    class Tests(Normed):
        def after(self, h: Tensor, x: Tensor) -> Any:
            return self.proj(h) if (x > 0).all() else h

    with pytest.raises(BodyError) as raised:
        traced(Reads(), x_BSH())
    assert "reads the value of a tensor" in str(raised.value.__cause__)
    trace = traced(Tests(), x_BSH())
    assert [a.module for a in trace.branches.assumptions] == [""]
    assert "proj" not in [f.module for f in trace.root.walk()]


def test_an_error_in_a_body_names_the_innermost_call() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    with pytest.raises(BodyError) as raised:
        traced(Calls(Fails(), lambda inner, x: inner(x)), x_BSH())
    assert raised.value.frame.module == "inner"
    assert isinstance(raised.value.__cause__, ValueError)


def test_tied_parameters_are_one_value_with_all_their_names() -> None:
    model = Mlp()
    model.tied = model.up.weight  # pyright: ignore
    trace = traced(model, x_BSH())
    assert ("tied", "up.weight") in [tuple(sorted(names)) for names in trace.parameters.values()]


def test_a_capture_leaves_the_model_alone() -> None:
    model = Mlp().eval()
    before = {name: (type(m), dict(vars(m))) for name, m in model.named_modules()}
    traced(model, x_BSH())
    assert before == {name: (type(m), dict(vars(m))) for name, m in model.named_modules()}


class Opaque:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def test_a_tensor_in_an_object_that_nobody_can_open_is_read_across_the_boundary() -> None:
    class Wraps(nn.Module):
        def forward(self, x: Tensor) -> Opaque:
            return Opaque(x.exp())

    trace = traced(Calls(Wraps(), lambda inner, x: inner(x).hidden.sin()), x_BSH())
    inner = frame_of(trace, "inner")
    assert inner.exits == ()
    assert operations(inner) == ["exp"]


def test_frames_nest_as_modules_do() -> None:
    def shape(frame: Frame) -> Any:
        return (frame.module, [shape(node) for node in frame.body if isinstance(node, Frame)])

    trace = traced(Calls(Mlp(), lambda inner, x: inner(x)), x_BSH())
    assert shape(trace.root) == ("", [("inner", [("inner.up", []), ("inner.down", [])])])


@pytest.mark.parametrize("how", ["generator", "map", "coroutine"])
def test_a_forward_that_runs_when_its_result_is_asked_is_told_so(how: str) -> None:
    class Unfinished(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        async def later(self, x: Tensor) -> Tensor:
            return self.down(self.up(x))

        def forward(self, x: Tensor) -> Any:
            if how == "coroutine":
                made = self.later(x)
                made.close()
                return made
            return (self.down(self.up(h)) for h in (x, x)) if how == "generator" else map(self.down, [self.up(x)])

    plan = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
    with pytest.raises(CompileError, match=f"TP110 .* returns a `{how}`"):
        tpplan.compile_plan(Unfinished(), plan, 2, (torch.randn(2, 8),))


class Switches(nn.Module):
    """Short inputs take another attention from then on, as BigBird does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] < 5:
            self.inner = nn.Linear(8, 8, device=x.device)
        return self.inner(x)


def test_a_model_that_replaces_its_modules_is_refused():
    plan = {"version": 1, "modules": {"inner": {"style": "colwise", "output": "replicate"}}}
    with pytest.raises(CompileError, match=r"TP110 .* replaces the module `inner`"):
        tpplan.compile_plan(Switches(), plan, 2, (torch.randn(2, 3, 8),))
    assert tpplan.verify(Switches(), plan, 2, (torch.randn(2, 6, 8),)).ok


class ReadsInVain(nn.Module):
    """The product with `unused` is thrown away, but computed."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.randn(8, 8))
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        _ = x @ self.unused
        return self.inner(x)


def test_a_parameter_that_is_read_in_vain_is_local_too():
    plan = {"version": 1, "modules": {"inner": {"style": "colwise", "output": "replicate"}}}
    assert tpplan.verify(ReadsInVain(), plan, 2, (torch.randn(2, 6, 8),)).ok


def test_a_branch_takes_the_side_that_uses_a_parameter() -> None:
    """As an adapter that is left out at random does."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.beside = nn.ParameterDict({"default": nn.Parameter(torch.randn(4))})

        def forward(self, x: Tensor) -> Tensor:
            return x * self.beside["default"] if torch.rand(1) > 0.0 else x * 2.0

    trace, _ = record_model(Sometimes(), (torch.randn(2, 4),), {}, CaptureSettings(training=True))
    assert [assumption.taken for assumption in trace.branches.assumptions] == [True]
    assert [names for names in trace.parameters.values()] == [("beside.default",)]
