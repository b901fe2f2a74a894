"""Convolutions in pairs: the first makes its channels in parts, the second sums what it makes of these."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.marking import in_turns
from tests.runtime.simulated import Call, worst
from tpplan.api import suggest_text
from tpplan.compiler.queries import Rules
from tpplan.plan import CompileError
from tpplan.suggest.roles import Roles, find_roles
from tpplan.suggest.subject import make_subject


def images(batch: int, size: int) -> Call:
    return (torch.randn(batch, 4, size, size, dtype=torch.float64, requires_grad=True),), {}


def sequences(batch: int, length: int) -> Call:
    return (torch.randn(batch, length, 4, dtype=torch.float64, requires_grad=True),), {}


class Pair(nn.Module):
    """Two convolutions of images."""

    def __init__(self, kind: Any = nn.Conv2d, **options: Any) -> None:
        super().__init__()
        self.first, self.second = kind(4, 16, 3, **options), kind(16, 4, 3, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Separable(nn.Module):
    """Of sequences, with one convolution for each channel between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 16, 1), nn.Conv1d(16, 4, 1, bias=False)
        self.each = nn.Conv1d(16, 16, 3, padding=1, groups=16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(functional.gelu(self.each(self.first(x.transpose(1, 2))))).transpose(1, 2)


class Residual(nn.Module):
    """A stream of channels; group norms stand before the convolutions of a branch."""

    def __init__(self, groups: int = 8) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(4, 16, 3), nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1)
        self.before, self.between = nn.GroupNorm(groups, 16), nn.GroupNorm(groups, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.last(self.between(self.second(self.before(x).relu())).relu())


class Bottleneck(nn.Module):
    """A stream with batch norms in a branch, pooled for a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(4, 32, 3, padding=1), nn.Linear(32, 8)
        self.down, self.mid, self.up = nn.Conv2d(32, 16, 1), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 32, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (16, 16, 32))
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.stem(x), 2)
        made = self.norms[1](self.mid(self.norms[0](self.down(x)).relu())).relu()
        x = x + self.norms[2](self.up(made))
        return self.head(self.pool(x.relu()).flatten(1))


class Framed(nn.Module):
    """A convolution that pads by what it computes of its sizes, which are kept as tensors."""

    stride: Tensor
    padding: Tensor

    def __init__(self, channels: int, made: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, made, 3, stride)
        self.register_buffer("stride", torch.tensor(stride), persistent=False)
        self.register_buffer("padding", torch.tensor(3) - stride, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        frames = torch.ceil((x.shape[-1] - 3 + self.padding) / self.stride + 1).to(torch.int64) - 1
        more = frames * self.stride + 3 - self.padding - x.shape[-1]
        return self.conv(functional.pad(x, (int(self.padding), int(more))))


class Codec(nn.Module):
    """Convolutions of sounds, each in fewer frames."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Framed(4, 16), Framed(16, 32, 2), Framed(32, 4, 2)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for layer in self.layers:
            x = functional.elu(layer(x))
        return x


class Stacked(nn.Module):
    """Convolutions one after the other, then layers of all that is left of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(True), nn.Conv2d(16, 16, 3, padding=1),
            nn.BatchNorm2d(16), nn.ReLU(True), nn.AvgPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.PReLU(32),
            nn.Upsample(scale_factor=2), nn.Conv2d(32, 16, 3, padding=1), nn.ReLU(True), nn.AdaptiveAvgPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Linear(64, 32), nn.ReLU(True), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class Inverted(nn.Module):
    """A convolution for each channel, and channels that are weighed by what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.each, self.narrow = nn.Conv2d(4, 32, 1), nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 4, 1)
        self.first, self.second = nn.BatchNorm2d(32), nn.BatchNorm2d(32)
        self.squeeze, self.excite = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.each(self.first(self.wide(x)).relu())).relu()
        return self.narrow(x * self.excite(self.squeeze(x.mean((2, 3), keepdim=True)).relu()).sigmoid())


class Grouped(nn.Module):
    """Bottlenecks with a convolution in groups; their first one could sum a split stream as well."""

    def __init__(self, wide: int = 32, groups: int = 8) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(4, 32, 3, padding=1), nn.Linear(32, 8)
        self.blocks = nn.ModuleList(nn.ModuleDict({
            "down": nn.Conv2d(32, wide, 1, bias=False), "norm": nn.BatchNorm2d(wide),
            "each": nn.Conv2d(wide, wide, 3, padding=1, groups=groups, bias=False),
            "up": nn.Conv2d(wide, 32, 1, bias=False), "last": nn.BatchNorm2d(32),
        }) for _ in range(2))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            made = block["each"](block["norm"](block["down"](x)).relu()).relu()
            x = (x + block["last"](block["up"](made))).relu()
        return self.head(x.mean((2, 3)))


class Gated(nn.Module):
    """A Conformer's convolutions: one half of the channels gates the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 32, 1), nn.Conv1d(16, 4, 1)
        self.each, self.norm = nn.Conv1d(16, 16, 3, padding=1, groups=16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        made = self.each(functional.glu(self.first(x.transpose(1, 2)), 1))
        return x + self.second(functional.silu(self.norm(made))).transpose(1, 2)


def convolved(inputs: int, outputs: int, size: int = 1, **options: Any) -> nn.Sequential:
    """A convolution that keeps an image's size, with its norm."""
    made = nn.Conv2d(inputs, outputs, size, padding="same", bias=False, **options)
    return nn.Sequential(made, nn.BatchNorm2d(outputs), nn.ReLU())


class Branches(nn.Module):
    """Branches side by side, and what is done with the channels of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.far, self.pooled = convolved(4, 16), convolved(4, 16, 3, dilation=2), convolved(4, 8)
        self.norm, self.each = nn.BatchNorm2d(40), nn.Conv2d(40, 40, 3, padding=1, groups=40)
        self.project = nn.Conv2d(40, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        of_all = functional.interpolate(self.pooled(x.mean((2, 3), keepdim=True)), size=x.shape[-2:])
        made = torch.cat([self.one(x), self.far(x), of_all], 1)
        return self.project(self.each(functional.avg_pool2d(self.norm(made).relu(), 2)))


class Cheap(nn.Module):
    """Half of the channels are made of the other half, channel by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.each, self.last = convolved(4, 16), convolved(16, 16, 3, groups=16), convolved(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        return x + self.last(torch.cat([made, self.each(made)], 1))


class Dense(nn.Module):
    """Each layer reads what all before it made."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(32, 4, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (16, 24, 32))
        self.downs = nn.ModuleList(nn.Conv2d(n, 16, 1) for n in (16, 24))
        self.makers = nn.ModuleList(nn.Conv2d(16, 8, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        made = [self.stem(x)]
        for norm, down, maker in zip(self.norms, self.downs, self.makers, strict=False):
            made.append(maker(down(norm(torch.cat(made, 1)).relu()).relu()))
        return self.last(self.norms[2](torch.cat(made, 1)))


MODELS = {
    "plain": (Pair, images),
    "padded": (lambda: Pair(padding="same"), images),
    "around": (lambda: Pair(padding=1, padding_mode="circular"), images),
    "mirrored": (lambda: Pair(padding=1, padding_mode="reflect"), images),
    "transposed": (lambda: Pair(nn.ConvTranspose2d, stride=2), images),
    "separable": (Separable, sequences),
}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(5)
def test_pairs_are_split_by_channels(name: str, tp: int) -> None:
    make, call = MODELS[name]
    model, calls = make().double(), [call(3, 8), call(2, 11)]
    plan = suggest_text(model, tp, inputs=calls[0][0])
    assert "first.{weight,bias}: colwise" in plan and "rowwise" in plan
    assert tpplan.compile_plan(model, plan, tp, calls[0][0]).count_collectives()["all-reduce"] == 2
    assert max(worst(model, plan, tp, calls[0], calls)) < 1e-12


@pytest.mark.parametrize(
    "plan",
    [
        {"first": "colwise", "second": "rowwise"},
        {"first": {"style": "colwise", "output": "replicate"}},
    ],
)
def test_a_rule_may_name_the_modules(plan: dict[str, Any]) -> None:
    calls = [images(3, 8)]
    assert max(worst(Pair().double(), plan, 2, calls[0], calls)) < 1e-12


@pytest.mark.parametrize(("make", "tp"), in_turns([Bottleneck, Stacked, Inverted], [2, 4]))
@pytest.mark.one_in(3)
def test_batch_norms_and_pools_between_them_follow(make: type[nn.Module], tp: int) -> None:
    model, call = make().double(), images(3, 8)[0]
    plan = suggest_text(model, tp, inputs=call)
    assert "running_" in plan
    program = tpplan.compile_plan(model, plan, tp, call)
    held, whole = (
        sum(math.prod(shape) for shape in shapes)
        for shapes in zip(*((p.local_shape, p.shape) for p in program.parameters), strict=True)
    )
    assert held < whole * (0.75 if tp == 2 else 0.6)
    report = tpplan.verify(model, plan, tp, call)
    assert report.ok, report.problems


@pytest.mark.parametrize(("make", "tp"), in_turns([Branches, Cheap, Dense], [2, 4]))
@pytest.mark.one_in(3)
def test_channels_that_are_concatenated_are_packs(make: type[nn.Module], tp: int) -> None:
    model, calls = make().double(), [images(3, 8), images(2, 10)]
    plan = suggest_text(model, tp, inputs=calls[0][0])
    assert "style: rowwise, packed: " in plan
    program = tpplan.compile_plan(model, plan, tp, calls[0][0])
    whole = {p.name for p in program.parameters if len(p.shape) > 1 and p.local_shape == p.shape}
    assert not whole
    assert max(worst(model, plan, tp, calls[0], calls)) < 1e-11


@pytest.mark.parametrize("make", [Branches, Dense])
def test_a_walk_may_leave_what_is_concatenated_whole(make: type[nn.Module]) -> None:
    subject = make_subject(make().double(), 2, images(3, 8)[0], {})
    rules = Rules(2, subject.trace.batch)
    joined, apart = (find_roles(subject, rules, lenient=True, apart=held) for held in (False, True))
    assert joined.joins and apart.joins
    assert len(_names(apart)) < len(_names(joined))
    assert any("concatenates values along the sharded dim" in reason for reason in apart.reasons.values())


def _names(roles: Roles) -> set[str]:
    return {name for group in roles.groups for name in group.settings}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("wide", [32, 64])
@pytest.mark.one_in(3)
def test_a_stream_stays_whole_for_convolutions_in_groups(wide: int, tp: int) -> None:
    model, call = Grouped(wide).double(), images(3, 8)
    plan = suggest_text(model, tp, inputs=call[0])
    assert "blocks.*.each.weight: colwise" in plan and "blocks.*.up.weight: rowwise" in plan
    assert max(worst(model, plan, tp, call, [call, images(2, 5)])) < 1e-12


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tp", [2, 3])
def test_halves_of_which_one_gates_the_other_are_packs(tp: int) -> None:
    model, call = Gated().double(), sequences(3, 8)
    plan = suggest_text(model, tp, inputs=call[0])
    assert "packed: [gate, up]" in plan and "each.{weight,bias}: colwise" in plan
    assert max(worst(model, plan, tp, call, [call, sequences(2, 5)])) < 1e-12


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tp", [2, 4])
def test_group_norms_follow_the_channels(tp: int) -> None:
    model, calls = Residual().double(), [images(3, 8), images(2, 11)]
    plan = suggest_text(model, tp, inputs=calls[0][0])
    assert "between.{weight,bias}: colwise" in plan
    assert max(worst(model, plan, tp, calls[0], calls)) < 1e-12


def test_a_convolution_and_a_linear_layer_are_a_pair() -> None:
    model = nn.Sequential(nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 8)).double()
    plan = suggest_text(model, 2, inputs=images(3, 8)[0])
    assert "0.{weight,bias}: colwise" in plan and "3: rowwise" in plan


def test_a_group_that_a_rank_would_cut_stays_whole_with_its_cause() -> None:
    with pytest.raises(CompileError, match="normalizes groups of channels that several ranks hold"):
        suggest_text(Residual(groups=1).double(), 2, inputs=images(3, 8)[0])


def test_sizes_that_a_module_keeps_as_tensors_are_read() -> None:
    model, calls = Codec().double(), [sequences(3, 12), sequences(2, 17)]
    plan = suggest_text(model, 2, inputs=calls[0][0])
    assert "layers.1.conv" in plan and "layers.2.conv" in plan
    assert max(worst(model, plan, 2, calls[0], calls)) < 1e-12
