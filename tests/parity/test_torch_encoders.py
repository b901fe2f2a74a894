"""torch's own encoders and decoders in evaluation, where torch has kernels of its own for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.marking import slow_but
from tests.runtime.simulated import on_ranks
from tpplan.parity.parity_errors import RankError

WIDTH, HEADS = 16, 4
PROJECTIONS: dict[str, Any] = {"style": "colwise", "packed": ["q", "k", "v"]}


def rules(layers: str) -> dict[str, Any]:
    return {
        f"{layers}.*attn.in_proj_{{weight,bias}}": PROJECTIONS, f"{layers}.*attn.out_proj.{{weight,bias}}": "rowwise",
        f"{layers}.linear1": "colwise", f"{layers}.linear2": "rowwise",
    }  # fmt: skip


ENCODER, BOTH = rules("body.layers.*"), rules("body.*.layers.*")


class Encoder(nn.Module):
    def __init__(self, nested: bool = True, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.1, batch_first=True, **options)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.body(x, src_key_padding_mask=padding)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(WIDTH, HEADS, 2, 2, 32, 0.1, batch_first=True, norm_first=True)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.body(x, x * 2, tgt_mask=mask, memory_key_padding_mask=padding, tgt_is_causal=True)


MODELS = {
    "encoder": lambda: Encoder(False), "encoder, norm first": lambda: Encoder(norm_first=True), "both": Both,
}  # fmt: skip


CASES = [(name, padded) for name in MODELS for padded in (True, False)]


def call(padded: bool) -> dict[str, Any]:
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, 4:] = True
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return {"x": x} | ({"padding": padding} if padded else {})


@pytest.mark.parametrize(("name", "padded"), slow_but([(n, True) for n in MODELS][:1], CASES))
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_evaluation_after_training(name: str, padded: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    with torch.no_grad():
        expected = model.eval()(**call(padded))

    def evaluated(sharded: nn.Module, _: object) -> list[Tensor]:
        sharded.eval()
        with torch.no_grad():
            found = [sharded(**call(padded)) for _ in range(2)]
        return [*found, sharded(**call(padded)).detach()]

    for rank in on_ranks(model.train(), BOTH if name == "both" else ENCODER, 2, ((), call(padded)), evaluated):
        for result in rank:
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    assert torch.backends.mha.get_fastpath_enabled()


def test_padding_that_torch_packs_is_refused_with_the_way_out() -> None:
    """Without gradients, torch gives 0 for padding then; with them, what training gives."""

    def evaluated(sharded: nn.Module, _: object) -> None:
        with torch.no_grad():
            sharded.eval()(**call(True))

    with pytest.raises(RankError) as caught:
        on_ranks(Encoder().double(), ENCODER, 2, ((), call(True)), evaluated)
    assert "enable_nested_tensor=False" in str(caught.value.__cause__)
