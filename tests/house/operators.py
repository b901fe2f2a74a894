"""Which files of the package know operators of torch by their names.

A file does if it names `torch.ops.aten`, or a string of it names an operator, with its namespace or without: docstrings
and comments are free to.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_NAMED = re.compile(r"\baten(\.|::|$)|^(?:_?[a-z][a-z0-9_]*)\.(?:default|Tensor|Scalar|int|dim|dims|dim_IntList)\*?$")


def files_that_name_operators(package: Path) -> list[str]:
    """The files, by their path in the package."""
    files = sorted(package.rglob("*.py"))
    return [
        str(path.relative_to(package)) for path in files if any(_names(ast.parse(path.read_text(encoding="utf-8"))))
    ]


def _names(tree: ast.Module) -> Iterator[str]:
    """What names an operator in a file."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "aten":
            yield ast.unparse(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield from (word for word in node.value.split() if _NAMED.search(word))
