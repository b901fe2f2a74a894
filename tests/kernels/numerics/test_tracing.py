"""The kernels' operators through torch.compile and torch.export, as the functions reach them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.numerics.harness import DEVICE, draw
from tpplan import kernels

OPERATORS = {
    "tpplan.layer_norm.default",
    "tpplan.rms_norm.default",
    "tpplan.residual_layer_norm.default",
    "tpplan.residual_rms_norm.default",
    "tpplan.gelu.default",
    "tpplan.bias_gelu.default",
    "tpplan.gated.default",
    "tpplan.cross_entropy_parts.default",
}


class Everything(nn.Module):
    """Every function once, one after the other."""

    def __init__(self, hidden: int = 48) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(hidden) + 0.5)
        self.bias = nn.Parameter(torch.randn(hidden))

    def forward(self, x: Tensor, residual: Tensor, target: Tensor) -> Tensor:
        shape = x.shape[-1:]
        y = kernels.layer_norm(x, shape, self.weight, self.bias, backend="triton")
        y, residual = kernels.residual_rms_norm(y, residual, shape, self.weight, offset=1.0, backend="triton")
        y = kernels.gelu(y, "tanh", backend="triton") + kernels.bias_gelu(y, self.bias, backend="triton")
        y, residual = kernels.residual_layer_norm(y, residual, shape, self.weight, self.bias, backend="triton")
        y = kernels.swiglu(y, residual, backend="triton") + kernels.geglu(y, residual, backend="triton")
        y = kernels.rms_norm(y, shape, self.weight, cast="before", backend="triton")
        return kernels.cross_entropy(y, target, backend="triton")


@pytest.fixture(autouse=True)
def _compile_anew() -> None:
    torch.compiler.reset()


@pytest.fixture
def arguments() -> tuple[Tensor, Tensor, Tensor]:
    return draw(2, 5, 48), draw(2, 5, 48), torch.randint(0, 48, (2, 5)).to(DEVICE)


def called(graph: torch.fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if "tpplan" in str(node.target)}


def test_torch_compile_keeps_every_operator_in_one_graph(arguments: tuple[Tensor, Tensor, Tensor]) -> None:
    model = Everything().to(DEVICE)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    wanted = [*torch.autograd.grad(model(*arguments), [*model.parameters(), *arguments[:2]])]
    loss = compiled(*arguments)
    found = torch.autograd.grad(loss, [*model.parameters(), *arguments[:2]])
    assert called(graphs[0].graph) == OPERATORS
    torch.testing.assert_close(loss, model(*arguments), rtol=0, atol=0)
    for ours, its in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_torch_compile_takes_a_dynamic_batch(arguments: tuple[Tensor, Tensor, Tensor]) -> None:
    model = Everything().to(DEVICE)
    compiles = Counter[str]()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiles["graphs"] += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for rows in (4, 7):
        first = rows == 4
        x, target = draw(2, rows, 48), torch.randint(0, 48, (2, rows)).to(DEVICE)
        before = compiles["graphs"]
        torch.testing.assert_close(compiled(x, x, target), model(x, x, target), rtol=0, atol=0)
        assert (compiles["graphs"] > before) == first


def test_torch_export_keeps_every_operator(arguments: tuple[Tensor, Tensor, Tensor]) -> None:
    model = Everything().to(DEVICE)
    exported = torch.export.export(model, tuple(x.detach() for x in arguments))
    assert called(exported.graph) == OPERATORS
    torch.testing.assert_close(exported.module()(*arguments), model(*arguments), rtol=0, atol=0)


@pytest.mark.slow
def test_checkpointing_recomputes_the_same(arguments: tuple[Tensor, Tensor, Tensor]) -> None:
    from torch.utils.checkpoint import checkpoint

    model = Everything().to(DEVICE)
    (wanted,) = torch.autograd.grad(model(*arguments), [arguments[0]])
    again: Any = checkpoint(model, *arguments, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again, [arguments[0]])[0], wanted)
