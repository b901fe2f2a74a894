"""Norms that are computed together with the sum before them: outputs, every gradient and the collectives stay.

On CPU tensors the kernels' operators run their formulas, forward and backward.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.kernels.launches import counted
from tests.models.tiny import tiny_model
from tpplan import kernels
from tpplan.compat.dtensors import local_of
from tpplan.compat.process_groups import fake_process_group
from tpplan.compiler.ir.program import KernelUse
from tpplan.runtime.bodies.fused_sums import ResidualNorm

ASKED = "\nkernels: {residual_norm: triton}\n"
HIDDEN = 16


@pytest.fixture
def launched() -> Iterator[Counter[str]]:
    """As where kernels run: how often each of the two functions is called on numbers."""
    with counted(kernels, "residual_layer_norm", "residual_rms_norm") as calls:
        yield calls


def fused_in(program: tpplan.Program) -> list[str]:
    return [use.module for use in program.kernels if use.kind == "residual_norm" and not use.refused]


@pytest.mark.one_in(12)
@pytest.mark.filterwarnings("error:.*together with the sum:UserWarning")
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("suffix", ["", "-sequence"])
@pytest.mark.parametrize(
    ("name", "norms"),
    [
        ("llama", [f"model.layers.{i}.post_attention_layernorm" for i in (0, 1)]),
        ("gpt2", [f"transformer.h.{i}.ln_2" for i in (0, 1)]),
        ("bert", [f"encoder.layer.{i}.{part}.LayerNorm" for i in (0, 1) for part in ("attention.output", "output")]),
    ],
    ids=lambda held: held if isinstance(held, str) else "",
)
def test_outputs_gradients_and_collectives_stay(
    name: str, norms: list[str], suffix: str, tp: int, launched: Counter[str]
) -> None:
    model, keywords = tiny_model(name)
    plan = tpplan.load_plan(f"version: 1\nextends: {name}{suffix}{ASKED}")
    program = tpplan.compile_plan(model, plan, tp, keywords)
    assert fused_in(program) == norms
    assert not [finding for finding in program.diagnostics if finding.code == "TP150"]
    assert (
        program.count_collectives() == tpplan.compile_plan(model, f"{name}{suffix}", tp, keywords).count_collectives()
    )
    report = tpplan.verify(model.float(), plan, tp, keywords, dtype=torch.float32)
    assert report.ok and not report.notes, report
    assert sum(launched.values()) >= tp * len(norms)


def test_what_the_kernel_gives_is_what_the_model_goes_on_with(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock: Any = kernels.residual_rms_norm
    model, keywords = tiny_model("llama")
    plan = tpplan.load_plan(f"version: 1\nextends: llama{ASKED}")
    for wrong in ((1.01, 1.0), (1.0, 1.01)):

        def call(*given: Any, wrong: tuple[float, float] = wrong, **keywords: Any) -> Any:
            return tuple(held * factor for held, factor in zip(stock(*given, **keywords), wrong, strict=True))

        monkeypatch.setattr(kernels, "residual_rms_norm", call)
        assert not tpplan.verify(model.float(), plan, 2, keywords, dtype=torch.float32).ok


class Block(nn.Module):
    """A pre-norm block; `add` is how it adds."""

    def __init__(self, add: Callable[[Tensor, Tensor], Tensor] = torch.add) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.RMSNorm(HIDDEN, eps=1e-6)
        self.mix, self.up, self.down = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        x = self.add(x, self.mix(self.first(x)))
        return x + self.down(self.up(self.second(x)).relu())


class Stack(nn.Module):
    def __init__(self, add: Callable[[Tensor, Tensor], Tensor] = torch.add, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(add) for _ in range(2))
        self.reentrant = reentrant
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


PLAN: dict[str, Any] = {
    "version": 1,
    "modules": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    "kernels": {"residual_norm": "triton"},
}
X = (3, 5, HIDDEN)


def uses_of(model: nn.Module) -> dict[str, KernelUse]:
    return {use.module: use for use in tpplan.compile_plan(model, PLAN, 2, (torch.zeros(X),)).kernels}


def both(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A stock model, and one that runs by its program, on one rank."""
    torch.manual_seed(0)
    stock = copy.deepcopy(model)
    with fake_process_group(1):
        return stock, tpplan.parallelize(model, PLAN, inputs=(torch.randn(X),))


def compared(stock: nn.Module, sharded: nn.Module, again: Callable[[nn.Module], Any] | None = None) -> None:
    """Outputs and every gradient."""
    x = torch.randn(X)
    results: list[Any] = []
    for model in (stock, sharded):
        given = x.clone().requires_grad_()
        made = model(given) if again is None else again(model)(given)
        (made * torch.arange(made.numel()).reshape(made.shape).cos()).sum().backward()
        results += [made, given.grad]
    torch.testing.assert_close(results[2], results[0])
    torch.testing.assert_close(results[3], results[1], rtol=1e-4, atol=1e-5)
    for (name, expected), parameter in zip(stock.named_parameters(), sharded.parameters(), strict=True):
        assert expected.grad is not None and parameter.grad is not None, name
        torch.testing.assert_close(local_of(parameter.grad), expected.grad, rtol=1e-4, atol=1e-4, msg=name)


def summed(x: Tensor, y: Tensor) -> Tensor:
    """The norm reads the second of two sums, among others that don't count."""
    return (x + y) + (y * 2 + 1 + y[:1])


@pytest.mark.filterwarnings("error:.*together with the sum:UserWarning")
@pytest.mark.parametrize("add", [torch.add, lambda x, y: x + y, lambda x, y: y.add(x), summed])
def test_every_spelling_of_a_sum(add: Callable[[Tensor, Tensor], Tensor], launched: Counter[str]) -> None:
    stock, sharded = both(Stack(add))
    launched.clear()
    with fake_process_group(1):
        compared(stock, sharded)
    assert launched == {"residual_rms_norm": 2}


@pytest.mark.filterwarnings("error:.*together with the sum:UserWarning")
@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_without_gradients(around: Callable[[], Any], launched: Counter[str]) -> None:
    stock, sharded = both(Stack())
    launched.clear()
    with fake_process_group(1), around():
        x = torch.randn(X)
        torch.testing.assert_close(sharded(x), stock(x))
    assert launched == {"residual_rms_norm": 2}


@pytest.mark.filterwarnings("error:.*together with the sum:UserWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_that_are_computed_again_in_the_backward(reentrant: bool, launched: Counter[str]) -> None:
    stock, sharded = both(Stack(reentrant=reentrant))
    launched.clear()
    with fake_process_group(1):
        compared(stock, sharded)
    assert launched["residual_rms_norm"] == 4


class Parts(Block):
    """Checkpoints a part of its body: what begins with the norm, or what ends with the sum."""

    def __init__(self, head: bool, reentrant: bool) -> None:
        super().__init__()
        self.head, self.reentrant = head, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.begin, x, use_reentrant=self.reentrant) if self.head else self.begin(x)
        tail = self.end(x) if self.head else checkpoint(self.end, x, use_reentrant=self.reentrant)
        return x + tail

    def begin(self, x: Tensor) -> Tensor:
        return x + self.mix(self.first(x))

    def end(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.second(x)).relu())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("head", [True, False])
def test_a_checkpoint_between_the_sum_and_the_norm(head: bool, reentrant: bool, launched: Counter[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock, sharded = both(in_blocks(Parts(head, reentrant)))
        with fake_process_group(1):
            compared(stock, sharded)
            compared(stock, sharded)


def test_a_hook_that_changes_what_the_norm_gets_is_proved_anew(launched: Counter[str]) -> None:
    stock, sharded = both(Stack())
    for model in (stock, sharded):
        norm: nn.Module = model.get_submodule("blocks.1.second")
        norm.register_forward_pre_hook(lambda module, given: (given[0] * 3,))
    with fake_process_group(1):
        compared(stock, sharded)
        compared(stock, sharded)


def test_a_norm_that_gets_another_tensor_computes_its_own_and_says_so_once(launched: Counter[str]) -> None:
    module = nn.RMSNorm(HIDDEN)
    use = KernelUse("norm", "residual_norm", "triton", "float32", weight="weight", parts=("",), eps=1e-6, sum=0)
    norm = ResidualNorm(use, module, {"norm.weight": lambda held: held})
    a, b = torch.randn(2, HIDDEN), torch.randn(2, HIDDEN)
    norm.begin()
    total = norm.add(a, b)
    torch.testing.assert_close(norm.body(pytest.fail, (total,), {}), module(a + b))
    changes: list[Callable[[Tensor], Tensor]] = [lambda x: x + 1, lambda x: x.add_(1), lambda x: x.view_as(x)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for change in changes:
            x = change(norm.add(a, b).detach())
            torch.testing.assert_close(norm.body(module, (x,), {}), module(x))
        assert norm.serves(a, b)
        with torch.no_grad():
            assert not norm.serves(a, b)  # inside of what records no gradients, as a checkpoint
        norm.end()
        assert norm.body(lambda x: "the module's own", (total,), {}) == "the module's own"
        torch.testing.assert_close(norm.body(module, (a,), {}), module(a))  # called alone
    (told,) = caught
    assert "`norm` isn't computed together with the sum" in str(told.message)


def test_a_sum_that_was_written_to_since_is_normalized_anew(launched: Counter[str]) -> None:
    stock, sharded = both(Stack())

    def doubled(module: nn.Module, given: tuple[Tensor]) -> None:
        given[0].mul_(2)

    for model in (stock, sharded):
        model.get_submodule("blocks.0.second").register_forward_pre_hook(doubled)
    with fake_process_group(1), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.randn(X)
        torch.testing.assert_close(sharded(x), stock(x))


@pytest.mark.filterwarnings("error:.*together with the sum:UserWarning")
def test_the_norm_alone_and_a_block_alone(launched: Counter[str]) -> None:
    stock, sharded = both(Stack())
    launched.clear()
    with fake_process_group(1), torch.no_grad():
        x = torch.randn(X)
        for name in ("blocks.0.second", "blocks.0"):
            torch.testing.assert_close(sharded.get_submodule(name)(x), stock.get_submodule(name)(x))
    assert launched["residual_rms_norm"] == 1


@pytest.mark.filterwarnings("error:.*together with the sum:UserWarning")
def test_a_compiled_model_is_left_to_its_compiler(launched: Counter[str]) -> None:
    stock, sharded = both(Stack())
    compiled = torch.compile(sharded, backend="aot_eager")
    with fake_process_group(1):
        compared(stock, sharded)
        launched.clear()
        stock.zero_grad()
        sharded.zero_grad()
        compared(stock, sharded, lambda model: compiled if model is sharded else model)
    assert not launched


class Twice(Block):
    """Two norms of one sum."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        return x + self.down(self.up(self.second(x)).relu()) + self.first(x)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.first(x))
        y = self.second(x)
        x += 1
        return x + self.down(self.up(y).relu())


class Elsewhere(Block):
    """The sum is made by another body."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.second(x)).relu())


def in_blocks(block: nn.Module) -> nn.Module:
    model = Stack()
    model.blocks = nn.ModuleList([block])
    return model


@pytest.mark.parametrize(
    ("block", "norm", "why"),
    [
        (Twice(), "first", "`blocks.0.second` reads the same sum"),
        (InPlace(), "second", "the sum is written to"),
        (Elsewhere(), "second", "what it normalizes isn't a sum in the body of the module that calls it"),
        (Block(), "first", "what it normalizes isn't a sum in the body of the module that calls it"),
    ],
    ids=["two norms", "in place", "elsewhere", "of an argument"],
)
def test_a_norm_that_isn_t_fused_says_why_and_keeps_its_own_kernel(block: nn.Module, norm: str, why: str) -> None:
    use = uses_of(in_blocks(block))[f"blocks.0.{norm}"]
    assert use.kind in ("layer_norm", "rms_norm") and not use.refused
    assert use.note == f"not fused with the sum before it: {why}"


def test_a_norm_whose_input_is_resharded_stays_apart() -> None:
    plan = PLAN | {"modules": PLAN["modules"] | {"blocks.0.second": {"style": "sequence", "input": "sequence"}}}
    program = tpplan.compile_plan(Stack(), plan, 2, (torch.zeros(3, 6, HIDDEN),))
    (use,) = (use for use in program.kernels if use.module == "blocks.0.second")
    assert use.note == "not fused with the sum before it: its input is resharded"
    assert fused_in(program) == ["blocks.1.second"]


def test_a_plan_that_asks_in_vain_is_told_its_line_and_why() -> None:
    model = in_blocks(Elsewhere())
    text = (
        'version: 1\nmodules: {"blocks.*.up": colwise, "blocks.*.down": rowwise}\nkernels:\n  residual_norm: triton\n'
    )
    program = tpplan.compile_plan(model, tpplan.load_plan(text), 2, (torch.zeros(X),))
    (finding,) = (found for found in program.diagnostics if found.code == "TP150")
    assert finding.span is not None and finding.span.start.line == 4
    assert "isn't a sum in the body" in finding.message


def test_a_pattern_says_which_norms() -> None:
    plan = PLAN | {"kernels": {"blocks.1": {"residual_norm": "triton"}}}
    program = tpplan.compile_plan(Stack(), plan, 2, (torch.zeros(X),))
    assert fused_in(program) == ["blocks.1.second"]


def test_without_kernels_nothing_is_changed() -> None:
    if kernels.available("cpu").name == "triton":
        pytest.skip("kernels run here, in Triton's interpreter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock, sharded = both(Stack())
    assert "residual_norm" not in str(sharded)
    with fake_process_group(1):
        compared(stock, sharded)
