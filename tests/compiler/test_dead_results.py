"""Results that nobody reads, such as the hidden states and scores of every layer that a decoder keeps."""

from __future__ import annotations

import importlib
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

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.layers = nn.ModuleList(Attention() for _ in range(layers))

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

    def __init__(self, reads: str = "", layers: int = LAYERS) -> None:
        super().__init__()
        self.decoder, self.reads, self.norm = Decoder(layers), reads, nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        x, states, scores = self.decoder(x)
        if self.reads == "sizes":
            return x * sum(held.shape[1] for held in scores)
        if self.reads == "a state again":
            return self.norm(states[0]) + x, states
        return (x, *states) if self.reads == "all states" else x


RULES = {"**.{q,k,v}": "colwise", "**.out": "rowwise"}


@pytest.mark.parametrize("reads", ["", "sizes", "all states"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.one_in(5)
def test_a_decoder_that_keeps_everything(reads: str, sequence: bool) -> None:
    """Of ten layers with three layouts each there are sixty thousand combinations, with their scores far more."""
    torch.manual_seed(0)
    model = Net(reads).double()
    rules = RULES | ({"**.norms.*": "sequence"} if sequence else {})
    report = tpplan.verify(model, {"version": 1, "modules": rules}, 2, (torch.randn(2, 8, WIDTH).double(),))
    assert report.ok and report.collectives == report.predicted


def followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let states hold the layouts of all that leaves, up to the end of each body."""
    regions = importlib.import_module("tpplan.compiler.bind.regions")
    monkeypatch.setattr(regions, "live_values", lambda root: set(range(10_000)))  # pyright: ignore
    monkeypatch.setattr(regions, "final_values", lambda root, dead: set())  # pyright: ignore
    monkeypatch.setattr(importlib.import_module("tpplan.compiler.place.body"), "_leaving", lambda *_: [()] * 1_000)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("reads", ["", "all states", "a state again"])
@pytest.mark.parametrize("sequence", [False, True])
def test_what_isnt_followed_costs_as_little(reads: str, sequence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers are few enough to try all combinations of what leaves."""
    rules = RULES | ({"**.norms.*": "sequence", "norm": "sequence"} if sequence else {})
    sent: list[tuple[Any, int]] = []
    for change in (None, followed):
        if change is not None:
            change(monkeypatch)
        torch.manual_seed(0)
        model, x = Net(reads, 2).double(), torch.randn(2, 8, WIDTH, dtype=torch.float64)
        program = tpplan.compile_plan(model, {"version": 1, "modules": rules}, 2, (x,))
        counts = [program.count_collectives(backward=backward) for backward in (False, True)]
        sent.append(
            (counts, sum(move.bytes for module in program.modules for move in (*module.entries, *module.exits)))
        )
    assert sent[0] == sent[1]


class Unread(nn.Module):
    """Computes what nobody reads, in a body that is equal to one that runs from its record."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.other, self.last = (nn.Linear(8, 12) for _ in range(3))
        self.down, self.unread = nn.Linear(12, 8), nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        made = self.down(self.up(x))
        twice, other = made + made, self.other(x)
        self.unread(nn.functional.layer_norm(other, other.shape[-1:]))
        self.last(twice)
        self.up(x)
        return self.norm(made)


def test_a_body_whose_result_nobody_reads_has_no_record() -> None:
    x, rules = torch.randn(2, 6, 8, requires_grad=True), {"down": "rowwise", "unread": "rowwise"}
    tpplan.compile_plan(Unread(), {"version": 1, "modules": rules}, 2, (x,))
    with pytest.raises(tpplan.CompileError, match="TP107"):
        tpplan.compile_plan(Unread(), {"version": 1, "modules": rules | {"norm": "sequence"}}, 2, (x,))
