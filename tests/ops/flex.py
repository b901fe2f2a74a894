"""Models around `flex_attention`, with functions that read what they like."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

attend: Any = flex_attention
compiled: Any = torch.compile(attend, backend="eager")
SIZE = 4


class Attention(nn.Module):
    """Heads, of which some share a key."""

    call: Any = staticmethod(attend)

    def __init__(self, heads: int = 8, keys: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.o = nn.Linear(16, heads * SIZE), nn.Linear(heads * SIZE, 16)
        self.k, self.v = nn.Linear(16, keys * SIZE), nn.Linear(16, keys * SIZE)

    def settings(self, x: Tensor) -> dict[str, Any]:
        return {}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        made: Any = self.call(q, k, v, enable_gqa=True, **self.settings(x))
        made = made[0] * made[1].tanh()[..., None] if isinstance(made, tuple) else made
        return x + self.o(made.transpose(1, 2).flatten(2))


class Distance(Attention):
    def settings(self, x: Tensor) -> dict[str, Any]:
        return {"score_mod": lambda score, b, h, q, k: score + 0.1 * (k - q)}


class Softcap(Attention):
    def settings(self, x: Tensor) -> dict[str, Any]:
        return {"score_mod": lambda score, *_: 2 * torch.tanh(score / 2), "scale": 0.3, "return_lse": True}


class Compiled(Distance):
    call = staticmethod(compiled)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


class Causal(Attention):
    def settings(self, x: Tensor) -> dict[str, Any]:
        return {"block_mask": create_block_mask(causal, None, None, x.shape[1], x.shape[1], device=x.device)}


class Documents(Attention):
    """A mask that reads which document a token is of, entry by entry of the batch."""

    def settings(self, x: Tensor) -> dict[str, Any]:
        documents = (x[..., 0] > 0).long()

        def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (documents[b, q] == documents[b, k])

        length = x.shape[1]
        return {"block_mask": create_block_mask(same, x.shape[0], None, length, length, device=x.device)}


class Padded(Attention):
    """A mask of bools, which have no gradient."""

    def settings(self, x: Tensor) -> dict[str, Any]:
        padding = x[..., 0] > -1

        def is_there(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return torch.where(padding[b, k], score, -1e9)

        return {"score_mod": is_there}


class Bias(Attention):
    """A learned bias, the same for all heads."""

    def __init__(self, heads: int = 8, keys: int = 4) -> None:
        super().__init__(heads, keys)
        self.bias = nn.Parameter(torch.randn(64))

    def settings(self, x: Tensor) -> dict[str, Any]:
        bias = self.bias
        return {"score_mod": lambda score, b, h, q, k: score + bias[q - k + 32]}


class Slopes(Attention):
    """ALiBi: a slope for each head, in a buffer."""

    slopes: Tensor

    def __init__(self, heads: int = 8, keys: int = 4) -> None:
        super().__init__(heads, keys)
        self.register_buffer("slopes", 0.5 ** torch.arange(1, heads + 1))

    def settings(self, x: Tensor) -> dict[str, Any]:
        slopes = self.slopes
        return {"score_mod": lambda score, b, h, q, k: score + slopes[h] * (k - q)}


class HeadBias(Slopes):
    """A learned slope for each head."""

    def __init__(self, heads: int = 8, keys: int = 4) -> None:
        super().__init__(heads, keys)
        del self.slopes
        self.slopes = nn.Parameter(torch.randn(heads))


class Mixed(Slopes):
    """The head's slope, beside that of the first."""

    def settings(self, x: Tensor) -> dict[str, Any]:
        slopes = self.slopes
        return {"score_mod": lambda score, b, h, q, k: score + (slopes[h] - slopes[0]) * (k - q)}


class Scaled(Slopes):
    """Slopes that the function computes with before it picks one."""

    def settings(self, x: Tensor) -> dict[str, Any]:
        slopes = self.slopes
        return {"score_mod": lambda score, b, h, q, k: score + (slopes * 2)[h] * (k - q)}


class Converted(Slopes):
    """The slope of the first head, and of the second for all others."""

    def settings(self, x: Tensor) -> dict[str, Any]:
        slopes = self.slopes
        return {"score_mod": lambda score, b, h, q, k: score + slopes[h.to(torch.bool).to(torch.int64)] * (k - q)}


class Diagonal(Slopes):
    """A slope for each head, on the diagonal of a table."""

    def __init__(self, heads: int = 8, keys: int = 4) -> None:
        super().__init__(heads, keys)
        del self.slopes
        self.slopes = nn.Parameter(torch.randn(heads, heads))

    def settings(self, x: Tensor) -> dict[str, Any]:
        slopes = self.slopes
        return {"score_mod": lambda score, b, h, q, k: score + slopes[h, h] * (k - q)}


class Table(Slopes):
    """A learned number for each distance and head."""

    def __init__(self, heads: int = 8, keys: int = 4) -> None:
        super().__init__(heads, keys)
        del self.slopes
        self.slopes = nn.Parameter(torch.randn(64, heads))

    def settings(self, x: Tensor) -> dict[str, Any]:
        slopes = self.slopes
        return {"score_mod": lambda score, b, h, q, k: score + slopes[q - k + 32, h]}


class BufferedTable(Slopes):
    """A number for each head and distance, in a buffer."""

    def __init__(self, heads: int = 8, keys: int = 4) -> None:
        super().__init__(heads, keys)
        self.register_buffer("slopes", torch.randn(heads, 64))

    def settings(self, x: Tensor) -> dict[str, Any]:
        slopes = self.slopes
        return {"score_mod": lambda score, b, h, q, k: score + slopes[h, q - k + 32]}


class Pairs(Slopes):
    """A slope for each two heads, in a buffer."""

    def settings(self, x: Tensor) -> dict[str, Any]:
        slopes = self.slopes
        return {"score_mod": lambda score, b, h, q, k: score + slopes[h // 2] * (k - q)}


class Method(HeadBias):
    """Its function is a method, which reads the slopes itself."""

    def score(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + self.slopes[h] * (k - q)

    def settings(self, x: Tensor) -> dict[str, Any]:
        return {"score_mod": self.score}


class Again(Slopes):
    """Computed again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        made: Any = checkpoint(super().forward, x, use_reentrant=False)
        return made


class PerQuery(Attention):
    """A slope for each head, entry and query, of a column."""

    def __init__(self, heads: int = 8, keys: int = 4) -> None:
        super().__init__(heads, keys)
        self.slopes = nn.Linear(16, heads)

    def settings(self, x: Tensor) -> dict[str, Any]:
        slopes = self.slopes(x).transpose(1, 2)
        return {"score_mod": lambda score, b, h, q, k: score + slopes[b, h, q] * (k - q)}


class Sized(nn.Module):
    """Sizes that follow from sizes, so that its own code doesn't work on parts; with slopes for its heads."""

    slopes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("slopes", 0.5 ** torch.arange(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        size, slopes = width // self.heads, self.slopes
        q, k, v = (layer(x).view(batch, length, self.heads, size).transpose(1, 2) for layer in (self.q, self.k, self.v))
        made = attend(q, k, v, lambda score, b, h, i, j: score + slopes[h] * (j - i))
        return self.o(made.transpose(1, 2).reshape(batch, length, width))


class Numbered(Attention):
    """ALiBi by the head's number."""

    def settings(self, x: Tensor) -> dict[str, Any]:
        return {"score_mod": lambda score, b, h, q, k: score + torch.exp2(-(h + 1.0)) * (k - q)}


class MaskedHeads(Attention):
    """A block mask for each head."""

    def settings(self, x: Tensor) -> dict[str, Any]:
        def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (q - k <= h)

        return {"block_mask": create_block_mask(window, None, self.heads, x.shape[1], x.shape[1], device=x.device)}


class WindowedHeads(Slopes):
    """A window for each head, in a buffer, and a block mask for each head."""

    def __init__(self, heads: int = 8, keys: int = 4) -> None:
        super().__init__(heads, keys)
        self.register_buffer("slopes", torch.arange(1, heads + 1))

    def settings(self, x: Tensor) -> dict[str, Any]:
        windows = self.slopes

        def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (q - k <= windows[h])

        return {"block_mask": create_block_mask(window, None, self.heads, x.shape[1], x.shape[1], device=x.device)}


MODELS: dict[str, type[Attention]] = {
    kind.__name__: kind
    for kind in (Attention, Distance, Softcap, Compiled, Causal, Documents, Padded, Bias, Slopes, HeadBias, Mixed,
                 Scaled, Converted, Diagonal, Table, BufferedTable, Pairs, Method, Again,
                 PerQuery, Numbered, MaskedHeads, WindowedHeads)
}  # fmt: skip


@contextmanager
def gradients_on_a_cpu() -> Iterator[None]:
    """torch refuses them there, though the operator has a backward in plain operations."""
    with mock.patch.object(flex, "_validate_device", lambda *_: None):
        yield


CONFIG: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 128, "attention_dropout": 0.0,
}  # fmt: skip


def llama(implementation: str) -> nn.Module:
    """A Llama whose attention is that of transformers by this name, without inductor."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations import flex_attention as integration

    wrapped: Any = integration.WrappedFlexAttention
    wrapped.__init__ = lambda *_: None
    wrapped._compiled_flex_attention = staticmethod(compiled)
    torch.manual_seed(0)
    settings: dict[str, Any] = {**CONFIG, "attn_implementation": implementation}
    return LlamaForCausalLM(LlamaConfig(**settings)).double().eval()
