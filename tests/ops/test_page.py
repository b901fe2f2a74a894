"""What docs/operators.md shows runs, and does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import tpplan
from tests.ops.operators import Attention

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"


def test_the_page_is_true() -> None:
    text = PAGE.read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(block, names)
    (plan,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert [held.name for held in tpplan.load_plan(plan).operators] == ["docs::attend"]
    rules = {"version": 1, "modules": {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}}
    for function in (torch.ops.docs.attend, torch.ops.docs.told, names["flash"]):
        model = Attention(function)
        program = tpplan.compile_plan(model.requires_grad_(function is names["flash"]), rules, 2, torch.zeros(2, 6, 16))
        assert program.count_collectives() == {"all-reduce": 1} and not program.assumed
