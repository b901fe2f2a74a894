"""Each operator of the compiler's table does, forward and backward, what its rule says, on the samples of torch's database.

The default suite tries a few samples of each entry and some choices of layouts; `-m sweep` tries more of both, on four
ranks too, with packs, and asks that no operator of the table goes without.
"""

from __future__ import annotations

import pytest
import torch

from tests.rules.calls import OPERATORS
from tests.rules.sweep import sweep

aten = torch.ops.aten
X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
# Whose arguments of integers aren't dims.
_NUMBERS = frozenset(
    ("k", "size", "sizes", "split_size", "split_sizes", "shifts", "repeats", "start", "end", "step", "index", "pad",
     "offset", "diagonal", "decimals", "ignore_index", "reduction", "normalized_shape", "stride", "padding", "dilation",
     "output_padding", "groups", "padding_idx", "shape", "low", "high", "correction", "descending", "stable")
)  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_what_a_rule_says_holds_in_numbers(name: str) -> None:
    for operator, tally in sweep([name], samples=2, ranks=2, limit=10, most=3).items():
        assert not tally.wrong, f"{operator}: {tally.wrong[0]}"


@pytest.mark.sweep
@pytest.mark.parametrize(("ranks", "packs"), [(2, False), (2, True), (4, True)])
@pytest.mark.parametrize("name", OPERATORS)
def test_what_a_rule_says_holds_for_every_choice_of_layouts(name: str, ranks: int, packs: bool) -> None:
    for operator, tally in sweep([name], samples=12, ranks=ranks, limit=150, packs=packs, most=24).items():
        assert not tally.wrong, f"{operator}: {tally.wrong[0]}"
