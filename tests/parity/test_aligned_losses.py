"""Losses of a whole sequence against a shorter one, of which torch knows no shapes: connectionist temporal ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.runtime.simulated import Call, worst

RULES = {"up": "colwise", "down": "rowwise"}


class Aligned(nn.Module):
    """Each sequence's own targets and lengths; lengths that the body makes itself are numbers to torch."""

    def __init__(self, own_lengths: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.own_lengths = own_lengths

    def forward(self, x: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        log_probs = self.down(self.up(x).relu()).log_softmax(-1).transpose(0, 1)
        ends = torch.full((x.shape[0],), 2) if self.own_lengths else lengths
        return functional.ctc_loss(log_probs, targets, torch.full((x.shape[0],), x.shape[1]), ends, zero_infinity=True)


def call(length: int, longest: int, *ends: int) -> Call:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(2, length, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    return (x, torch.randint(1, 16, (2, longest), generator=generator), torch.tensor(ends)), {}


@pytest.mark.parametrize("own_lengths", [False, True])
def test_losses_and_gradients_are_those_of_the_whole(own_lengths: bool) -> None:
    stock = Aligned(own_lengths).double()
    calls = [call(8, 4, 3, 2), call(8, 4, 4, 2), call(12, 4, 3, 3), call(12, 5, 5, 2)]
    assert max(worst(stock, RULES, 2, calls[0], calls)) < 1e-12


def test_they_may_be_of_columns_that_ranks_share() -> None:
    stock, rules = Aligned(own_lengths=False).double(), {"down": {"style": "colwise", "output": "replicate"}}
    calls = [call(8, 4, 3, 2), call(10, 6, 4, 6)]
    assert max(worst(stock, rules, 2, calls[0], calls)) < 1e-12


@pytest.mark.slow
def test_transformers_models_of_speech_compute_it_from_labels() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=20, **sizes,
        **positions,
    )  # fmt: skip
    stock = transformers.Wav2Vec2ForCTC(config).double().eval()
    layers = "wav2vec2.encoder.layers.*"
    rules = {
        f"{layers}.attention.{{q,k,v}}_proj": "colwise", f"{layers}.attention.out_proj": "rowwise",
        f"{layers}.feed_forward.intermediate_dense": "colwise", f"{layers}.feed_forward.output_dense": "rowwise",
    }  # fmt: skip

    def speech(padded: int) -> Call:
        labels = torch.randint(1, 20, (2, 6)).index_fill(1, torch.arange(padded, 6), -100)
        return (torch.randn(2, 400, dtype=torch.float64),), {"labels": labels}

    calls = [speech(6), speech(4)]
    assert max(worst(stock, rules, 2, ((calls[0][0][0],), {}), calls)) < 1e-10
