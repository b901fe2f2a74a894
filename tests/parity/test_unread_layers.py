"""Layers of which nobody reads what they compute, as the last block's of two streams of which one is read on."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

import tpplan
from tests.runtime.simulated import worst
from tpplan.compat.process_groups import fake_process_group
from tpplan.compiler.pipeline import compile_call
from tpplan.compiler.request import Request
from tpplan.parity.verification import verify_program
from tpplan.plan import load_plan
from tpplan.suggest import search

WIDTH, HEADS = 16, 4
RULES: dict[str, Any] = {
    "blocks.*.{picture,words}": {"style": "colwise", "packed": ["q", "k", "v"]},
    "blocks.*.{picture,words}_out": "rowwise",
    "blocks.*.mlp.0": "colwise",
    "blocks.*.mlp.2": "rowwise",
}


class Joint(nn.Module):
    """Attention of two streams over both; then an MLP of the words."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.picture, self.words = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.picture_out, self.words_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        size = WIDTH // HEADS
        parts = [part.unflatten(-1, (-1, size)) for each in (words, x) for part in self._of(each, each is x)]
        q, k, v = (torch.cat((a, b), 1).transpose(1, 2) for a, b in zip(parts[:3], parts[3:], strict=True))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        words = words + self.words_out(mixed[:, : words.shape[1]])
        return x + self.picture_out(mixed[:, words.shape[1] :]), words + self.mlp(self.norm(words))

    def _of(self, stream: Tensor, is_picture: bool) -> tuple[Tensor, ...]:
        return (self.picture if is_picture else self.words)(stream).chunk(3, -1)


class Pictures(nn.Module):
    """Nobody reads what the last block makes of the words."""

    rules: ClassVar = RULES

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Joint() for _ in range(2))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        for block in self.blocks:
            x, words = block(x, words)
        return x


class Unused(nn.Module):
    """A head whose two layers are called, and dropped; the second isn't in the plan."""

    rules: ClassVar = {"up": "colwise", "down": "rowwise", "aside": "colwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.aside, self.scores = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(x).relu())
        self.scores(self.aside(x).tanh())
        return x * 2


def call_of(kind: Any, length: int = 6) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = torch.randn(3, length, WIDTH, dtype=torch.float64)
    return ((x, torch.randn(3, 5, WIDTH, dtype=torch.float64)) if kind is Pictures else (x,)), {}


def made(kind: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", [Pictures, Unused])
@pytest.mark.one_in(3)
def test_equal_to_the_unsharded_model(kind: Any, tp: int) -> None:
    assert max(worst(made(kind), kind.rules, tp, call_of(kind), [call_of(kind), call_of(kind, 9)])) < 1e-13


@pytest.mark.parametrize("kind", [Pictures, Unused])
def test_counted_as_predicted(kind: Any) -> None:
    plan = load_plan({"version": 1, "modules": kind.rules})
    program = compile_call(Request(made(kind), plan, 2, *call_of(kind))).program
    counted: list[int] = []
    with fake_process_group(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded = tpplan.parallelize(made(kind), plan, mesh, call_of(kind)[0])
        with CommDebugMode() as mode:
            result = sharded(*call_of(kind)[0])
            counted.append(mode.get_total_counts())
            result.sum().backward()
        counted.append(mode.get_total_counts())
    assert counted == [sum(program.count_collectives(backward=way).values()) for way in (False, True)]


@pytest.mark.parametrize("sequence", [False, True])
def test_suggest_splits_them_like_their_siblings(sequence: bool) -> None:
    stock = made(Pictures)
    found = search(stock, 2, *call_of(Pictures), sequence)
    split = {name for name, held in found.settings.items() if held.style.value in ("colwise", "rowwise")}
    assert {name for name, module in stock.named_modules() if isinstance(module, nn.Linear)} == split
    parity = verify_program(stock, found.program, call_of(Pictures))
    assert not parity.problems and parity.max_error < 1e-13


class Gates(nn.Module):
    """WaveNet (van den Oord et al., 2016): what the last layer adds to the stream is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.signal, self.gate = (nn.ModuleList(nn.Conv1d(WIDTH, 24, 1) for _ in range(2)) for _ in range(2))
        self.stream, self.skip = (nn.ModuleList(nn.Conv1d(24, WIDTH, 1) for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.zeros_like(x)
        for signal, gate, stream, skip in zip(self.signal, self.gate, self.stream, self.skip, strict=True):
            inner = signal(x).tanh() * gate(x).sigmoid()
            made = made + skip(inner)
            x = x + stream(inner)
        return made


@pytest.mark.parametrize("tp", [2, 3])
def test_convolutions_of_which_nobody_reads_the_last(tp: int) -> None:
    model, call = Gates(), (torch.randn(2, WIDTH, 6),)
    rules: dict[str, Any] = {"{signal,gate}.*": "colwise", "{stream,skip}.*": "rowwise"}
    report = tpplan.verify(model, {"version": 1, "modules": rules}, tp, call)
    assert report.ok, report.problems
    found = search(model, tp, call, {}, False)
    assert {name for name, held in found.settings.items() if held.style.value == "rowwise"} >= {"stream.1.weight"}


class Feed(nn.Module):
    """A normed pair of layers; a number for each token is passed along, which the layer may not read."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.pick, self.reads = nn.Linear(WIDTH, 8), reads

    def forward(self, x: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        key = self.pick(x)
        chosen = (key @ key.transpose(1, 2)).topk(4, -1).indices
        if self.reads and before is not None:
            chosen = chosen + before * 0
        return x + self.down(self.up(self.norm(x)).relu()) * (chosen.sum(-1, keepdim=True) > 0), chosen


class Chosen(nn.Module):
    """A tensor is handed from layer to layer, and nobody reads it."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Feed(reads), Feed(reads)])

    def forward(self, x: Tensor) -> Tensor:
        chosen = None
        for layer in self.layers:
            x, chosen = layer(x, chosen)
        return x


@pytest.mark.parametrize("reads", [False, True])
def test_what_is_passed_on_may_be_read_or_not(reads: bool) -> None:
    torch.manual_seed(0)
    stock, call = Chosen(reads).double(), ((torch.randn(2, 6, WIDTH, dtype=torch.float64),), {})
    found = search(stock, 2, *call, False)
    assert {f"layers.{i}.{leaf}" for i in range(2) for leaf in ("up", "down")} <= found.settings.keys()
    parity = verify_program(stock, found.program, call)
    assert not parity.problems and parity.max_error < 1e-13


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Pooled(nn.Module):
    """A head computes for nobody before a stream that is normed at last."""

    def __init__(self, kind: type[nn.Module] = Branch) -> None:
        super().__init__()
        self.layers, self.norm = nn.Sequential(kind(), kind()), nn.LayerNorm(WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.head(x)
        return self.norm(self.layers(x))


def test_a_head_for_nobody_leaves_the_models_result_its_gradient() -> None:
    torch.manual_seed(0)
    stock, call = Pooled().double(), ((torch.randn(2, 6, WIDTH, dtype=torch.float64),), {})
    found = search(stock, 2, *call, True)
    assert found.settings["norm"].style.value == "sequence"
    parity = verify_program(stock, found.program, call)
    assert not parity.problems and parity.max_error < 1e-13


class Dropping(nn.Module):
    """Attention with dropout, whose mask torch makes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.query, self.key, self.value))
        made = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        return x + self.out(made.transpose(1, 2).flatten(2))


def test_a_head_for_nobody_stands_beside_attention_with_dropout() -> None:
    torch.manual_seed(0)
    stock, call = Pooled(Dropping).double(), ((torch.randn(2, 6, WIDTH, dtype=torch.float64),), {})
    found = search(stock, 2, *call, False)
    layers = {f"layers.{i}.{leaf}" for i in range(2) for leaf in ("query", "key", "value", "out")}
    assert layers <= found.settings.keys()
