"""The catalogue of diagnostic codes: plain data, from which the reference page is generated."""

from __future__ import annotations

from typing import Final

from tpplan.plan.catalogue.entry import Entry, Severity
from tpplan.plan.catalogue.model_codes import MODEL_CODES
from tpplan.plan.catalogue.plan_codes import PLAN_CODES

CATALOGUE: Final[dict[str, Entry]] = {entry.code: entry for entry in (*PLAN_CODES, *MODEL_CODES)}

__all__ = ["CATALOGUE", "Entry", "Severity"]
