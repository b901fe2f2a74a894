"""Results that nobody reads, such as the hidden states and scores of every layer that a decoder keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan

WIDTH, LAYERS, HEADS = 16, 10, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        before = q @ k.transpose(-1, -2)
        after = before.softmax(-1)
        return self.out((after @ v).transpose(1, 2).flatten(2)), before, after


class Decoder(nn.Module):
    """Layers in one flat loop, which keeps what each makes."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.layers = nn.ModuleList(Attention() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        states, scores = [], []
        for norm, layer in zip(self.norms, self.layers, strict=True):
            made, before, after = layer(norm(x))
            x = x + made
            states.append(x)
            scores += [before, after]
        return x, states, scores


class Net(nn.Module):
    """Reads the last state alone; of the others, `reads` says what else."""

    def __init__(self, reads: str = "") -> None:
        super().__init__()
        self.decoder, self.reads = Decoder(), reads

    def forward(self, x: Tensor) -> Any:
        x, states, scores = self.decoder(x)
        if self.reads == "sizes":
            return x * sum(held.shape[1] for held in scores)
        return (x, *states) if self.reads == "all states" else x


RULES = {"**.{q,k,v}": "colwise", "**.out": "rowwise"}


@pytest.mark.parametrize("reads", ["", "sizes", "all states"])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_decoder_that_keeps_everything(reads: str, sequence: bool) -> None:
    """Of ten layers with three layouts each there are sixty thousand combinations, with their scores far more."""
    torch.manual_seed(0)
    model = Net(reads).double()
    rules = RULES | ({"**.norms.*": "sequence"} if sequence else {})
    report = tpplan.verify(model, {"version": 1, "modules": rules}, 2, (torch.randn(2, 8, WIDTH).double(),))
    assert report.ok and report.collectives == report.predicted
