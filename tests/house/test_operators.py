"""What operators mean stands in one registry: few files know them by name, and fewer as time goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.operators import files_that_name_operators

PACKAGE = Path(__file__).parents[2] / "src" / "tpplan"
MOST = 9  # never more than there are


def test_few_files_know_operators_by_name() -> None:
    found = files_that_name_operators(PACKAGE)
    assert len(found) == MOST, f"{len(found)} files, where {MOST} are allowed:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import torch\nVIEW = torch.ops.aten.view.default",
        "NAMES = {f'aten.{name}.default' for name in ('mm', 'bmm')}",
        "VIEW = 'aten::view'",
        "SHORT = 'view.default reshape.default'",
        "names = getattr(ops, 'aten')",
    ],
)
def test_a_name_is_found_in_each_form(tmp_path: Path, code: str) -> None:
    (tmp_path / "rules.py").write_text(code, encoding="utf-8")
    assert files_that_name_operators(tmp_path) == ["rules.py"]


def test_a_docstring_may_name_operators(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text('"""Such as aten.mm.default."""\nkind = "product"  # aten.mm', encoding="utf-8")
    assert files_that_name_operators(tmp_path) == []
