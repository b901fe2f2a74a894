"""The catalogue of diagnostic codes, from the data beside this file; the reference page is generated from it.

in:  `running.toml` and the files beside it: a table for each code, with the texts of a `CatalogueEntry`
out: `CATALOGUE["TP176"]`: lost-rank, an error
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tpplan.plan.catalogue.entry import CatalogueEntry, Severity


def _entries() -> Iterator[CatalogueEntry]:
    for file in Path(__file__).parent.glob("*.toml"):
        for code, texts in tomllib.loads(file.read_text(encoding="utf-8")).items():
            yield CatalogueEntry(code, texts.pop("name"), Severity(texts.pop("severity")), **texts)


CATALOGUE: Final = {entry.code: entry for entry in sorted(_entries(), key=lambda entry: entry.code)}

_CODE: Final = re.compile(r"(?:tp)?[-_ ]?0*([0-9]{1,3})", re.IGNORECASE)


def entry_of(wanted: str) -> CatalogueEntry | None:
    """The entry of a code or of a name, in any case; of a code, `TP` and zeros may be left out: `tp12` is TP012."""
    found = _CODE.fullmatch(wanted.strip())
    if found is not None:
        return CATALOGUE.get(f"TP{int(found[1]):03d}")
    return next((entry for entry in CATALOGUE.values() if entry.name == wanted.strip().lower()), None)


__all__ = ["CATALOGUE", "CatalogueEntry", "Severity", "entry_of"]
