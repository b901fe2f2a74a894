"""Tensors whose class says what operations on them compute aren't proved as plain ones; all other classes are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.compiler.toys import MLP, Mlp, X, plan_of


class RoundsActivations(Tensor):
    """A weight whose class rounds what it is multiplied by, as dynamically quantised ones do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            scale = args[0].abs().amax(-1, keepdim=True) / 127
            args = (torch.round(args[0] / scale) * scale, *args[1:])
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(Tensor):
    """A weight that torch can take apart: a plain tensor and a scale."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # pyright: ignore

    numbers: Tensor

    def __init__(self, inner: Tensor) -> None:
        self.numbers = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0].numbers)
        plain = [arg.numbers * 2 if isinstance(arg, Wrapper) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


class Transposes(nn.Parameter):
    """Overrides a method that a body calls."""

    def t(self) -> Tensor:
        return -super().t()


class Noted(nn.Parameter):
    """A parameter with a note, which moves in its own way, and computes as any other."""

    note = "from a checkpoint"

    def to(self, *args: Any, **keywords: Any) -> Any:
        return super().to(*args, **keywords)


def compile_with(model: nn.Module) -> tpplan.Program:
    return tpplan.compile_plan(model, plan_of(MLP), 2, (torch.randn(X),))


def with_weight(weight: Any) -> Mlp:
    model = Mlp()
    model.up.weight = weight
    return model


@pytest.mark.parametrize(
    "weight",
    [
        lambda: nn.Parameter(torch.randn(32, 16).as_subclass(RoundsActivations)),
        lambda: nn.Parameter(Wrapper(torch.randn(32, 16))),
        lambda: nn.Parameter(Wrapper(torch.randn(32, 16)), requires_grad=False),
        lambda: Transposes(torch.randn(32, 16)),
    ],
)
def test_a_parameter_whose_class_computes_otherwise_is_refused_by_name(weight: Any) -> None:
    made = weight()
    with pytest.raises(tpplan.CompileError, match="TP112") as caught:
        compile_with(with_weight(made))
    (finding,) = caught.value.diagnostics
    assert f"`up.weight` is a `{type(made).__module__}.{type(made).__name__}`" in finding.message and finding.help


@pytest.mark.parametrize("registered", [True, False])
def test_so_is_a_buffer_and_a_tensor_in_an_attribute(registered: bool) -> None:
    model, table = Mlp(), torch.randn(16).as_subclass(RoundsActivations)
    if registered:
        model.register_buffer("table", table)
    else:
        model.table = table
    with pytest.raises(tpplan.CompileError, match=r"TP112.*`table` is a .*RoundsActivations`"):
        compile_with(model)


@pytest.mark.parametrize(
    ("held", "kind"),
    [
        (lambda: torch.eye(16).to_sparse_csr(), "torch.sparse_csr"),
        (lambda: torch.quantize_per_tensor(torch.ones(16), 1.0, 0, torch.qint8), "torch.qint8"),
        (lambda: nn.Parameter(torch.eye(16).to_sparse()), "torch.sparse_coo"),
    ],
)
def test_so_is_what_lies_in_memory_otherwise(held: Any, kind: str) -> None:
    model, table = Mlp(), held()
    (model.register_parameter if isinstance(table, nn.Parameter) else model.register_buffer)("table", table)
    with pytest.raises(tpplan.CompileError, match=rf"TP112.*`table` is a `{kind}`"):
        compile_with(model)


@pytest.mark.parametrize("weight", [Noted(torch.randn(32, 16)), nn.Parameter(nn.Buffer(torch.randn(32, 16)))])
def test_a_class_that_computes_as_any_other_is_no_matter(weight: Tensor) -> None:
    assert compile_with(with_weight(weight)).parameters[0].layout.is_sharded


def test_fake_tensors_are_plain_ones_without_numbers() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = Mlp()
    assert compile_with(model).parameters[0].layout.is_sharded
