"""A rank that runs a record is told its own counts of channels, groups and heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tpplan
from tests.ops.operators import define
from tests.rules.calls import Call
from tests.rules.numbers import Subject
from tests.rules.outcomes import local_arguments
from tpplan.compiler.ir.layout import Layout, sharded

aten = torch.ops.aten
X = torch.zeros(2, 8, 4, 4)


def _by_head(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(-1, (num_heads, -1)).softmax(-1).flatten(2)


tpplan.register_operator(
    define("by_head", "(Tensor x, int num_heads) -> Tensor", _by_head), "b s (h d!) -> b s (h d!)",
    sizes={"num_heads": "h"},
)  # fmt: skip
IMAGE = (X, torch.zeros(8, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 8)


@pytest.mark.parametrize(
    ("call", "layouts", "own"),
    [
        (Call(aten.convolution.default, IMAGE, {}), (sharded(1), sharded(0), sharded(1)), {8: 2}),
        (Call(aten.native_group_norm.default, (X, None, None, 2, 8, 16, 4, 1e-5), {}), (sharded(1),) * 4, {4: 2, 6: 1}),
        (Call(torch.ops.tests.by_head.default, (torch.zeros(2, 6, 32), 8), {}), (sharded(2),) * 2, {1: 2}),
        (Call(aten.convolution.default, IMAGE, {}), (sharded(0), sharded(0), sharded(0)), {8: 8}),
    ],
    ids=["channels", "groups", "heads", "rows"],
)
def test_a_rank_is_told_its_own_counts(call: Call, layouts: tuple[Layout, ...], own: dict[int, Any]) -> None:
    """On four ranks."""
    arguments, _ = local_arguments(Subject(call), layouts)
    assert {place: arguments[place] for place in own} == own
