"""Models outside of transformers: torch's own modules by their resets, others by `build`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import tpplan
from tests.initialize.compare import Make, differences, on_meta, parts, stock_of, unlike
from tests.zoo.torch_models import NanoGPT, mixture_of_experts, torch_decoder, torch_encoder

WIDTH, HEADS, FEED = 16, 4, 24


class Mlp(nn.Module):
    def __init__(self, width: int, feed: int, dropout: float = 0.0) -> None:
        super().__init__()
        hidden = feed // 2 * 2
        self.up = nn.Linear(width, hidden)
        self.drop = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.relu(self.up(x))))


class Stack(nn.Module):
    """A user's classes that only put modules together."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.width = WIDTH
        self.table = nn.Embedding(12, self.width, padding_idx=3)
        self.blocks = nn.ModuleList([Mlp(WIDTH, FEED) for _ in range(layers)])
        self.more = nn.ModuleList()
        for index in range(layers):
            self.more.append(Mlp(WIDTH, FEED + index))
        if layers > 1:
            self.norm = nn.LayerNorm(WIDTH)
        else:
            self.norm = nn.Identity()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 5))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in (*self.blocks, *self.more):
            x = x + block(x)
        return self.head(self.norm(x))


class Gpt(NanoGPT):
    """NanoGPT with its initialisation: one function for all modules, then the residual projections again."""

    def __init__(self) -> None:
        super().__init__(24, WIDTH, HEADS)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 64, 64), persistent=False)
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / (2 * 2) ** 0.5)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


GPT_PLAN = {
    "transformer.h.*.attn.c_attn": {"style": "colwise", "packed": ["q", "k", "v"]},
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.{attn,mlp}.c_proj": "rowwise",
    "transformer.wte": "vocab",
    "lm_head": "colwise",
}
STACK_PLAN = {"{blocks,more}.*.up": "colwise", "{blocks,more}.*.down": "rowwise", "table": "vocab"}
IDS = {"ids": torch.zeros(3, 8, dtype=torch.long)}

RESETS: dict[str, Make] = {
    "sequential": lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Bilinear(2, 3, 4), nn.PReLU()),
    "attention": lambda: nn.MultiheadAttention(WIDTH, HEADS, bias=True, add_bias_kv=True),
    "layer of torch's encoder": lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, FEED),
    "layer of torch's decoder": lambda: nn.TransformerDecoderLayer(WIDTH, HEADS, FEED),
    "padding": lambda: nn.Sequential(nn.Embedding(9, 4, padding_idx=-2), nn.EmbeddingBag(5, 3)),
    "norms": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.RMSNorm(4), nn.InstanceNorm2d(3)),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose1d(3, 4, 2)),
    "recurrent": lambda: nn.Sequential(nn.LSTM(3, 4, 2, bidirectional=True), nn.GRUCell(3, 4)),
    "float64": lambda: nn.Sequential(nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 3, dtype=torch.float64)),
    "one module twice": lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2, nn.Linear(4, 2)),
    "the user's classes": Stack,
}


@pytest.mark.parametrize("name", RESETS)
def test_modules_are_reset_in_their_order(name: str) -> None:
    assert differences(RESETS[name], on_meta(RESETS[name])) == []


BUILDS: dict[str, Make] = {
    "nanogpt": Gpt,
    "experts in lists": lambda: mixture_of_experts(24, WIDTH, HEADS, FEED),
    "copies of a layer": lambda: torch_encoder(WIDTH, HEADS, FEED),
    "copies of a decoder's": lambda: torch_decoder(WIDTH, HEADS, FEED),
    "torch's transformer": lambda: nn.Transformer(WIDTH, HEADS, 1, 2, FEED),
    "bfloat16": lambda: nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 4)).to(torch.bfloat16),
    "resets alike": Stack,
}


@pytest.mark.parametrize("name", BUILDS)
def test_what_build_makes(name: str) -> None:
    assert differences(BUILDS[name], on_meta(BUILDS[name]), BUILDS[name]) == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("make", "plan", "build"), [(Gpt, GPT_PLAN, Gpt), (Stack, STACK_PLAN, None)])
def test_a_ranks_parts(make: Make, plan: dict[str, Any], build: Make | None, rank: int) -> None:
    assert differences(make, parts(make, plan, IDS, rank), build) == []


@pytest.mark.parametrize("rank", range(3))
def test_uneven_parts(rank: int) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 10), nn.Linear(10, 4))

    model = parts(make, {"0": "colwise", "1": "rowwise"}, (torch.zeros(2, 4),), rank, size=3)
    assert differences(make, model) == []


def test_a_model_with_numbers_keeps_its_parameters() -> None:
    model = Stack()
    model.head[2].bias.requires_grad_(False)
    held = {name: (tensor, tensor.data_ptr()) for name, tensor in model.named_parameters()}
    version = model.table.weight._version
    assert differences(Stack, model) == ["head.2.bias's flags"]
    assert all(held[name] == (p, p.data_ptr()) for name, p in model.named_parameters())
    assert model.table.weight._version > version


def test_a_model_of_which_a_part_is_on_meta() -> None:
    model = Stack()
    model.blocks[1].to("meta")
    kept = model.head[0].weight
    assert differences(Stack, model) == [] and model.head[0].weight is kept


def test_ties_of_a_build() -> None:
    model: Any = on_meta(Gpt)
    stock, _ = stock_of(Gpt)
    torch.manual_seed(5)
    tpplan.init_weights(model, build=Gpt)
    assert model.transformer["wte"].weight is model.lm_head.weight and unlike(model, stock) == []


def test_what_a_checkpoint_has_not_is_initialised_by_itself(tmp_path: Path) -> None:
    torch.manual_seed(3)
    stored = Stack()
    kept = {name: tensor for name, tensor in stored.state_dict().items() if not name.startswith(("head", "blocks.1"))}
    save_file(kept, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Stack()
    with pytest.warns(UserWarning, match="init_weights"):
        tpplan.load_weights(model, tmp_path, strict=False)
    torch.manual_seed(5)
    fresh = Stack().state_dict()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    tpplan.init_weights(model, missing=True)
    assert torch.equal(torch.get_rng_state(), after)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, kept.get(name, fresh[name])), name
