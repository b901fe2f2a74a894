"""Layers whose results nobody reads, as in a last block: they are placed as those of the blocks before it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tpplan.suggest import search

CALL = (torch.randn(2, 8, 16), torch.randn(2, 6, 16))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(16, 64), nn.Dropout(0.0), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(nn.functional.gelu(self.up(x))))


class Shared(nn.Module):
    """One feed-forward layer for two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.ff, self.mix, self.norm = Gated(), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.ff(self.norm(x)) + self.mix(t).mean(1, keepdim=True)
        return x, t + self.ff(self.norm(t))


class Joint(nn.Module):
    """Each stream has a projection of its own behind what both have made."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down_x, self.down_t = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(64, 16)

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        both = self.up(torch.cat([x, t], 1)).relu()
        return x + self.down_x(both[:, : x.shape[1]]), t + self.down_t(both[:, x.shape[1] :])


class Blocks(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(), block()])

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        for block in self.blocks:
            x, t = block(x, t)
        return x


@pytest.mark.parametrize(
    ("block", "rules"),
    [
        (Shared, {"blocks.*.ff.up": "colwise", "blocks.*.ff.down": "rowwise"}),
        (Joint, {"blocks.*.up": "colwise", "blocks.*.down_*": "rowwise"}),
        (Joint, {"blocks.*.up": "colwise", "blocks.*.down_x": "rowwise", "blocks.0.down_t": "rowwise"}),
    ],
)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.one_in(5)
def test_what_nobody_reads_is_placed_as_if_somebody_did(block: type[nn.Module], rules: dict[str, str], tp: int) -> None:
    torch.manual_seed(0)
    report = tpplan.verify(Blocks(block), {"version": 1, "modules": rules}, tp=tp, inputs=CALL)
    assert report.ok, report.problems


@pytest.mark.parametrize("block", [Shared, Joint])
def test_a_suggested_plan_has_them_too(block: type[nn.Module]) -> None:
    settings = search(Blocks(block), 2, CALL, {}, False).settings
    named = {name.replace("blocks.1.", "blocks.0.") for name in settings if name.startswith("blocks.1.")}
    assert named == {name for name in settings if name.startswith("blocks.0.")}
