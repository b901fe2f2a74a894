"""Which operations draw random numbers, and for whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tpplan.compat.schemas import OpOverload
from tpplan.compiler.trace.random_draws import is_draw

aten: Any = torch.ops.aten
Q = torch.zeros(1, 2, 4, 8)
FUSED = [
    (aten._scaled_dot_product_flash_attention.default, (Q, Q, Q), 3),
    (aten._scaled_dot_product_efficient_attention.default, (Q, Q, Q, None, True), 5),
    (aten._scaled_dot_product_cudnn_attention.default, (Q, Q, Q, None, True), 5),
    (aten._scaled_dot_product_flash_attention_for_cpu.default, (Q, Q, Q), 3),
    (aten._scaled_dot_product_fused_attention_overrideable.default, (Q, Q, Q, None), 4),
]


@pytest.mark.parametrize(("operator", "arguments", "place"), FUSED)
def test_fused_attention_draws_if_it_drops(operator: OpOverload, arguments: tuple[Any, ...], place: int) -> None:
    assert operator._schema.arguments[place].name == "dropout_p" and len(arguments) == place
    assert not is_draw(operator, arguments, {})
    assert not is_draw(operator, (*arguments, 0.0), {}) and not is_draw(operator, arguments, {"dropout_p": 0.0})
    assert is_draw(operator, (*arguments, 0.1), {}) and is_draw(operator, arguments, {"dropout_p": 0.1})


def test_dropout_is_a_draw_and_what_chooses_a_kernel_is_none() -> None:
    assert is_draw(aten.bernoulli_.float, (Q, 0.9), {})
    assert is_draw(aten.native_dropout.default, (Q, 0.1, True), {})
    assert is_draw(aten.native_dropout.default, (Q, 0.1, None), {})
    assert not is_draw(aten.native_dropout.default, (Q, 0.1, False), {})
    assert not is_draw(aten.rrelu_with_noise.default, (Q, Q, 0.1, 0.3, False), {})
    assert is_draw(aten.rrelu_with_noise.default, (Q, Q, 0.1, 0.3, True), {})
    assert not is_draw(aten._fused_sdp_choice.default, (Q, Q, Q, None, 0.1), {})
    assert not is_draw(aten.mul.Tensor, (Q, Q), {})


class Unread(nn.Module):
    """Draws for values that nobody reads: they move the streams all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        functional.dropout(x, 0.5, self.training)
        h = self.up(x)
        functional.dropout(h.unflatten(-1, (-1, 4)).relu(), 0.5, self.training)
        return functional.dropout(self.down(h), 0.5, self.training)


def test_draws_that_nobody_reads_count() -> None:
    plan = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
    program = tpplan.compile_plan(Unread(), plan, tp=2, inputs=(torch.zeros(3, 12, 16),))
    assert program.modules[0].random == ("same", "split", "same")
