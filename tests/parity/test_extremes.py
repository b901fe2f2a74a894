"""The largest entries of split features, as of rounded activations: each rank finds its own, and they are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.marking import in_turns, slow_but
from tests.runtime.simulated import Call, on_ranks, stepped, worst
from tests.runtime.world import Member, world
from tpplan.api import suggest_text
from tpplan.plan import CompileError

WIDTH, INNER = 16, 32
RULES = {"inner.up": "colwise", "inner.down": "rowwise"}


def straight(x: Tensor, rounded: Tensor) -> Tensor:
    """`rounded`, with the gradient of `x`."""
    return x + (rounded - x).detach()


def by_token(x: Tensor) -> Tensor:
    scale = 127 / x.abs().max(-1, keepdim=True).values.clamp(min=1e-5)
    return straight(x, (x * scale).round() / scale)


def by_tensor(x: Tensor) -> Tensor:
    scale = x.abs().max() / 127
    return straight(x, (x / scale).round() * scale)


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True).float()
    return x / scale.add(1)


def from_the_least(x: Tensor) -> Tensor:
    least = x.amin((1, 2), keepdim=True)
    return straight(x, (x - least.double()).round())


def joined(x: Tensor) -> Tensor:
    """Viewed before anything else is done with it."""
    largest = x.detach().abs().amax(-1)
    return x / largest.reshape(*x.shape[:2], 1)


class Rounded(nn.Module):
    """Features that are rounded before they are contracted."""

    def __init__(self, rounds: Callable[[Tensor], Tensor], inner: int = INNER) -> None:
        super().__init__()
        self.up, self.down, self.rounds = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH), rounds

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.rounds(functional.gelu(self.up(x))))


class Around(nn.Module):
    """A stream, and a body of its own for what is done with features."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = inner, nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.inner(x))


class OneBit(nn.Linear):
    """Rounds its weight and its input itself."""

    def forward(self, input: Tensor) -> Tensor:
        scale = self.weight.abs().mean().clamp(min=1e-5)
        weight = straight(self.weight, (self.weight / scale).round().clamp(-1, 1) * scale)
        return functional.linear(by_token(input), weight, self.bias)


def tokens(batch: int, length: int) -> Call:
    return (torch.randn(batch, length, WIDTH, dtype=torch.float64, requires_grad=True),), {}


@pytest.mark.parametrize(
    ("rounds", "tp"), in_turns([by_token, by_tensor, without_gradient, from_the_least, joined], [2, 4])
)
@pytest.mark.one_in(3)
def test_a_number_for_each_row_is_exchanged(rounds: Callable[[Tensor], Tensor], tp: int) -> None:
    model, calls = Around(Rounded(rounds)).double(), [tokens(3, 4), tokens(2, 6)]
    program = tpplan.compile_plan(model, {"version": 1, "modules": RULES}, tp, calls[0][0])
    assert program.count_collectives() == {"all-gather": 1, "all-reduce": 2}
    assert max(worst(model, RULES, tp, calls[0], calls)) < 1e-12


@pytest.mark.parametrize("tp", slow_but([2], [2, 4]))
def test_layers_that_round_what_they_get_are_rows(tp: int) -> None:
    inner = nn.Sequential(OneBit(WIDTH, INNER), nn.GELU(), OneBit(INNER, WIDTH, bias=False))
    model, call = Around(inner).double(), tokens(3, 4)
    plan = suggest_text(model, tp, inputs=call[0])
    assert "inner.0: colwise" in plan and "inner.2: rowwise" in plan
    report = tpplan.verify(model, plan, tp, call[0])
    assert report.ok, report.problems


@pytest.mark.parametrize("inner", slow_but([6], [5, 6]))
def test_each_rank_has_a_feature_that_may_be_the_largest(inner: int) -> None:
    """Of 5 or 6 features each of four ranks has one or two, where chunks would leave the last without any."""
    model, call = Around(Rounded(by_token, inner)).double(), tokens(3, 4)
    plan = {"version": 1, "modules": RULES}
    for tp in (2, 4):
        report = tpplan.verify(model, plan, tp, call[0])
        assert report.ok, report.problems
        assert tpplan.compile_plan(model, plan, tp, call[0]).count_collectives()["reduce-scatter"] == 0


def scaled(x: Tensor) -> Tensor:
    return x / x.abs().amax(-1, keepdim=True)


def test_where_the_gradient_is_needed_the_layers_stay_whole() -> None:
    model, call = Around(Rounded(scaled)).double(), tokens(3, 4)
    with pytest.raises(CompileError, match="TP123"):
        suggest_text(model, 2, inputs=call[0])
    assert max(worst(model, RULES, 2, call, [call])) < 1e-12


def where_it_is(x: Tensor) -> Tensor:
    return x + x.detach().max(-1, keepdim=True).indices


def test_where_it_is_no_rank_knows() -> None:
    model, call = Around(Rounded(where_it_is)).double(), tokens(3, 4)
    assert "rowwise" not in suggest_text(model, 2, inputs=call[0])
    assert max(worst(model, RULES, 2, call, [call])) < 1e-12


class Noting(Rounded):
    """Leaves the largest entry in an attribute."""

    largest: Tensor

    def forward(self, x: Tensor) -> Tensor:
        made = functional.gelu(self.up(x))
        self.largest = made.detach().amax()
        return self.down(made)


def test_what_is_left_behind_is_the_largest_of_all() -> None:
    model, call = Around(Noting(by_token)).double(), tokens(3, 4)
    try:
        program = tpplan.compile_plan(model, {"version": 1, "modules": RULES}, 2, call[0])
    except CompileError as error:
        assert error.diagnostics[0].code == "TP107"
    else:
        assert program.count_collectives()["all-gather"]


# -- in the backward of a function ------------------------------------------------------------------------------------
def rounded(x: Tensor, dim: int | None = None) -> Tensor:
    """`x`, rounded by its largest entry, or by those along a dim."""
    scale = (x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)) / 127
    return (x / scale).round() * scale


class Product(torch.autograd.Function):
    """A product of rounded operands, whose derivatives are products of rounded gradients, as training in float8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_row = by_row
        dim = -1 if by_row else None
        return rounded(x, dim) @ rounded(weight, dim).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        inner, outer = (-1, 0) if ctx.by_row else (None, None)
        rows, gradient = x.flatten(0, 1), gradients[0].flatten(0, 1)
        back = rounded(gradient, inner) @ rounded(weight, outer)
        return back.view_as(x), rounded(gradient, outer).t() @ rounded(rows, outer), None


class InProducts(nn.Linear):
    """A layer of rounded products."""

    by_row = False

    def forward(self, input: Tensor) -> Tensor:
        made = Product.apply(input, self.weight, self.by_row)
        return made if self.bias is None else made + self.bias  # pyright: ignore


class InProductsByRow(InProducts):
    by_row = True


def coded(x: Tensor, by_row: bool = True) -> tuple[Tensor, Tensor]:
    """Codes in float8, and a scale for each row, or one."""
    largest = x.abs().amax(-1, keepdim=True) if by_row else x.abs().max()
    scale = (largest / 448).float()
    return (x / scale).to(torch.float8_e4m3fn).contiguous(), scale


class Kernels(torch.autograd.Function):
    """As `Product`, by the kernel; one scale beside those of rows is repeated, and both come after the product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *_: object) -> Tensor:
        ctx.save_for_backward(x, weight)
        (codes, scale), (by, theirs) = coded(x.flatten(0, 1)), coded(weight)
        made = torch.ops.aten._scaled_mm.default(codes, by.t(), scale, theirs.t(), out_dtype=torch.float32)
        return made.to(x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        rows, gradient = x.flatten(0, 1), gradients[0].flatten(0, 1)
        (codes, scale), (by, one) = coded(gradient), coded(weight, False)
        columns, ones = one.repeat(weight.shape[1]).reshape(1, -1), scale.new_ones(())
        back = torch.ops.aten._scaled_mm.default(codes, by.t().contiguous().t(), ones, ones, out_dtype=torch.float32)
        back *= scale * columns
        (codes, scale), (by, theirs) = coded(gradient.t()), coded(rows.t())
        own = torch.ops.aten._scaled_mm.default(codes, by.t(), scale, theirs.t(), out_dtype=torch.float32)
        return back.to(x.dtype).view_as(x), own.to(x.dtype), None


class InKernels(InProducts):
    """A layer of products of float8."""

    def forward(self, input: Tensor) -> Tensor:
        return Kernels.apply(input, self.weight) + self.bias  # pyright: ignore


class Both(torch.autograd.Function):
    """Rounded, and its gradient as well."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return rounded(x)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return rounded(gradients[0], -1)


class Twice(InProducts):
    """Two functions, one of which gets what the other makes."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.relu(Both.apply(super().forward(input)))  # pyright: ignore


def layers(kind: type[nn.Linear], bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return Around(nn.Sequential(kind(WIDTH, INNER, bias), nn.GELU(), kind(INNER, WIDTH, bias))).double()


PAIR = {"inner.0": "colwise", "inner.2": "rowwise"}
SEQUENCE = PAIR | {"norm": "sequence"}
ALONE = ({"inner.0": "colwise"}, {"inner.0": "rowwise"})


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tp", slow_but([2], [2, 4]))
@pytest.mark.parametrize(("kind", "rules"), in_turns([InProducts, InProductsByRow], [PAIR, SEQUENCE, *ALONE], quick=4))
def test_gradients_are_rounded_by_the_largest_of_all(kind: type[nn.Linear], rules: dict[str, str], tp: int) -> None:
    calls = [tokens(2, 8), tokens(3, 16)]
    assert max(worst(layers(kind), rules, tp, calls[0], calls)) < 1e-12


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tp", slow_but([2], [2, 4]))
@pytest.mark.parametrize("rules", [PAIR, SEQUENCE])
def test_products_of_float8_are_those_of_one_process(rules: dict[str, str], tp: int) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(InKernels(WIDTH, 64), nn.GELU(), InKernels(64, WIDTH))
    calls = [tokens(2, 8), tokens(3, 16)]
    assert max(worst(Around(inner).double(), rules, tp, calls[0], calls)) < 8 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("kind", "forward", "both"), [(InProducts, 3, 7), (InProductsByRow, 2, 4), (InKernels, 2, 5)]
)  # of one weight, of the other and its input; of these again, and of a gradient: by row, rows that are whole have none
def test_what_a_backward_compares_is_counted(kind: type[nn.Linear], forward: int, both: int) -> None:
    (x,), _ = tokens(2, 8)
    program = tpplan.compile_plan(layers(kind), {"version": 1, "modules": PAIR}, 2, (x,))
    assert program.count_collectives(backward=False) == {"all-gather": forward, "all-reduce": 1}
    assert program.count_collectives() == {"all-gather": both, "all-reduce": 2}


def _counted(member: Member) -> None:
    model, ((x,), _) = layers(InProducts), tokens(2, 8)
    plan = {"version": 1, "modules": PAIR}
    program = tpplan.compile_plan(model, plan, member.size, (x,))
    sharded = tpplan.parallelize(copy.deepcopy(model), plan, member.mesh(), (x,))
    expected = model(x)
    with CommDebugMode() as mode:
        made = sharded(x)
        made.sum().backward()
    counts = {str(name): count for name, count in mode.get_comm_counts().items() if count}
    assert sum(counts.values()) == sum(program.count_collectives().values()), counts
    assert_close(made, expected)
    expected.sum().backward()
    for ours, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
        assert_close(ours.grad.full_tensor(), theirs.grad)  # pyright: ignore
    with torch.no_grad():
        assert_close(sharded(x), expected)


def test_what_is_counted_is_sent_and_without_gradients_the_forward_compares_alone() -> None:
    world(2).run(_counted)


def test_functions_in_a_row_each_have_their_backward() -> None:
    call = tokens(2, 8)
    assert max(worst(layers(Twice, False), {"inner.0": "colwise"}, 2, call, [call])) < 1e-12


class Checkpointed(nn.Sequential):
    reentrant = False

    def forward(self, input: Tensor) -> Tensor:
        return checkpoint(super().forward, input, use_reentrant=self.reentrant)  # pyright: ignore


def test_what_a_checkpoint_recomputes_has_its_backward_unless_it_is_hidden() -> None:
    torch.manual_seed(0)
    inner, call = Checkpointed(InProducts(WIDTH, INNER), nn.GELU(), InProducts(INNER, WIDTH)), tokens(2, 8)
    model = Around(inner).double()
    report = tpplan.verify(model, {"version": 1, "modules": PAIR}, 2, call[0])
    assert report.ok, report.problems
    inner.reentrant = True
    with pytest.raises(CompileError, match=r"(?s)TP107.*pass `use_reentrant=False`"):
        tpplan.compile_plan(model, {"version": 1, "modules": PAIR}, 2, call[0])


class Hooked(InProducts):
    """Changes the gradient of what its function makes."""

    def forward(self, input: Tensor) -> Tensor:
        made: Tensor = Product.apply(input, self.weight, False)  # pyright: ignore
        made.register_hook(lambda gradient: gradient * 2)
        return made


def test_a_record_has_no_hooks() -> None:
    with pytest.raises(CompileError, match="TP107"):
        tpplan.compile_plan(layers(Hooked, False), {"version": 1, "modules": ALONE[0]}, 2, tokens(2, 8)[0])


class Keeping(torch.autograd.Function):
    """Keeps what its backward alone reads, and makes what comes last in its results before the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        sums = rounded(weight).sum(1)
        made = rounded(x) @ rounded(weight).t()
        ctx.save_for_backward(x, weight, weight > 0.01)
        return made, sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, mask = ctx.saved_tensors
        rows, gradient = x.flatten(0, 1), gradients[0].flatten(0, 1)
        back = rounded(gradient) @ weight
        return back.view_as(x), rounded(gradient).t() @ rounded(rows) * mask + gradients[1][:, None]


class InKeeping(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        made, sums = Keeping.apply(input, self.weight)  # pyright: ignore
        return made + sums


def test_what_a_backward_alone_reads_is_kept() -> None:
    calls = [tokens(2, 8), tokens(3, 16)]
    assert max(worst(layers(InKeeping, False), ALONE[0], 2, calls[0], calls)) < 1e-12


class InPlace(torch.autograd.Function):
    """Writes to what it has just made."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        rows = gradients[0].reshape(-1, gradients[0].shape[-1])
        return rows.div(rows.abs().max()).mul_(2).reshape(gradients[0].shape)


class Through(InPlace):
    """Writes to what is a view of a gradient, or a copy, by its strides."""

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        rows = (gradients[0] + 0).reshape(-1, gradients[0].shape[-1])
        rows /= rows.abs().max()
        return rows.reshape(gradients[0].shape)


class Turned(Rounded):
    """The gradient of what is rounded comes back with other strides."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.rounds(functional.gelu(self.up(x))).transpose(0, 1)).transpose(0, 1)


class Calling(Rounded):
    def __init__(self) -> None:
        super().__init__(by_tensor, WIDE)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(ByCall.apply(self.up(x), self.act))  # pyright: ignore


class ByCall(torch.autograd.Function):
    """Makes its result by a call of a module."""

    @staticmethod
    def forward(_: Any, x: Tensor, act: nn.Module) -> Tensor:
        return act(x)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / gradients[0].abs().max(), None


WIDE = 2048  # so that features cost more to gather than a number


@pytest.mark.parametrize(
    ("inner", "gathered"),
    [(Calling, 1), (lambda: Turned(InPlace.apply, WIDE), 1), (lambda: Turned(Through.apply, WIDE), 2)],
)
def test_backwards_are_attached_to_results_of_calls_and_none_that_write_to_what_has_other_names(
    inner: Callable[[], nn.Module], gathered: int
) -> None:
    torch.manual_seed(0)
    model, call = Around(inner()).double(), tokens(4, 32)
    program = tpplan.compile_plan(model, {"version": 1, "modules": RULES}, 2, call[0])
    assert program.count_collectives() == {"all-gather": gathered, "all-reduce": 2}
    assert max(worst(model, RULES, 2, call, [call])) < 1e-11


class Noted(torch.autograd.Function):
    """Writes the largest entry of its gradient to a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: Tensor) -> Tensor:
        ctx.largest = largest
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        largest = gradients[0].abs().max()
        ctx.largest.copy_(largest)
        return gradients[0] / largest, None


class Delayed(Rounded):
    largest: Tensor

    def __init__(self) -> None:
        super().__init__(by_tensor, WIDE)
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Noted.apply(functional.gelu(self.up(x)), self.largest))  # pyright: ignore


def test_what_a_backward_writes_to_a_buffer_is_that_of_all_ranks() -> None:
    torch.manual_seed(0)
    model, call = Around(Delayed()).double(), tokens(4, 32)

    def left(own: nn.Module, _: object) -> Tensor:
        stepped(own, call)
        return own.get_submodule("inner").largest  # pyright: ignore

    found = on_ranks(model, RULES, 2, call, left)
    for largest in found:
        assert_close(largest, left(model, None))


class Counted(Product):
    """Counts how often it runs backward where no module is."""

    runs = 0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        Counted.runs += 1
        return Product.backward(ctx, *gradients)


class Counting(InProducts):
    def forward(self, input: Tensor) -> Tensor:
        return Counted.apply(input, self.weight, False)  # pyright: ignore


def test_a_backward_that_puts_attributes_is_not_run_from_a_record() -> None:
    model = layers(Counting)
    with pytest.raises(tpplan.CompileError, match="TP107"):
        tpplan.compile_plan(model, {"version": 1, "modules": PAIR}, 2, tokens(2, 8)[0])
