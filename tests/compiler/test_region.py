"""Equal module calls are one region, whatever their names; what makes them differ keeps them apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.compiler.toys import MLP, Block, Mlp, bound, traced, x_BSH
from tpplan.compiler.bind.regions import build_regions
from tpplan.compiler.ir.region import Instance


def instances(model: nn.Module, rules: dict[str, Any]) -> dict[str, Instance]:
    trace = traced(model, x_BSH())
    found: dict[str, Instance] = {}

    def visit(instance: Instance) -> None:
        found[instance.frame.module] = instance
        for child in instance.children:
            visit(child)

    visit(build_regions(trace, bound(model, rules)))
    return found


def blocks(*bodies: nn.Module) -> nn.Module:
    return nn.Sequential(*map(Block, bodies))


IN_BLOCKS = {f"*.body.{name}": style for name, style in MLP.items()}


def test_equal_layers_share_a_region() -> None:
    found = instances(blocks(Mlp(), Mlp(), Mlp()), IN_BLOCKS)
    # The first differs: its input is the model's, which wants no gradient.
    assert found["1"].region is found["2"].region
    assert found["0.body.up"].region is found["2.body.up"].region
    assert found["1"].values != found["2"].values


def test_other_sizes_make_another_region() -> None:
    found = instances(blocks(Mlp(), Mlp(), Mlp(intermediate=64)), IN_BLOCKS)
    assert found["1"].region is not found["2"].region


def test_other_rules_make_another_region() -> None:
    rules = {**IN_BLOCKS, "2.body.up": {"style": "colwise", "output": "replicate"}}
    found = instances(blocks(Mlp(), Mlp(), Mlp()), rules)
    assert found["1.body.up"].region is not found["2.body.up"].region
    assert found["1.body.down"].region is found["2.body.down"].region


def test_numbers_that_python_holds_equal_make_different_regions() -> None:
    class Times(nn.Module):
        def __init__(self, factor: object) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.aten.mul.Tensor(x, self.factor)

    found = instances(nn.Sequential(Times(1), Times(1.0), Times(1)), {})
    assert found["0"].region is found["2"].region
    assert found["0"].region is not found["1"].region


def test_frozen_parameters_make_another_region() -> None:
    model = blocks(Mlp(), Mlp(), Mlp())
    model[2].body.down.requires_grad_(False)  # pyright: ignore
    found = instances(model, IN_BLOCKS)
    assert found["1.body.down"].region is not found["2.body.down"].region


def test_values_read_past_a_boundary_are_inputs_of_every_call_on_the_way() -> None:
    class Reader(nn.Module):
        def forward(self, held: list[Tensor]) -> Tensor:
            return held[0] + 1

    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Reader()

        def forward(self, held: list[Tensor]) -> Tensor:
            return self.inner(held)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.passes = Passes()

        def forward(self, x: Tensor) -> Tensor:
            return self.passes([x.exp()])

    found = instances(Root(), {})
    assert found["passes"].region.entries == found["passes.inner"].region.entries == ()
    assert len(found["passes"].region.inputs) == len(found["passes.inner"].region.inputs) == 1
