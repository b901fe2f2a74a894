"""What the command's exit code says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tpplan.plan import Diagnostic

CLEAN: Final = 0
FINDINGS: Final = 1
FAILED: Final = 2
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

_NOT_EVEN_READ: Final = frozenset({"TP019", "TP122", "TP194", "TP199", "TP220", "TP221", "TP230", "TP231"})


class UsageError(Exception):
    """The command was used in a way that argparse doesn't catch; the message says how."""


def exit_code(diagnostics: Iterable[Diagnostic]) -> int:
    """1 if there are errors, 2 if one of them kept something from being read at all, else 0."""
    errors = [diagnostic.code for diagnostic in diagnostics if diagnostic.severity == "error"]
    if not errors:
        return CLEAN
    return FAILED if _NOT_EVEN_READ.intersection(errors) else FINDINGS
