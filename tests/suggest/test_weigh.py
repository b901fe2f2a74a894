"""Of two plans that are proved, the one is suggested that weighs less."""

import importlib

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpplan.parity.verification import verify_program
from tpplan.plan import Pin, Style
from tpplan.suggest import search
from tpplan.suggest.weigh import weigh

WIDTH, HEADS = 64, 4


class Block(nn.Module):
    """A block of a diffusion transformer, whose norms are modulated by what is made of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate, *others = self.modulation(time)[:, None].chunk(6, -1)
        y = self.norms[0](x) * (1 + scale) + shift
        q, k, v = self.qkv(y).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        shift, scale, gate = others
        return x + gate * self.down(F.gelu(self.up(self.norms[1](x) * (1 + scale) + shift)))


class Diffusion(nn.Module):
    """Patches in, patches out, and two layers for the time."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.patches = nn.Linear(8, WIDTH)
        self.time = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.end = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x, time = self.patches(x), self.time(time)
        for block in self.blocks:
            x = block(x, time)
        return self.end(x)


def call(tokens: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(2, tokens, 8), torch.randn(2, 16)


@pytest.mark.parametrize("size", [2, 4])
def test_small_results_are_gathered_rather_than_a_stream_split(size: int) -> None:
    torch.manual_seed(0)
    model = Diffusion().double()
    inputs = tuple(tensor.double() for tensor in call())
    found = search(model, size, inputs, {}, False)
    for block in ("blocks.0", "blocks.1"):
        modulation = found.settings[f"{block}.modulation.1"]
        assert (modulation.style, modulation.output) == (Style.COLWISE, Pin.REPLICATE)
        assert [found.settings[f"{block}.{name}"].style for name in ("qkv", "out", "up", "down")] == [
            Style.COLWISE, Style.ROWWISE, Style.COLWISE, Style.ROWWISE,
        ]  # fmt: skip
    assert verify_program(model, found.program, (inputs, {})).ok


class Stream(nn.Module):
    """A stream without norms, of which a split by features would make every sum wide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.first(x)
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(x)))
        return self.last(x)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "left_out"), [(Diffusion, "_gather"), (Stream, "_before_wide_rows")])
def test_a_change_makes_the_plan_lighter(kind: type[nn.Module], left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    searching = importlib.import_module("tpplan.suggest.settings")
    with torch.device("meta"):
        model, inputs = kind(), call()
    found = weigh(search(model, 2, inputs, {}, False).program)
    assert weigh(search(model, 2, inputs, {}, False).program) == found
    monkeypatch.setattr(searching, left_out, lambda *_: {})
    assert weigh(search(model, 2, inputs, {}, False).program) > found


def test_a_layer_is_gathered_for_few_tokens_alone() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = (
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.Softmax(-1),
                nn.Linear(4 * WIDTH, WIDTH),
            )
            self.pair = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.pair(x + self.second(self.norm(self.first(x))))

    with torch.device("meta"):
        model = Wide()
        few, many = (search(model, 2, (torch.randn(count, WIDTH),), {}, False) for count in (2, 64))
    assert few.settings["first"].output is Pin.REPLICATE
    assert "first" not in many.settings and "first" in many.reasons
    assert [many.settings[name].style for name in ("pair.0", "pair.2")] == [Style.COLWISE, Style.ROWWISE]
