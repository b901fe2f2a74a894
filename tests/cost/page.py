"""docs/costs.md: what is written by hand, with the tables that the commands of this folder make.

`python -m tests.cost.page` writes the tables anew. The throughputs take minutes, as models of 8B to 405B are compiled.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from tests.cost import mlp_table, throughput, truth

PAGE = Path(__file__).parents[2] / "docs" / "costs.md"
TABLES: dict[str, Callable[[], str]] = {
    "memory": truth.table,
    "throughput": throughput.table,
    "mlp": mlp_table.performance,
}


def table_of(name: str, text: str) -> str:
    """The table that stands in the page."""
    (found,) = re.findall(rf"<!-- {name} -->\n(.*?)\n<!-- end -->", text, re.DOTALL)
    return found


def written(names: list[str]) -> str:
    """The page with these tables made anew."""
    text = PAGE.read_text(encoding="utf-8")
    for name in names:
        table = f"<!-- {name} -->\n{TABLES[name]()}\n<!-- end -->"
        text = re.sub(rf"<!-- {name} -->\n.*?<!-- end -->", lambda _, table=table: table, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(written(sys.argv[1:] or [*TABLES]), encoding="utf-8")
