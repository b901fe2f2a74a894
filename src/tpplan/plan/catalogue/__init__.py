"""The catalogue of diagnostic codes: plain data, from which the reference page is generated."""

from __future__ import annotations

from typing import Final

from tpplan.plan.catalogue.entry import CatalogueEntry, Severity
from tpplan.plan.catalogue.exchange_codes import EXCHANGE_CODES
from tpplan.plan.catalogue.file_codes import FILE_CODES
from tpplan.plan.catalogue.layout_codes import LAYOUT_CODES
from tpplan.plan.catalogue.loss_codes import LOSS_CODES
from tpplan.plan.catalogue.program_codes import PROGRAM_CODES
from tpplan.plan.catalogue.rule_codes import RULE_CODES
from tpplan.plan.catalogue.running_codes import RUNNING_CODES

_ENTRIES = sorted(
    (*FILE_CODES, *RULE_CODES, *LAYOUT_CODES, *LOSS_CODES, *PROGRAM_CODES, *RUNNING_CODES, *EXCHANGE_CODES),
    key=lambda entry: entry.code,
)

CATALOGUE: Final[dict[str, CatalogueEntry]] = {entry.code: entry for entry in _ENTRIES}

__all__ = ["CATALOGUE", "CatalogueEntry", "Severity"]
