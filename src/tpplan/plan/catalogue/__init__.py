"""The catalogue of diagnostic codes, from the data beside this file; the reference page is generated from it.

in:  `running.toml` and the files beside it: a table for each code, with the texts of a `CatalogueEntry`
out: `CATALOGUE["TP176"]`: lost-rank, an error
"""

from __future__ import annotations

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

__all__ = ["CATALOGUE", "CatalogueEntry", "Severity"]
