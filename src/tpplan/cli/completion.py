"""What a shell may complete: commands, options, plans, codes and architectures.

With `pip install 'tpplan[completion]'`, and `eval "$(register-python-argcomplete tpplan)"` in the shell's profile.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell and exit, where it asks and argcomplete is there."""
    try:
        import argcomplete  # pyright: ignore[reportMissingImports]
    except ImportError:
        return
    for action in _actions(parser):
        completer = _COMPLETERS.get(action.dest)
        if completer is not None:
            action.completer = completer  # type: ignore[attr-defined]  # what argcomplete asks for
    argcomplete.autocomplete(parser)  # pyright: ignore[reportUnknownMemberType]


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]
        yield action
        if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
            parsers: dict[str, argparse.ArgumentParser] = action.choices  # pyright: ignore
            for inner in parsers.values():
                yield from _actions(inner)


def _plans(prefix: str, **_: object) -> list[str]:
    from tpplan.plan import shipped_plan_names
    from tpplan.plan.vocabulary import AUTO

    return [AUTO, *shipped_plan_names(), *_files(prefix, "*.y*ml")]


def _files(prefix: str, pattern: str) -> list[str]:
    from glob import glob

    return [*glob(f"{prefix}{pattern}"), *(f"{folder}/" for folder in glob(f"{prefix}*/"))]


def _codes(**_: object) -> list[str]:
    from tpplan.plan import CATALOGUE

    return [*CATALOGUE, *(entry.name for entry in CATALOGUE.values())]


def _models(prefix: str, **_: object) -> list[str]:
    from tpplan.hf.configs import known_types

    return [*(f"hf:{kind}" for kind in known_types()), *_files(prefix, "*.json"), *_files(prefix, "*.py")]


_COMPLETERS: dict[str, Callable[..., list[str]]] = {
    "after": _plans,
    "before": _plans,
    "plan": _plans,
    "plans": _plans,
    "show": _plans,
    "code": _codes,
    "ignore": _codes,
    "model": _models,
}

__all__ = ["complete"]
