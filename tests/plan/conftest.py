from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine makes single examples slow without anything being wrong.
settings.register_profile("tpplan", deadline=None)
settings.load_profile("tpplan")

SHIPPED = Path(__file__).parent / "shipped"


@pytest.fixture(autouse=True)
def shipped_plans(monkeypatch: pytest.MonkeyPatch) -> Path:
    """One shipped plan, whatever plans the project ships at the time."""
    monkeypatch.setattr("tpplan.plan.locate.shipped_plan_directory", lambda: SHIPPED)
    return SHIPPED
