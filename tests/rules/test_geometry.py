"""Rules of DTensor are told the geometry that torch tells them, though meta tensors are asked instead of fake ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import Replicate
from torch.utils._pytree import tree_map_only

from tests.marking import sweep_but
from tests.rules.calls import OPERATORS, Call, calls_of
from tests.rules.sweep import ENTRYWISE
from tpplan.compat import propagator

QUICK = (
    "addmm", "bmm", "cat", "cumsum", "einsum", "expand", "flip", "gather", "index_put", "index_select", "masked_fill",
    "max.reduction_with_dim", "mean", "nn.functional.conv2d", "nn.functional.embedding", "nn.functional.layer_norm",
    "nn.functional.scaled_dot_product_attention", "permute", "repeat", "reshape", "select", "softmax", "sort", "split",
    "stack", "sum", "topk", "transpose", "unbind", "unsqueeze", "view", "where", "aten.add.Tensor", "aten.mul.Scalar",
)  # fmt: skip


def schema(call: Call) -> OpSchema:
    mesh = propagator.fake_mesh(2)

    def spec(tensor: Tensor) -> DTensorSpec:
        return DTensorSpec(mesh, (Replicate(),), tensor_meta=TensorMeta(tensor.shape, tensor.stride(), tensor.dtype))

    arguments, keywords = tree_map_only(Tensor, spec, (call.arguments, call.keywords))
    return OpSchema(call.operator, arguments, keywords)


def seen(held: Any) -> Any:
    """Shape and dtype of each result, and its strides along dims of several entries; an error is none at all."""
    if isinstance(held, TensorMeta):
        strides = [step for size, step in zip(held.shape, held.stride, strict=True) if size > 1]
        return tuple(held.shape), held.dtype, strides if 0 not in held.shape else []
    return [seen(item) for item in held] if isinstance(held, (list, tuple)) else held


def asked(propagator: ShardingPropagator, question: OpSchema) -> Any:
    try:
        return seen(propagator._propagate_tensor_meta_non_cached(question))
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("name", sweep_but(QUICK, (*OPERATORS, *ENTRYWISE)))
@pytest.mark.one_in(5)
def test_results_have_the_geometry_that_torch_says(name: str) -> None:
    theirs = DTensor._op_dispatcher.sharding_propagator
    ours = propagator._MetaPropagator(theirs)
    for call in calls_of(name, 3):
        question = schema(call)
        assert asked(ours, question) == asked(theirs, question), call.key


def test_an_operation_that_makes_a_tensor_of_its_own_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = DTensor._op_dispatcher.sharding_propagator
    monkeypatch.setattr(ShardingPropagator, "_propagate_tensor_meta_non_cached", lambda *_: "torch")
    question = schema(Call(torch.ops.aten.ones.default, ([2, 3],), {}))
    assert propagator._MetaPropagator(theirs)._propagate_tensor_meta_non_cached(question) == "torch"
