"""A compiler for tensor parallelism in PyTorch: a YAML plan in, a stock module rewritten in place out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpplan.api import (
        Program,
        compile_plan,
        load_weights,
        parallelize,
        save_weights,
        suggest_plan,
        verify,
    )
    from tpplan.plan import (
        CompileError,
        Diagnostic,
        InternalError,
        Plan,
        PlanError,
        TpplanError,
        check_plan,
        load_plan,
    )

    __version__: str

__all__ = [
    "CompileError",
    "Diagnostic",
    "InternalError",
    "Plan",
    "PlanError",
    "Program",
    "TpplanError",
    "__version__",
    "check_plan",
    "compile_plan",
    "load_plan",
    "load_weights",
    "parallelize",
    "save_weights",
    "suggest_plan",
    "verify",
]

_API = frozenset({"Program", "compile_plan", "load_weights", "parallelize", "save_weights", "suggest_plan", "verify"})


def __getattr__(name: str) -> object:
    """Import what's asked for only then: torch takes over a second, and reading a plan needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        value: object = _installed_version()
    else:
        value = getattr(import_module("tpplan.api" if name in _API else "tpplan.plan"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tpplan")
    except PackageNotFoundError:
        return "0+uninstalled"
