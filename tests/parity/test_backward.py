"""Code in the backward that torch didn't derive: proved equal, moved to where it is equal, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tpplan
from tpplan.compiler.ir.layout import Collective
from tpplan.compiler.ir.program import Program
from tpplan.parity import verify_program

WIDTH, INNER = 8, 16
Transform = Callable[[Tensor], Tensor]


def inputs() -> tuple[Tensor]:
    torch.manual_seed(1)
    return (torch.randn(3, 4, WIDTH, dtype=torch.float64, requires_grad=True),)


def function(backward: Callable[[Any, Tensor], Any], forward: Callable[[Tensor], Tensor] | None = None) -> Transform:
    """A function that computes `forward`, by itself the identity, and whose backward is `backward` of (x, gradient)."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone() if forward is None else forward(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return backward(ctx.saved_tensors[0], gradients[0])

    return Made.apply  # pyright: ignore


def hook(change: Callable[[Tensor], Tensor | None]) -> Transform:
    def hooked(x: Tensor) -> Tensor:
        x = x * 1
        if x.requires_grad:
            x.register_hook(change)
        return x

    return hooked


class Split(nn.Module):
    """The function stands over split features."""

    def __init__(self, function: Transform) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.function(self.up(x))))


class Shared(nn.Module):
    """The function stands over a replicated value that two split layers read: its gradient is partial."""

    def __init__(self, function: Transform) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        h = self.function(x)
        return self.down(torch.tanh(self.first(h)) * self.second(h))


class Stream(nn.Module):
    """The function stands in a stream whose sequence is split between its layers."""

    def __init__(self, function: Transform) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.inner, self.last = nn.LayerNorm(WIDTH), Split(torch.tanh), nn.LayerNorm(WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.function(self.inner(self.norm(x))))


class Bare(nn.Module):
    """No module boundary lies between the split product and the function."""

    def __init__(self, function: Transform) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.back = nn.Parameter(torch.randn(WIDTH, INNER)), nn.Parameter(torch.randn(INNER, WIDTH))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x @ self.weight) @ self.back


SPLIT = {"up": "colwise", "down": "rowwise"}
SHARED = {"{first,second}": "colwise", "down": "rowwise"}
STREAM = {"norm": "sequence", "inner.up": "colwise", "inner.down": "rowwise", "last": "sequence"}
BARE = {"weight": "colwise", "back": "rowwise"}


def compiled(model: nn.Module, rules: dict[str, Any], size: int) -> Program:
    return tpplan.compile_plan(model.double(), {"version": 1, "modules": rules}, size, inputs())


def prove(model: nn.Module, rules: dict[str, Any], size: int) -> Program:
    program = compiled(model, rules, size)
    report = verify_program(model, program, (inputs(), {}))
    assert report.ok, report.problems
    return program


def gathers(program: Program) -> int:
    ways = [way for _, reshard in program.reshards() for way in (reshard.forward, reshard.backward)]
    return ways.count(Collective.ALL_GATHER)


class Several(torch.autograd.Function):
    """Two results, one of which nobody reads, one that has no gradient; and an argument without one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, other: Tensor | None) -> Any:
        result, mask = x * factor, x > 0
        ctx.factor = factor
        ctx.save_for_backward(result, mask)
        ctx.mark_non_differentiable(mask)
        return result, mask, x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        result, mask = ctx.saved_tensors
        return gradients[0] * ctx.factor * mask + gradients[2] + result * gradients[0], None, None


class Shaped(torch.autograd.Function):
    """It remembers shapes, and makes zeros of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x[..., ::1].exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        whole = torch.zeros(ctx.shape, dtype=gradients[0].dtype, device=gradients[0].device)
        return whole + gradients[0].view(ctx.shape)


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * (ctx.saved_tensors[0].abs() < 2)


def printing(gradient: Tensor) -> None:
    repr((gradient.norm(), gradient.shape))


# What is right for a part of the features; none of it makes a gather.
ELEMENTWISE: dict[str, Transform] = {
    "straight-through": function(lambda x, g: g, torch.round),
    "straight-through-clipped": function(lambda x, g: g * (x.abs() <= 1), torch.sign),
    "reversed": function(lambda x, g: -0.5 * g),
    "clipped": function(lambda x, g: g.clamp(-0.01, 0.01)),
    "sign": function(lambda x, g: g.sign()),
    "in-place": function(lambda x, g: g.clone().mul_(2)),
    "none-differentiable": lambda x: Several.apply(x, 2.0, None)[0],  # pyright: ignore
    "both-results": lambda x: (lambda made: made[0] + made[2])(Several.apply(x, 2.0, None)),  # pyright: ignore
    "shapes": Shaped.apply,  # pyright: ignore
    "new-style": NewStyle.apply,  # pyright: ignore
    "reentrant": lambda x: checkpoint(torch.sin, x, use_reentrant=True),  # pyright: ignore
    "checkpointed": lambda x: checkpoint(function(lambda x, g: g * 3), x, use_reentrant=False),  # pyright: ignore
    "hook-that-prints": hook(printing),
    "hook-that-doubles": hook(lambda g: 2 * g),
    "hook-that-clips": hook(lambda g: g.clamp(-0.01, 0.01)),
    "row-sums": function(lambda x, g: g * x.shape[1] + g.sum(1, keepdim=True)),
}

# What needs all features.
ACROSS: dict[str, Transform] = {
    "norm": function(lambda x, g: g / g.norm(dim=-1, keepdim=True)),
    "whole-norm": function(lambda x, g: g / (1 + g.norm())),
    "size": function(lambda x, g: g / x.shape[-1]),
    "count": function(lambda x, g: g / g.numel()),
    "mean": function(lambda x, g: g - g.mean(-1, keepdim=True)),
    "constant": function(lambda x, g: g * torch.tensor(1.0 / g.shape[-1], dtype=g.dtype, device=g.device)),
    "flipped": function(lambda x, g: g.flip(-1)),
    "cumulated": function(lambda x, g: g.cumsum(2)),
    "softmax": function(lambda x, g: g.softmax(-1)),
    "hook-norm": hook(lambda g: g / g.norm()),
    "hook-mean": hook(lambda g: g - g.mean(-1, keepdim=True)),
    "hook-size": hook(lambda g: g / g.shape[-1]),
    "branch": function(lambda x, g: g * 2 if g.shape[-1] > 8 else g),
}

# What isn't linear in the gradient, so that it is wrong for a term of a sum, and what is.
BENT = ("straight-through-clipped", "reversed", "hook-that-doubles", "none-differentiable")
CLAMPS = ("clipped", "sign", "hook-that-clips")


class Softmax(torch.autograd.Function):
    """Masked scores, as DeBERTa computes them: the backward is torch's own formula for a softmax."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, hidden: Tensor) -> Tensor:
        lowest = torch.tensor(torch.finfo(scores.dtype).min)
        output = torch.softmax(scores.masked_fill(hidden, lowest), -1).masked_fill_(hidden, 0)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (output,) = ctx.saved_tensors
        return torch._softmax_backward_data(gradients[0], output, -1, output.dtype), None  # pyright: ignore


class Attention(nn.Module):
    """Heads whose scores go through a function with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, -1, WIDTH // 4).transpose(1, 2) for f in (self.query, self.key, self.value))
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores: Any = Softmax.apply(q @ k.transpose(-1, -2), hidden)  # pyright: ignore
        return self.out((scores @ v).transpose(1, 2).reshape(batch, length, -1))


@pytest.mark.parametrize("size", [2, 4])
def test_heads_whose_softmax_has_a_backward_of_its_own(size: int) -> None:
    prove(nn.Sequential(Attention()), {"*.{query,key,value}": "colwise", "*.out": "rowwise"}, size)


class FewKeys(nn.Module):
    """Queries whose keys, fewer than the ranks, go through a function: their gradients are partial among some."""

    def __init__(self, function: Transform) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, INNER // 2) for _ in range(2))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.query, self.key, self.value))
        made = functional.scaled_dot_product_attention(q, self.function(k), v, enable_gqa=True)
        return self.out(made.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("name", ["doubled", "kept", "bent", *CLAMPS])
def test_the_gradient_of_keys_that_ranks_share_meets_what_is_linear_alone(name: str) -> None:
    linear: dict[str, Callable[[Any, Tensor], Any]] = {
        "doubled": lambda x, g: 2 * g * x,
        "kept": lambda x, g: x * 1,
        "bent": lambda x, g: g.clamp(-0.01, 0.01) * g,
    }
    model = FewKeys(function(linear[name]) if name in linear else (ELEMENTWISE | ACROSS)[name])
    rules = {"*{query,key,value}": "colwise", "out": "rowwise"}
    if name == "doubled":
        assert gathers(prove(model, rules, 4)) == 0
        return
    with pytest.raises(tpplan.CompileError, match="TP128"):
        prove(model, rules, 4)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.one_in(5)
def test_what_is_right_for_a_part_stays_split(name: str, size: int) -> None:
    assert gathers(prove(Split(ELEMENTWISE[name]), SPLIT, size)) == 0


@pytest.mark.one_in(6)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ACROSS)
def test_what_needs_all_features_gets_all(name: str, size: int) -> None:
    program = prove(Split(ACROSS[name]), SPLIT, size)
    assert gathers(program) > 0
    assert {"TP104"} <= {finding.code for finding in program.diagnostics}


@pytest.mark.parametrize("name", ACROSS)
def test_what_needs_all_features_is_refused_where_no_gather_fits(name: str) -> None:
    with pytest.raises(tpplan.CompileError) as caught:
        compiled(Bare(ACROSS[name]), BARE, 2)
    (found,) = caught.value.diagnostics
    assert found.code == "TP128" and "test_backward.py" in "".join(found.notes), found


@pytest.mark.one_in(6)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", [*BENT, *CLAMPS, "norm"])
def test_a_partial_gradient_meets_what_is_linear_alone(name: str, size: int) -> None:
    program = prove(Shared((ELEMENTWISE | ACROSS)[name]), SHARED, size)
    moved = [reshard.path for module, reshard in program.reshards() if module.name == ""]
    assert bool(moved) == (name in BENT)  # else the sum comes before it


@pytest.mark.parametrize("name", [*ELEMENTWISE, *ACROSS])
@pytest.mark.one_in(5)
def test_over_a_split_sequence(name: str) -> None:
    prove(Stream((ELEMENTWISE | ACROSS)[name]), STREAM, 2)


def test_a_function_with_parameters() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.t() + bias

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            (g,) = gradients
            return g @ weight, g.flatten(0, 1).t() @ x.flatten(0, 1), g.sum((0, 1))

    class Layer(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return Product.apply(input, self.weight, self.bias)  # pyright: ignore

    model = Split(torch.tanh)
    model.up = Layer(WIDTH, INNER)
    prove(model, SPLIT, 2)
    model = Split(torch.tanh)
    model.down = Layer(INNER, WIDTH)
    with pytest.raises(tpplan.CompileError, match=r"TP128.*own product"):
        compiled(model, SPLIT, 2)


class NormWithFactor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        class Norm(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
                scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
                ctx.save_for_backward(x, weight, scale)
                return x * scale * weight

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Any:
                x, weight, scale = ctx.saved_tensors
                inner = gradients[0] * weight
                mean = (inner * x).mean(-1, keepdim=True)
                return (inner - x * mean * scale.pow(2)) * scale, (gradients[0] * x * scale).sum((0, 1))

        return Norm.apply(x, self.weight)  # pyright: ignore


@pytest.mark.parametrize("rules", [STREAM, {"inner.up": "colwise", "inner.down": "rowwise"}])
def test_a_norm_with_its_own_backward(rules: dict[str, Any]) -> None:
    model = Stream(torch.tanh)
    model.norm, model.last = NormWithFactor(), NormWithFactor()  # pyright: ignore
    prove(model, rules, 2)


def scaled(module: nn.Module, given: Any, taken: Any) -> Any:
    return tuple(None if g is None else 3 * g for g in given)


def normalized(module: nn.Module, given: Any, taken: Any) -> Any:
    return tuple(None if g is None else g / g.norm(dim=-1, keepdim=True) for g in given)


def scaled_before(module: nn.Module, taken: Any) -> Any:
    return tuple(3 * g for g in taken)


def normalized_before(module: nn.Module, taken: Any) -> Any:
    return tuple(g / (g.norm() + 1) for g in taken)


def printing_module(module: nn.Module, given: Any, taken: Any) -> None:
    repr((given, taken))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("place", ["up", "function", "down", ""])
@pytest.mark.parametrize("how", [scaled, normalized, scaled_before, normalized_before, printing_module])
def test_hooks_of_modules(how: Any, place: str) -> None:
    model = Split(nn.Tanh())
    module = model.get_submodule(place)
    if "before" in how.__name__:
        module.register_full_backward_pre_hook(how)
    else:
        module.register_full_backward_hook(how)
    prove(model, SPLIT, 2)


def test_a_hook_that_changes_the_result_of_a_module() -> None:
    model = Split(torch.tanh)
    model.up.register_forward_hook(lambda module, args, result: ELEMENTWISE["clipped"](result) * 2)
    assert gathers(prove(model, SPLIT, 2)) == 0
    model = Split(torch.tanh)
    model.up.register_forward_hook(lambda module, args, result: ACROSS["norm"](result) * 2)
    assert gathers(prove(model, SPLIT, 2)) > 0


def test_equal_layers_with_other_backwards_are_told_apart() -> None:
    model = nn.Sequential(Split(ELEMENTWISE["reversed"]), Split(ACROSS["norm"]), Split(ELEMENTWISE["reversed"]))
    program = prove(model, {f"*.{name}": style for name, style in SPLIT.items()}, 2)
    gathered = {module.name[0] for module, r in program.reshards() if Collective.ALL_GATHER in (r.forward, r.backward)}
    assert gathered == {"1"}


def test_functions_inside_of_a_reentrant_checkpoint_are_refused() -> None:
    inner = ELEMENTWISE["reversed"]
    with pytest.raises(tpplan.CompileError, match=r"TP128.*use_reentrant(?s:.*)help: pass `use_reentrant=False`"):
        compiled(Split(lambda x: checkpoint(inner, x, use_reentrant=True)), SPLIT, 2)  # pyright: ignore
    prove(Split(lambda x: checkpoint(inner, x, use_reentrant=False)), SPLIT, 2)  # pyright: ignore


@pytest.mark.parametrize(
    "asked",
    [lambda x: torch.is_grad_enabled(), lambda x: (x * 1).requires_grad],
    ids=["is_grad_enabled", "requires_grad"],
)
def test_a_reentrant_checkpoint_that_takes_another_way_in_the_backward_is_refused(
    asked: Callable[[Tensor], bool],
) -> None:
    def inner(x: Tensor) -> Tensor:
        return (x * 2 if asked(x) else x).tanh()

    with pytest.raises(tpplan.CompileError, match=r"TP128.*use_reentrant.*something else with gradients"):
        compiled(Split(lambda x: checkpoint(inner, x, use_reentrant=True)), SPLIT, 2)  # pyright: ignore


def test_a_reentrant_checkpoint_may_make_constants() -> None:
    def inner(x: Tensor) -> Tensor:
        beside = torch.zeros_like(x) if torch.is_grad_enabled() else x + 1  # nobody reads it
        return (x @ torch.ones(INNER, INNER, dtype=x.dtype) * torch.tensor(0.1), beside)[0]

    prove(Split(lambda x: checkpoint(inner, x, use_reentrant=True)), SPLIT, 2)  # pyright: ignore


def test_hooks_that_the_sharded_model_would_not_have_are_refused() -> None:
    model = Split(torch.tanh)
    model.up.weight.register_hook(lambda g: g * 2)  # pyright: ignore
    with pytest.raises(tpplan.CompileError, match=r"TP112.*`up.weight` has a hook on its gradient"):
        compiled(model, SPLIT, 2)
    model = Split(torch.tanh)
    model.up.register_forward_hook(lambda m, *_: m.weight.register_post_accumulate_grad_hook(printing) and None)  # pyright: ignore
    with pytest.raises(tpplan.CompileError, match=r"TP128.*don't accumulate gradients"):
        compiled(model, SPLIT, 2)
    model = Split(nn.Tanh())
    model.function.register_backward_hook(scaled)  # pyright: ignore
    assert gathers(prove(model, SPLIT, 2)) > 0


def test_a_custom_operator_with_a_backward() -> None:
    @torch.library.custom_op("tpplan_test::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    doubled.register_fake(lambda x: torch.empty_like(x))
    doubled.register_autograd(lambda ctx, g: g.clamp(-0.01, 0.01))
    program = prove(Shared(lambda x: doubled(x)), SHARED, 2)
    assert not [reshard for module, reshard in program.reshards() if module.name == ""]
