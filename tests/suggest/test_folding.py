"""Places that become channels, channels that become places, and images that are read at the places of a grid."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.marking import in_turns
from tests.runtime.simulated import Call, worst
from tpplan.api import suggest_text

WIDTH, HEADS = 16, 4


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def images(batch: int, size: int) -> Call:
    return (drawn(batch, WIDTH, size, size),), {}


class Upscaling(nn.Module):
    """Super-resolution: four channels make one of four times the places."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.each, self.tail = nn.Conv2d(WIDTH, 64, 3, padding=1), nn.PReLU(), nn.Conv2d(WIDTH, 3, 3)
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.each(self.shuffle(self.wide(x))))


class Shrinking(nn.Module):
    """The other way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(WIDTH, 24, 3, padding=1), nn.Conv2d(96, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(functional.pixel_unshuffle(self.first(x).relu(), 2))


class Neighbours(nn.Module):
    """Attention to the nine places around."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Conv2d(WIDTH, WIDTH, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        query = self.query(x).reshape(batch, HEADS, WIDTH // HEADS, 1, -1)
        key, value = (
            functional.unfold(layer(x), 3, padding=1).reshape(batch, HEADS, WIDTH // HEADS, 9, -1)
            for layer in (self.key, self.value)
        )
        scores = (query * key).sum(2, keepdim=True).softmax(3)
        return self.out((scores * value).sum(3).reshape(batch, WIDTH, height, width))


class Outlook(nn.Module):
    """Each place weighs its nine neighbours for each of these, which are then summed where they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.weigh, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 81 * HEADS),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        x = x.permute(0, 2, 3, 1)
        places = height * width
        value = functional.unfold(self.value(x).permute(0, 3, 1, 2), 3, padding=1)
        value = value.reshape(batch, HEADS, WIDTH // HEADS, 9, places).permute(0, 1, 4, 3, 2)
        weights = self.weigh(x).reshape(batch, places, HEADS, 9, 9).permute(0, 2, 1, 3, 4).softmax(-1)
        made = (weights @ value).permute(0, 1, 4, 3, 2).reshape(batch, WIDTH * 9, places)
        return self.out(functional.fold(made, (height, width), 3, padding=1).permute(0, 2, 3, 1))


class Deformable(nn.Module):
    """Attention to a few places of an image, which each head chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets, self.weights = nn.Linear(WIDTH, HEADS * 6), nn.Linear(WIDTH, HEADS * 3)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        x = x.flatten(2).transpose(1, 2)
        count = x.shape[1]
        offsets = self.offsets(x).view(batch, count, HEADS, 3, 2)
        weights = self.weights(x).view(batch, count, HEADS, 3).softmax(-1)
        value = self.value(x).transpose(1, 2).reshape(batch * HEADS, WIDTH // HEADS, height, width)
        grid = offsets.transpose(1, 2).flatten(0, 1)
        found = functional.grid_sample(value, grid, align_corners=False)  # (batch · heads, features, places, 3)
        made = (found * weights.transpose(1, 2).reshape(batch * HEADS, 1, count, 3)).sum(-1)
        return self.out(made.view(batch, WIDTH, count).transpose(1, 2))


class Warped(nn.Module):
    """All channels are read at the same places, which a layer chooses that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.flow, self.first, self.second = nn.Conv2d(WIDTH, 2, 1), nn.Conv2d(WIDTH, 32, 1), nn.Conv2d(32, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        grid = self.flow(x).permute(0, 2, 3, 1).tanh()
        return self.second(functional.grid_sample(self.first(x), grid, align_corners=True))


KINDS = (Upscaling, Shrinking, Neighbours, Outlook, Deformable, Warped)


@pytest.mark.parametrize(("kind", "tp"), in_turns(KINDS, (2, 4)))
@pytest.mark.one_in(5)
def test_layers_around_them_are_split(kind: type[nn.Module], tp: int) -> None:
    torch.manual_seed(0)
    stock, example = nn.Sequential(kind()).double(), images(2, 6)
    text = suggest_text(stock, tp, inputs=example[0])
    whole = re.findall(r"^#   - (\S+) \(", text, re.MULTILINE)
    assert whole == (["*.flow"] if kind is Warped else [])
    calls = [example, images(3, 6), images(1, 8)]
    assert max(worst(stock, text, tp, example, calls)) < 1e-12  # float64: some 100 sums of numbers near 1, with room
    report = tpplan.verify(stock, text, tp, example[0])
    assert report.ok and report.collectives == report.predicted, report.problems
    # Beside those of the pair, one for the gradients of what is whole between its layers, or chooses the grid.
    assert report.collectives == {"all-reduce": 3 if kind in (Warped, Upscaling) else 2}
