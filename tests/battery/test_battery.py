"""Small modules that hide something from a trace: equal to the stock one on every call, or refused."""

from __future__ import annotations

import pytest

from tests.battery.cases import CASES, OPEN, SLOW
from tests.battery.harness import result_of
from tests.battery.page import is_met

CHOICES = [
    pytest.param(case.name, marks=[pytest.mark.slow] if case.name in SLOW else [], id=f"{case.cause}-{case.name}")
    for case in CASES.values()
    if case.name not in OPEN
]


@pytest.mark.processes
@pytest.mark.parametrize("name", CHOICES)
def test_no_wrong_number_leaves(name: str) -> None:
    result = result_of(name)
    assert is_met(CASES[name].expect, result.verdict), f"{result.verdict} at {result.detail}"
