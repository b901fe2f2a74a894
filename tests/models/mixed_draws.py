"""Models whose bodies draw random numbers for sharded and for replicated values.

`mixed_draws("bart")` gives a stock model in training mode, a plan, and the keywords of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tpplan.compat.modes import TorchDispatchMode
from tpplan.compat.schemas import OpOverload

HIDDEN, WIDE, HEADS = 16, 32, 4

Subject = tuple[nn.Module, dict[str, Any], dict[str, Any]]


class Functional(nn.Module):
    """Dropouts of features and of the residual stream in one body, and one of the stream that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)
        self.first = self.second = self.last = 0.3

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        functional.dropout(x, self.first, self.training)
        h = functional.dropout(self.up(x).relu(), self.second, self.training)
        y = functional.dropout(self.down(h), self.last, self.training)
        y = functional.dropout(y, self.last, self.training)
        return x + (functional.dropout(y, self.last, self.training) if twice else y)


class OneDropoutInTwoPlaces(nn.Module):
    """Only the body that calls the dropout knows for what."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.dropout(self.up(x).relu())))


class DerivedSizes(nn.Module):
    """Attention that runs from its record, as it derives its heads' size, with its residual dropout in the body."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            layer(x).view(batch, length, HEADS, width // HEADS).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        weights = functional.dropout((q @ k.transpose(2, 3)).softmax(-1), 0.3, self.training)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, length, width)
        return functional.dropout(self.o(mixed), 0.3, self.training)


class Layers(nn.Module):
    """A body that mixes around bodies that do, with a module of its own for one of its dropouts."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(inner)
        self.first, self.last = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)
        self.between = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.3, self.training)
        for layer in self.layers:
            x = layer(x)
        h = self.between(self.first(x))
        h = functional.dropout(h, 0.3, self.training)
        return functional.dropout(self.last(h), 0.3, self.training)


_BART = {
    "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 8, "use_cache": False,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 80, "decoder_ffn_dim": 112, "vocab_size": 88, "pad_token_id": 1,
    "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3, "max_position_embeddings": 64,
    "dropout": 0.1, "activation_dropout": 0.1, "attention_dropout": 0.1,
}  # fmt: skip
_SEED = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6,
    "intermediate_size": 80, "vocab_size": 88, "max_position_embeddings": 64, "use_cache": False,
    "attention_dropout": 0.1, "residual_dropout": 0.1,
}  # fmt: skip
_SEED_PLAN = {
    "model.layers.*.self_attn.{q,k,v}_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.{gate,up}_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


def _of_transformers(kind: str, settings: dict[str, Any], attention: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model(kind, **settings, attn_implementation=attention)
    return (AutoModelForSeq2SeqLM if kind == "bart" else AutoModelForCausalLM).from_config(config)


_TOYS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "functional": (Functional, {"up": "colwise", "down": "rowwise"}),
    "one dropout in two places": (OneDropoutInTwoPlaces, {"up": "colwise", "down": "rowwise"}),
    "from its record": (lambda: nn.Sequential(DerivedSizes()), {"0.{q,k,v}": "colwise", "0.o": "rowwise"}),
    "nested": (
        lambda: Layers(Functional(), OneDropoutInTwoPlaces()),
        {"first": "colwise", "last": "rowwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"},
    ),
}
TOYS = tuple(_TOYS)
SUBJECTS = (*TOYS, "bart", "seed_oss")


def mixed_draws(name: str, attention: str = "eager") -> Subject:
    """The model of this name in training mode, a plan for it, and the keywords of a call."""
    from tests.plans.parity import PLANS
    from tpplan.plan import load_plan

    torch.manual_seed(0)
    numbers = torch.Generator().manual_seed(1)
    if name in _TOYS:
        maker, rules = _TOYS[name]
        model: nn.Module = maker()
        first = "input" if isinstance(model, nn.Sequential) else "x"
        keywords = {first: torch.randn(3, 12, HIDDEN, generator=numbers, dtype=torch.float64)}
    else:
        model = _of_transformers(name, _BART if name == "bart" else _SEED, attention)
        rules = load_plan(PLANS / "bart.yaml").to_dict()["modules"] if name == "bart" else _SEED_PLAN
        keywords = {"input_ids": torch.randint(4, 88, (3, 12), generator=numbers)}
        if name == "bart":
            keywords["decoder_input_ids"] = torch.randint(4, 88, (3, 8), generator=numbers)
    return model.double().train(), {"version": 1, "modules": rules}, keywords


@contextmanager
def dropouts_that_drop_nothing() -> Iterator[None]:
    """A block in which each dropout draws its mask, and then doesn't apply it: what is computed is exact."""

    def draw(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return input + 0 * torch.empty_like(input).bernoulli_(1 - p) if training and p else input

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "dropout", draw)
        yield


class Masks(TorchDispatchMode):
    """A block in which the mask of each dropout, in order, is added to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bernoulli_.float:
            self.found.append((result != 0).double())
        return result
