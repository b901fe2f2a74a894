"""Layers that compute their weight in their own forward: it is split, and what it is computed of follows."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import tpplan
from tests.marking import slow_but
from tests.runtime.world import Member, world
from tpplan.compiler.ir.program import Program
from tpplan.compiler.trace.decomposed import decomposed
from tpplan.plan import CompileError

WIDTH, INNER, RANK = 16, 32, 3


class LowRank(nn.Linear):
    """As LoRA writes it in one expression."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.a, self.b = nn.Parameter(torch.randn(RANK, inputs)), nn.Parameter(torch.randn(outputs, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight + 0.5 * (self.b @ self.a), self.bias)


class Direction(LowRank):
    """As DoRA: lengths beside directions."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.lengths = nn.Parameter(torch.rand(outputs) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + 0.5 * (self.b @ self.a)
        return functional.linear(x, (self.lengths / weight.norm(p=2, dim=1))[:, None] * weight, self.bias)


class Own(nn.Module):
    """No layer of torch's, with names of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.w, self.c = nn.Parameter(torch.randn(outputs, inputs)), nn.Parameter(torch.randn(outputs))
        self.gain, self.drop = nn.Parameter(torch.rand(outputs)), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x) @ functional.softplus(self.w * self.gain.exp()[:, None]).T + self.c


class Factors(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(torch.randn(outputs, RANK)), nn.Parameter(torch.randn(RANK, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.u @ self.v)


class Masked(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.mask: Tensor
        self.register_buffer("mask", (torch.rand(outputs, inputs) < 0.5).float())

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * self.mask, self.bias * 0.1)


class Ternary(nn.Linear):
    """A scale of the whole weight, and a gradient straight through."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.abs().mean().clamp_(min=1e-5)
        rounded = (self.weight / scale).round().clamp_(-1, 1) * scale
        return functional.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


class Measured(nn.Linear):
    """A scale of which no gradient is asked for."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.weight.abs().mean()
        return functional.linear(x, self.weight / scale, self.bias)


class Standard(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        centred = self.weight - self.weight.mean(1, keepdim=True)
        return functional.linear(x, centred / (self.weight.std(1, keepdim=True) + 1e-5), self.bias)


class Unit(nn.Linear):
    """Rows of length 1, one of them of zeros."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        with torch.no_grad():
            self.weight[1] = 0

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, functional.normalize(self.weight), self.bias)


class Step(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return functional.normalize(weight, p=1) / (weight.var() + 1)


class ByAnother(nn.Linear):
    """Another module computes the weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.step = Step()

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.step(self.weight), self.bias)


class Fake(nn.Linear):
    """Rounds its weight by torch's fused operation, with a scale for each output, and its input with one."""

    AXIS = 0

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.scales: Tensor
        self.zeros: Tensor
        count = (outputs, inputs)[self.AXIS]
        self.register_buffer("scales", torch.rand(count) / 100)  # some entries are beyond the codes
        self.register_buffer("zeros", torch.randint(-9, 9, (count,), dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        scales = self.scales.float()
        x = torch.fake_quantize_per_tensor_affine(x, 0.05, 3, -20, 20)
        weight = torch.fake_quantize_per_channel_affine(self.weight, scales, self.zeros, self.AXIS, -16, 15)
        return functional.linear(x, weight, self.bias)


class FakeColumns(Fake):
    """With a scale for each input."""

    AXIS = 1


class FakeMean(nn.Linear):
    """With a scale of the mean entry, which is a tensor, as is the zero point."""

    def forward(self, x: Tensor) -> Tensor:
        scale, zero = self.weight.detach().abs().mean().float() / 4, torch.zeros((), dtype=torch.int32)
        return functional.linear(x, torch.fake_quantize_per_tensor_affine(self.weight, scale, zero, -8, 7), self.bias)


class Cosine(nn.Module):
    """A block with a head that compares directions, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)), Unit(WIDTH, 64)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(functional.normalize(self.block(x), dim=-1))
        return functional.cross_entropy(10 * logits.flatten(0, 1), labels.flatten())


class Symmetric(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight @ self.weight.T @ self.weight, self.bias)


class Largest(nn.Linear):
    """A scale by row that no sum is."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight / self.weight.abs().amax(1, keepdim=True), self.bias)


class Block(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), up, down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def model_of(kind: Any, count: int = 1) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(*(Block(kind(WIDTH, INNER), kind(INNER, WIDTH)) for _ in range(count)))
    return nn.Sequential(model).double()


def x_of(length: int = 6) -> Tensor:
    return torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True)


PLAN: Any = {"version": 1, "modules": {"**.up": "colwise", "**.down": "rowwise"}}
SPLIT_SEQUENCE: Any = {"version": 1, "modules": {**PLAN["modules"], "**.norm": "sequence"}}
# With the sums inside that a block needs, forward and backward, and whether gradients of parameters are summed.
KINDS: dict[Any, tuple[int, int, bool]] = {
    LowRank: (0, 0, True),
    Direction: (1, 1, True),
    Own: (0, 0, True),
    Factors: (0, 0, True),
    Masked: (0, 0, False),
    Ternary: (2, 0, False),
    Measured: (2, 0, False),
    Standard: (3, 3, False),
    Unit: (1, 1, False),
    ByAnother: (5, 5, False),
    Fake: (0, 0, False),
    FakeColumns: (0, 0, False),
    FakeMean: (2, 0, False),
}


def layouts(program: Program) -> dict[str, str]:
    return {p.name.removeprefix("0.0."): str(p.layout) for p in program.parameters if "norm" not in p.name}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "tp"),
    slow_but(
        [(LowRank, 2), (Ternary, 4), (Measured, 2), (Unit, 2), (Fake, 4), (FakeColumns, 2)],
        [(k, tp) for k in KINDS for tp in (2, 4)],
    ),
)
def test_pairs_of_columns_and_rows(kind: Any, tp: int) -> None:
    report = tpplan.verify(model_of(kind), PLAN, tp, (x_of(),))
    assert report.ok, report.problems
    forward, backward, summed = KINDS[kind]
    assert report.collectives == report.predicted == {"all-reduce": 2 + forward + backward + summed}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("function", "given"),
    [
        (torch.fake_quantize_per_tensor_affine, (0.037, 5)),
        (torch.fake_quantize_per_tensor_affine, (torch.tensor([0.04]), torch.tensor([2.0]))),
        (torch.fake_quantize_per_channel_affine, (torch.rand(8) / 9 + 0.01, torch.arange(8).int() - 4, 0)),
        (torch.fake_quantize_per_channel_affine, (torch.rand(64) / 9 + 0.01, torch.arange(64) % 8 / 4, 1)),
    ],
)
def test_rounding_is_recorded_as_what_torch_computes(function: Any, given: Any, dtype: torch.dtype) -> None:
    found: list[Tensor] = []
    for each in (function, decomposed(function)):
        torch.manual_seed(0)
        x = (3 * torch.randn(8, 64)).to(dtype).requires_grad_()
        made = each(x, *given, -16, 15)
        made.backward(torch.randn(8, 64).to(dtype))
        found += [made.detach(), x.grad]  # pyright: ignore
    assert decomposed(function) is not function
    torch.testing.assert_close(found[:2], found[2:], rtol=0, atol=0)


@pytest.mark.parametrize("kind", slow_but([Direction], KINDS))
def test_beside_a_split_sequence(kind: Any) -> None:
    report = tpplan.verify(model_of(kind), SPLIT_SEQUENCE, 2, (x_of(8),))
    assert report.ok, report.problems
    assert report.collectives == report.predicted


def test_what_is_split_and_what_stays_whole() -> None:
    found = layouts(tpplan.compile_plan(model_of(Direction), PLAN, 2, (x_of(),)))
    assert found == {
        "up.weight": "S(0)", "up.b": "S(0)", "up.a": "R", "up.bias": "S(0)", "up.lengths": "S(0)",
        "down.weight": "S(1)", "down.b": "R", "down.a": "S(1)", "down.bias": "P", "down.lengths": "R",
    }  # fmt: skip


def rules(model: nn.Module, plan: tpplan.Plan) -> dict[str, str]:
    found = plan.match([name for name, _ in model.named_modules() if name], []).rules
    return {name.rpartition(".")[2]: str(rule.style) for name, rule in found.items()}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", slow_but([LowRank, ByAnother], KINDS))
def test_suggested(kind: Any) -> None:
    model, x = model_of(kind, 2), x_of()
    plan = tpplan.suggest_plan(model, 2, inputs=(x,))
    assert rules(model, plan) == {"up": "colwise", "down": "rowwise"}
    report = tpplan.verify(model, plan, 2, (x,))
    assert report.ok, report.problems
    assert report.collectives == report.predicted and report.collectives.keys() == {"all-reduce"}


def test_a_head_stays_split_for_its_loss() -> None:
    torch.manual_seed(1)
    model, call = Cosine().double(), (x_of(), torch.randint(64, (2, 6)))
    plan = tpplan.suggest_plan(model, 2, inputs=call)
    assert next(str(rule.output) for rule in plan.rules if str(rule.pattern) == "head") == "shard"
    report = tpplan.verify(model, plan, 2, call)
    assert report.ok, report.problems


class Attention(nn.Module):
    """Heads, of which keys and values have fewer."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (kind(WIDTH, n) for n in (16, 8, 8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (held.repeat_interleave(2, 1) for held in (k, v))
        return x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


SHARED_HEADS = [(LowRank, 4), (Direction, 4), (Masked, 4), (Unit, 4)]


@pytest.mark.parametrize(("kind", "tp"), slow_but([(LowRank, 4)], [*SHARED_HEADS, *((k, 2) for k in KINDS)]))
def test_heads(kind: Any, tp: int) -> None:
    torch.manual_seed(1)
    model, x = nn.Sequential(Attention(kind)).double(), x_of()
    report = tpplan.verify(model, tpplan.suggest_plan(model, tp, inputs=(x,)), tp, (x,))
    assert report.ok, report.problems
    assert report.collectives == report.predicted


class StandardConvolution(nn.Conv2d):
    """As timm and transformers write it, with a gain by channel."""

    def __init__(self, inputs: int, outputs: int, groups: int = 1) -> None:
        super().__init__(inputs, outputs, 3, padding=1, groups=groups)
        self.gain = nn.Parameter(torch.rand(outputs, 1, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows, gain = self.weight.reshape(1, self.out_channels, -1), (self.gain * 0.3).view(-1)
        normed = functional.batch_norm(rows, None, None, gain, training=True, momentum=0.0)
        weight = normed.reshape_as(self.weight)
        return functional.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Spread(nn.Conv2d):
    def __init__(self, inputs: int, outputs: int, groups: int = 1) -> None:
        super().__init__(inputs, outputs, 3, padding=1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        along = (1, 2, 3)
        weight = self.weight - self.weight.mean(along, keepdim=True)
        return self._conv_forward(x, weight / (weight.std(along, keepdim=True) + 1e-5), self.bias)


class Both(nn.Conv2d):
    """Mean and variance at once."""

    def __init__(self, inputs: int, outputs: int, groups: int = 1) -> None:
        super().__init__(inputs, outputs, 3, padding=1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True)
        return self._conv_forward(x, (self.weight - mean) / (variance + 1e-5).sqrt(), self.bias)


CONVOLUTIONS = (StandardConvolution, Spread, Both)


class Images(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.up, self.each, self.down = kind(WIDTH, INNER), kind(INNER, INNER, INNER), kind(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.each(self.up(x).relu()).sin())


@pytest.mark.parametrize(
    ("kind", "tp"),
    slow_but([(StandardConvolution, 2)], [(k, tp) for k in CONVOLUTIONS for tp in (2, 4)]),
)
def test_convolutions(kind: Any, tp: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(Images(kind)).double()
    x = torch.randn(2, WIDTH, 5, 6, dtype=torch.float64, requires_grad=True)
    plan = tpplan.suggest_plan(model, tp, inputs=(x,))
    assert rules(model, plan) == {"up": "colwise", "each": "colwise", "down": "rowwise"}
    report = tpplan.verify(model, plan, tp, (x,))
    assert report.ok, report.problems
    assert report.collectives == report.predicted and report.collectives.keys() == {"all-reduce"}


@pytest.mark.parametrize(
    ("kind", "code", "cause"), [(Symmetric, "TP112", "no dim of"), (Largest, "TP107", "aten.amax.default")]
)
def test_what_can_not_be_split_is_refused_with_its_cause(kind: Any, code: str, cause: str) -> None:
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(model_of(kind), PLAN, 2, (x_of(),))
    first = caught.value.diagnostics[0]
    assert first.code == code and cause in first.message


class Tied(nn.Module):
    """A head that scales the table's weight."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.weight, self.scale = table.weight, nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * self.scale)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDTH)
        self.block, self.head = Block(LowRank(WIDTH, INNER), LowRank(INNER, WIDTH)), Tied(self.table)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.table(ids)))


class Interleaved(nn.Module):
    """Of what its weight is computed of, only a scale has a dim of the features on one side."""

    def __init__(self, inputs: int, outputs: int, by_rows: bool) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(outputs, inputs // 2)) for _ in range(2))
        self.scale = nn.Parameter(torch.rand(outputs, 1) if by_rows else torch.rand(inputs))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, torch.stack((self.a, self.b), -1).flatten(1) * self.scale)


class Joined(Interleaved):
    """One part after the other."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, torch.cat((self.a, self.b), 1) * self.scale)


class Integers(nn.Module):
    """Numbers of four bytes, stored as bytes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.bytes: Tensor
        self.register_buffer("bytes", torch.randint(-8, 8, (outputs, 4 * inputs), dtype=torch.int8))
        self.scale = nn.Parameter(torch.rand(outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.bytes.view(torch.int32).to(x.dtype) * self.scale)


@pytest.mark.parametrize(
    ("up", "down", "code"),
    [
        (nn.Linear(WIDTH, INNER), Joined(INNER, WIDTH, by_rows=False), "TP107"),
        (Integers(WIDTH, INNER), nn.Linear(INNER, WIDTH), "TP112"),
    ],
)
def test_a_rule_of_which_nothing_could_be_split_is_refused(up: nn.Module, down: nn.Module, code: str) -> None:
    model = nn.Sequential(OrderedDict(up=up, act=nn.ReLU(), down=down))
    plan = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(model, plan, 2, (torch.randn(2, 4, WIDTH),))
    assert {found.code for found in caught.value.diagnostics} == {code}


def test_parts_that_alternate_are_split_with_both_sides() -> None:
    model = nn.Sequential(Interleaved(WIDTH, INNER, by_rows=True), nn.ReLU(), Interleaved(INNER, WIDTH, by_rows=False))
    report = tpplan.verify(model, {"version": 1, "modules": {"0": "colwise", "2": "rowwise"}}, 2, x_of())
    assert report.ok, report.problems


def test_a_head_goes_with_its_table() -> None:
    torch.manual_seed(1)
    model, call = Words().double(), (torch.arange(12).view(2, 6),)
    plan = tpplan.suggest_plan(model, 2, inputs=call)
    assert {rule.pattern.text for rule in plan.rules} == {"table", "head", "block.up", "block.down"}
    report = tpplan.verify(model, plan, 2, call)
    assert report.ok, report.problems
    assert report.collectives == report.predicted


class Scaled(nn.Module):
    """A scalar has statistics, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = (
            nn.Linear(WIDTH, INNER),
            nn.Linear(INNER, WIDTH),
            nn.Parameter(torch.tensor(2.0)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu() * self.scale.norm(dim=-1) * self.scale.var(dim=0, correction=0).exp())


def test_a_mistake_elsewhere_says_nothing_of_layers_that_compute_their_weight() -> None:
    rules = {**PLAN["modules"], "**.norm": "colwise"}
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(model_of(LowRank), {"version": 1, "modules": rules}, 2, (x_of(),))
    assert {found.subject for found in caught.value.diagnostics} == {"0.0.norm"}


def test_statistics_of_a_scalar_stay_what_they_are() -> None:
    report = tpplan.verify(nn.Sequential(Scaled()).double(), PLAN, 2, (x_of(),))
    assert report.ok, report.problems


def _trained(member: Member) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in KINDS:
        model, x = model_of(kind), x_of()
        if member.size > 1:
            model = tpplan.parallelize(model, PLAN, member.mesh(), (x,))
        with torch.no_grad():
            found[f"{kind} quiet"] = model.eval()(x)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        state = {name: _whole(tensor) for name, tensor in model.state_dict().items()}
        found |= {f"{kind} {name}": tensor for name, tensor in state.items()} | {f"{kind} x": x.grad}
    return found


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_trainings_on_processes(tp: int) -> None:
    (expected,) = world(1).run(_trained)
    for found in world(tp).run(_trained):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-8, atol=1e-8, msg=name)
