"""Whatever a body does with the features of a split projection: it is proved equal, or refused with a code."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tpplan

WIDTH, FEATURES, RANKS = 8, 48, 2
SAMPLE = torch.randn(2, 4, WIDTH, requires_grad=True)
Step = Callable[[random.Random, list[Tensor]], list[Tensor]]
PROJECTIONS = ("colwise", {"style": "colwise", "packed": ["q", "k", "v"]}, {"style": "colwise", "packed": {"q": 24, "k": 12, "v": 12}})


def _factors(size: int, rng: random.Random) -> list[int]:
    first = rng.choice([n for n in range(1, size + 1) if size % n == 0])
    if rng.random() < 0.3:
        second = rng.choice([n for n in range(1, size // first + 1) if (size // first) % n == 0])
        return [first, second, size // first // second]
    return [first, size // first]


def _dim(x: Tensor, rng: random.Random) -> int:
    """One of the dims, the last ones more often, by either spelling."""
    dim = max(rng.randrange(x.dim()), rng.randrange(x.dim()))
    return dim - (x.dim() if rng.random() < 0.5 else 0)
