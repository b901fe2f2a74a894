"""Bodies that the runtime writes by hand: used where the trace proves that they compute what the stock ones do.

Each case is a module that computes a little more, or a little less, than the body that would take its place. It comes
out equal, as it runs by its own code or since it is the same after all, or the plan is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import tpplan
from tpplan.compat.process_groups import fake_process_group
from tpplan.parity import verify_program
from tpplan.plan import CompileError

WIDTH, INNER = 16, 32
X = (torch.randn(3, 5, WIDTH, dtype=torch.float64, requires_grad=True),)

Body = Callable[[nn.Linear, Tensor], Tensor]


class Spelled(nn.Linear):
    """A linear layer whose forward is written by the test."""

    def __init__(self, inputs: int, outputs: int, body: Body, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Turned(nn.Module):
    """A layer whose weight is (inputs, outputs), with the bias registered first."""

    def __init__(self, inputs: int, outputs: int, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(outputs))
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 4)
        self.body = body

    def forward(self, hidden: Tensor) -> Tensor:
        return self.body(self, hidden)


class Mlp(nn.Module):
    """Two layers, of which the second is called by keyword if the test says so."""

    def __init__(self, down: nn.Module, up: nn.Module | None = None, keyword: str = "") -> None:
        super().__init__()
        self.up, self.down = up or nn.Linear(WIDTH, INNER), down
        self.keyword = keyword

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.up(x))
        return x + (self.down(**{self.keyword: inner}) if self.keyword else self.down(inner))


MLP = {"up": "colwise", "down": "rowwise"}


def outcome(model: nn.Module, rules: dict[str, Any], size: int, inputs: tuple[Any, ...] = X) -> str:
    """`refused`, or `equal` if outputs and all gradients are those of the unsharded model."""
    plan = {"version": 1, "modules": rules}
    model = model.double()
    try:
        program = tpplan.compile_plan(model, plan, size, inputs)
    except CompileError as error:
        assert all(d.code != "TP110" and d.help for d in error.diagnostics), error
        return "refused"
    report = verify_program(model, program, (inputs, {}))
    assert report.ok, report.problems
    return "equal"


def _addmm(layer: nn.Linear, x: Tensor, **factors: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return torch.addmm(layer.bias, rows, layer.weight.t(), **factors).view(*x.shape[:-1], -1)  # pyright: ignore


LINEARS: dict[str, tuple[Body, str]] = {
    "stock": (lambda m, x: functional.linear(x, m.weight, m.bias), "equal"),
    "one more": (lambda m, x: functional.linear(x, m.weight, m.bias) + 1, "refused"),
    "one less": (lambda m, x: functional.linear(x, m.weight, m.bias) - 1, "refused"),
    "one minus it": (lambda m, x: 1 - functional.linear(x, m.weight, m.bias), "refused"),
    "bias twice": (lambda m, x: functional.linear(x, m.weight, m.bias) + m.bias, "equal"),
    "half of the bias": (lambda m, x: torch.add(functional.linear(x, m.weight), m.bias, alpha=0.5), "equal"),
    "twice the product": (lambda m, x: torch.add(m.bias, functional.linear(x, m.weight), alpha=2), "equal"),
    "addmm": (lambda m, x: _addmm(m, x), "equal"),
    "addmm with beta": (lambda m, x: _addmm(m, x, beta=0.5), "equal"),
    "addmm with alpha": (lambda m, x: _addmm(m, x, alpha=2), "equal"),
    "addmm without bias": (lambda m, x: _addmm(m, x, beta=0), "equal"),
    "no bias": (lambda m, x: functional.linear(x, m.weight), "equal"),
    "matmul": (lambda m, x: x @ m.weight.T + m.bias, "equal"),
    "bias first": (lambda m, x: m.bias + x @ m.weight.T, "equal"),
    "turned twice": (lambda m, x: functional.linear(x, m.weight.t().t(), m.bias), "equal"),
    "minus the bias": (lambda m, x: functional.linear(x, m.weight) - m.bias, "equal"),
    "scaled": (lambda m, x: functional.linear(x, m.weight, m.bias) * 0.5, "equal"),
    "scaled weight": (lambda m, x: functional.linear(x, m.weight * 0.5, m.bias), "equal"),
    "scaled input": (lambda m, x: functional.linear(x * 2, m.weight, m.bias), "equal"),
    "input twice": (lambda m, x: functional.linear(x + x, m.weight, m.bias), "equal"),
    "product twice": (lambda m, x: functional.linear(x, m.weight, m.bias) + functional.linear(x, m.weight), "refused"),
    "clamped": (lambda m, x: functional.linear(x, m.weight, m.bias).clamp(max=1e4), "refused"),
    "relu": (lambda m, x: functional.linear(x, m.weight, m.bias).relu(), "refused"),
    "rounded weight": (lambda m, x: functional.linear(x, (m.weight * 8).round() / 8, m.bias), "equal"),
    "rounded through a cast": (lambda m, x: functional.linear(x, m.weight.float().double(), m.bias), "equal"),
    "cast bias": (lambda m, x: functional.linear(x, m.weight) + m.bias.float(), "equal"),
    "detached weight": (lambda m, x: functional.linear(x, m.weight.detach(), m.bias), "equal"),
    "dropout": (lambda m, x: functional.dropout(functional.linear(x, m.weight, m.bias), 0.5, m.training), "refused"),
    "flipped": (lambda m, x: functional.linear(x, m.weight, m.bias).flip(-1), "refused"),
    "rolled bias": (lambda m, x: functional.linear(x, m.weight, m.bias.roll(1)), "equal"),
    "reversed rows": (lambda m, x: functional.linear(x.flip(1), m.weight, m.bias), "refused"),
    "transposed rows": (lambda m, x: functional.linear(x.transpose(0, 1), m.weight, m.bias).transpose(0, 1), "equal"),
    "swapped rows": (
        lambda m, x: functional.linear(x.transpose(0, 1).reshape(x.shape), m.weight, m.bias), "equal"
    ),
    "baddbmm": (lambda m, x: torch.baddbmm(m.bias, x, m.weight.t().expand(3, -1, -1)), "refused"),
    "einsum": (lambda m, x: torch.einsum("bsi,oi->bso", x, m.weight) + m.bias, "refused"),
    "in place": (lambda m, x: functional.linear(x, m.weight, m.bias).mul_(2), "refused"),
    "bias times": (lambda m, x: functional.linear(x, m.weight) * m.bias, "refused"),
}  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.one_in(5)
def test_rows(name: str, size: int) -> None:
    body, expected = LINEARS[name]
    assert outcome(Mlp(Spelled(INNER, WIDTH, body)), MLP, size) == expected


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.one_in(5)
def test_columns(name: str) -> None:
    body, _ = LINEARS[name]
    outcome(Mlp(nn.Linear(INNER, WIDTH), Spelled(WIDTH, INNER, body)), MLP, 2)


class Called(nn.Module):
    """A layer that the caller hands one argument by name."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = Turned(INNER, WIDTH, lambda m, x: x @ m.weight + m.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(hidden=torch.tanh(self.up(x)))


@pytest.mark.parametrize("size", [2, 4])
def test_a_transposed_layer_with_its_bias_first_is_called_by_keyword(size: int) -> None:
    assert outcome(Called(), MLP, size) == "equal"


class Lora(nn.Linear):
    """What an adapter adds inside of a linear layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.a, self.b = nn.Parameter(torch.randn(4, inputs)), nn.Parameter(torch.randn(outputs, 4))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + functional.linear(functional.linear(input, self.a), self.b)


@pytest.mark.parametrize("make", [
    lambda: Lora(INNER, WIDTH),
    lambda: nn.utils.parametrizations.orthogonal(nn.Linear(INNER, WIDTH)),
])  # fmt: skip
def test_a_layer_of_more_than_its_weight_is_refused(make: Callable[[], nn.Module]) -> None:
    assert outcome(Mlp(make()), MLP, 2) == "refused"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("style", ["colwise", "rowwise"])
@pytest.mark.parametrize("make", [
    lambda layer: nn.utils.parametrizations.weight_norm(layer),
    lambda layer: nn.utils.parametrizations.weight_norm(layer, dim=None),  # pyright: ignore[reportArgumentType]
    lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh()),
])  # fmt: skip
def test_a_weight_that_a_parametrization_computes_is_split(make: Callable[[nn.Module], nn.Module], style: str) -> None:
    assert outcome(Mlp(make(nn.Linear(INNER, WIDTH))), {"down": style}, 2) == "equal"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("style", ["colwise", "rowwise"])
@pytest.mark.parametrize("make", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_weight_that_is_computed_is_named(make: Callable[[nn.Module], nn.Module], style: str) -> None:
    with pytest.raises(CompileError, match=r"TP112 .*`down\.weight` isn't a parameter"):
        tpplan.compile_plan(Mlp(make(nn.Linear(INNER, WIDTH))), {"version": 1, "modules": {"down": style}}, 2,
                            (X[0].float(),))  # fmt: skip


def test_a_hook_on_a_layer_sees_and_changes_whole_results() -> None:
    model = Mlp(nn.Linear(INNER, WIDTH))
    model.down.register_forward_hook(lambda module, args, result: result.clamp(max=0.1) + 1)
    model.down.register_forward_pre_hook(lambda module, args: (args[0] * 3 + 1,))
    assert outcome(model, MLP, 2) == "equal"


def test_an_operation_that_a_partial_product_cannot_take_is_named_with_its_line() -> None:
    with pytest.raises(CompileError, match=r"TP107 .*aten\.add\.Tensor") as caught:
        tpplan.compile_plan(Mlp(Spelled(INNER, WIDTH, LINEARS["one more"][0])).double(),
                            {"version": 1, "modules": MLP}, 2, X)  # fmt: skip
    (finding,) = caught.value.diagnostics
    assert "after the ranks' sum" in (finding.help or "") and any("test_written_bodies.py" in n for n in finding.notes)


def test_a_program_says_which_bodies_are_walked() -> None:
    model = Mlp(Spelled(INNER, WIDTH, LINEARS["bias twice"][0])).double()
    program = tpplan.compile_plan(model, {"version": 1, "modules": MLP}, 2, X)
    assert {m.name: m.walked for m in program.modules if m.style} == {"up": False, "down": True}
    assert tpplan.Program.from_dict(program.to_dict()) == program
    stock = tpplan.compile_plan(Mlp(nn.Linear(INNER, WIDTH)).double(), {"version": 1, "modules": MLP}, 2, X)
    assert "walked" not in stock.to_json()


# -- norms ------------------------------------------------------------------------------------------------------------
class Written(nn.Module):
    """A body with a weight, written by the test."""

    def __init__(self, body: Callable[[Any, Tensor], Any], weights: int = 1) -> None:
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(torch.randn(WIDTH)) if weights else None
        self.power = nn.Parameter(torch.full((), 0.4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Gated(nn.Module):
    """A norm between a column and a row."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.norm(self.q(x)) * self.k(x).sigmoid())


def mean_square(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(mean_square(x) + eps)


def _without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.rsqrt(mean_square(x) + 1e-6)


class Halved(torch.autograd.Function):
    """A norm whose backward isn't its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return rms(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / 2


NORMS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), True),
    "LayerNorm without parameters": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), True),
    "LayerNorm with a weight": (lambda: nn.LayerNorm(WIDTH, bias=False), True),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH, eps=1e-6), True),
    "RMSNorm with torch's eps": (lambda: nn.RMSNorm(WIDTH), True),
    "RMSNorm without a weight": (lambda: nn.RMSNorm(WIDTH, elementwise_affine=False), True),
    "one more than the weight": (lambda: Written(lambda m, x: rms(x) * (1 + m.weight)), True),
    "by a root": (lambda: Written(lambda m, x: x / (mean_square(x) + 1e-6).sqrt() * m.weight), True),
    "in float32": (lambda: Written(lambda m, x: m.weight * rms(x.float()).to(x.dtype)), True),
    "rounded": (lambda: Written(lambda m, x: (rms(x) * m.weight).float().to(x.dtype)), False),
    "rounded to bfloat16": (lambda: Written(lambda m, x: rms(x.bfloat16()).to(x.dtype) * m.weight), False),
    "a power that is learned": (lambda: Written(lambda m, x: x / (mean_square(x) + 1e-6).pow(m.power)), False),
    "eps by a clamp": (lambda: Written(lambda m, x: x / mean_square(x).clamp(min=1e-6).sqrt() * m.weight), False),
    "eps beside the root": (lambda: Written(lambda m, x: x / (mean_square(x).sqrt() + 1e-6) * m.weight), False),
    "clamped": (lambda: Written(lambda m, x: (rms(x) * m.weight).clamp(-1e5, 1e5)), False),
    "clamped far away before": (lambda: Written(lambda m, x: rms(x.clamp(-1e9, 1e9)) * m.weight), False),
    "nan_to_num": (lambda: Written(lambda m, x: (rms(x) * m.weight).nan_to_num()), False),
    "where": (lambda: Written(lambda m, x: torch.where(x.abs() > 1e8, 0.0, rms(x) * m.weight)), False),
    "maximum": (lambda: Written(lambda m, x: torch.maximum(rms(x) * m.weight, torch.tensor(-1e6))), False),
    "a kink far away": (lambda: Written(lambda m, x: rms(x) * m.weight + torch.relu(x - 1e8)), False),
    "a kink of squares and roots": (
        lambda: Written(lambda m, x: rms(x) * m.weight + ((x - 1e8) ** 2).sqrt() + x - 1e8), False
    ),
    "an exponential far away": (lambda: Written(lambda m, x: rms(x) * m.weight + torch.exp(x - 1e8)), False),
    "a little more": (lambda: Written(lambda m, x: rms(x) * m.weight + 1e-12 * x), False),
    "eps more": (lambda: Written(lambda m, x: rms(x, 1e-12) * m.weight + 1e-12 * x), False),
    "rounded to whole numbers": (lambda: Written(lambda m, x: rms(x) * m.weight + (x * 1e-9).round()), False),
    "a detached statistic": (
        lambda: Written(lambda m, x: x * torch.rsqrt(mean_square(x) + 1e-6).detach() * m.weight), False
    ),
    "a statistic without gradient": (lambda: Written(lambda m, x: x * _without_gradient(x) * m.weight), False),
    "a backward of its own": (lambda: Written(lambda m, x: Halved.apply(x) * m.weight), False),
    "twice": (lambda: Written(lambda m, x: rms(rms(x)) * m.weight), False),
    "dropout": (lambda: Written(lambda m, x: functional.dropout(rms(x) * m.weight, 0.1, m.training)), False),
    "unbiased": (lambda: Written(lambda m, x: x / (x.var(-1, keepdim=True) + 1e-6).sqrt() * m.weight), False),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.one_in(5)
def test_norms(name: str) -> None:
    """Those that are norms are split; of others the whole features are gathered, or the plan is refused."""
    make, is_norm = NORMS[name]
    model = Gated(make()).double()
    rules = {"{q,k}": "colwise", "o": "rowwise"}
    found = outcome(model, rules, 2)
    if found == "refused":
        assert not is_norm
        return
    program = tpplan.compile_plan(model, {"version": 1, "modules": rules}, 2, X)
    assert any(m.split_norm is not None for m in program.modules) == is_norm
    assert is_norm or not [use for use in program.kernels if "norm" in use.kind]


class Returned(nn.RMSNorm):
    """A norm whose result comes in a tuple."""

    def forward(self, x: Tensor) -> tuple[Tensor]:  # pyright: ignore
        return (super().forward(x),)


class Borrowed(nn.Module):
    """A norm by the weight of another module."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = [owner]

    def forward(self, x: Tensor) -> Tensor:
        return rms(x) * self.owner[0].weight  # pyright: ignore


def test_a_norm_by_another_modules_weight() -> None:
    model = Gated(nn.Identity())
    model.other = nn.RMSNorm(WIDTH)
    model.norm = Borrowed(model.other)
    assert outcome(model, {"{q,k}": "colwise", "o": "rowwise"}, 2) == "equal"


def test_a_norm_whose_result_comes_in_a_tuple() -> None:
    class Unpacked(Gated):
        def forward(self, x: Tensor) -> Tensor:
            return self.o(self.norm(self.q(x))[0] * self.k(x).sigmoid())

    assert outcome(Unpacked(Returned(WIDTH)), {"{q,k}": "colwise", "o": "rowwise"}, 2) == "equal"


# -- tables -----------------------------------------------------------------------------------------------------------
IDS = (torch.tensor([[0, 3, 9, 4], [5, 5, 1, 8]]),)


class Table(nn.Module):
    """Rows of a table, and a layer."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.head = table, nn.Linear(WIDTH, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids)))


class Looked(nn.Embedding):
    """An embedding whose forward is written by the test."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor], **settings: Any) -> None:
        super().__init__(10, WIDTH, **settings)
        self.body = body
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self, ids)


TABLES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "stock": (lambda: nn.Embedding(10, WIDTH), "equal"),
    "padding on the first rank": (lambda: nn.Embedding(10, WIDTH, padding_idx=0), "equal"),
    "padding on the second": (lambda: nn.Embedding(10, WIDTH, padding_idx=-2), "equal"),
    "parametrized": (
        lambda: nn.utils.parametrize.register_parametrization(nn.Embedding(10, WIDTH), "weight", nn.Tanh()), "refused"
    ),
    "with a maximal norm": (lambda: nn.Embedding(10, WIDTH, max_norm=1.0), "refused"),
    "scaled": (lambda: Looked(lambda m, ids: functional.embedding(ids, m.weight) * math.sqrt(WIDTH)), "equal"),
    "normed": (lambda: Looked(lambda m, ids: m.norm(functional.embedding(ids, m.weight))), "refused"),
    "offset": (lambda: Looked(lambda m, ids: functional.embedding((ids + 2).clamp(max=9), m.weight)), "refused"),
    "max_norm in the call": (
        lambda: Looked(lambda m, ids: functional.embedding(ids, m.weight, max_norm=1.0)), "refused"
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str, size: int) -> None:
    make, expected = TABLES[name]
    assert outcome(Table(make()), {"table": "vocab"}, size, IDS) == expected


def test_a_hook_that_changes_rows() -> None:
    model = Table(nn.Embedding(10, WIDTH))
    model.table.register_forward_hook(lambda module, args, rows: rows.clamp(max=0.1) * math.sqrt(WIDTH))
    assert outcome(model, {"table": "vocab"}, 2, IDS) == "equal"


@pytest.mark.one_in(5)
@pytest.mark.parametrize("wrong", [10, 11, -1, -7, 1 << 40])
@pytest.mark.parametrize("size", [2, 16])
def test_ids_that_no_rank_holds_raise_as_the_stock_table_does(wrong: int, size: int) -> None:
    """Of 16 ranks, those after the tenth hold no row."""
    ids = IDS[0].clone()
    ids[1, 2] = wrong
    model = Table(nn.Embedding(10, WIDTH)) if size == 2 else Table(nn.Embedding(10 * 8, WIDTH))
    rows = model.table.num_embeddings  # pyright: ignore
    ids[1, 2] = wrong if wrong < 0 else wrong - 10 + rows  # pyright: ignore
    with pytest.raises(IndexError, match="index out of range"):
        model(ids)
    for rank in range(0, size, max(size - 1, 1)):
        copy = Table(nn.Embedding(rows, WIDTH))  # pyright: ignore
        with fake_process_group(size, rank):
            mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
            sharded = tpplan.parallelize(copy, {"version": 1, "modules": {"table": "vocab"}}, mesh, IDS)
            with pytest.raises(IndexError, match="index out of range"):
                sharded(ids)


# -- kernels ----------------------------------------------------------------------------------------------------------
class Swiglu(nn.Module):
    """A gated body, whose activation and split the test chooses."""

    def __init__(self, act: nn.Module, gate: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.act, self.body = act, gate

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.body(self, x))


def _gate_without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = m.act(m.gate(x))
    return gate * m.up(x)


def _plain(m: Any, x: Tensor) -> Tensor:
    return m.act(m.gate(x)) * m.up(x)


def _times(scale: float) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: m.act(m.gate(x)) * m.up(x) * scale


def _hooked() -> nn.Module:
    act = nn.SiLU()
    act.register_full_backward_hook(lambda module, inner, outer: None)
    return act


BODIES: dict[str, tuple[nn.Module, Callable[[Any, Tensor], Tensor], bool]] = {
    "stock": (nn.SiLU(), _plain, True),
    "half": (nn.SiLU(), _times(0.5), False),
    "no gradient": (nn.SiLU(), _gate_without_gradient, False),
    "detached": (nn.SiLU(), lambda m, x: m.act(m.gate(x)).detach() * m.up(x), False),
    "clamped": (nn.SiLU(), lambda m, x: m.act(m.gate(x)).clamp(max=1e9) * m.up(x), False),
    "clamped inside": (Written(lambda m, x: functional.silu(x).clamp(max=1e9), 0), _plain, False),
    "a little more": (Written(lambda m, x: functional.silu(x) + 1e-12, 0), _plain, False),
    "a hook": (_hooked(), _plain, False),
    "GELU": (nn.GELU(), _plain, True),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_gated_bodies_are_replaced_where_nothing_else_is_computed(name: str) -> None:
    act, gate, replaced = BODIES[name]
    program = tpplan.compile_plan(Swiglu(act, gate), {"version": 1, "modules": {"{gate,up}": "colwise",
                                  "down": "rowwise"}}, 2, (X[0].float(),))  # fmt: skip
    assert any(use.kind in ("swiglu", "geglu") and not use.refused for use in program.kernels) == replaced


@pytest.mark.parametrize(("name", "fused"), [("stock", True), ("addmm", True), ("bias twice", False),
                                             ("half of the bias", False), ("addmm with beta", False),
                                             ("no bias", False), ("scaled", False)])  # fmt: skip
def test_a_bias_is_left_to_a_kernel_where_it_is_added_once(name: str, fused: bool) -> None:
    class Gelu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.down = Spelled(WIDTH, INNER, LINEARS[name][0]), nn.GELU(), nn.Linear(INNER, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.up(x)))

    program = tpplan.compile_plan(Gelu(), {"version": 1, "modules": MLP}, 2, (X[0].float(),))
    assert [use.kind for use in program.kernels if not use.refused] == ["bias_gelu" if fused else "gelu"]
