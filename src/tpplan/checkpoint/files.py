"""The safetensors files of a checkpoint, and which of them holds which tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tpplan.plan import Diagnostic, PlanError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointError(PlanError):
    """A checkpoint and a model don't fit together; all findings are in `diagnostics`."""


def locate_tensors(source: str | os.PathLike[str]) -> Mapping[str, Path]:
    """The file of every tensor in a checkpoint.

    Args:
        source: a safetensors file, an index, or a folder with either.

    Raises:
        CheckpointError: TP121, if there is no readable checkpoint.
    """
    path = Path(source)
    if path.is_dir():
        path = path / INDEX if (path / INDEX).is_file() else path / SINGLE
    if not path.is_file():
        raise problem(
            f"there is no checkpoint at `{path}`", f"name a safetensors file, or a folder with {SINGLE} or {INDEX}"
        )
    if path.suffix == ".json":
        return _from_index(path)
    return dict.fromkeys(_names_in(path), path)


def _from_index(path: Path) -> Mapping[str, Path]:
    try:
        table: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError) as error:
        raise problem(f"`{path}` is no safetensors index: {error}", "it needs a `weight_map`") from None
    missing = sorted({name for name in table.values() if not (path.parent / name).is_file()})
    if missing:
        raise problem(f"`{path}` names files that don't exist: {', '.join(missing)}", "complete the checkpoint")
    return {name: path.parent / file for name, file in table.items()}


def open_tensors(path: Path) -> Any:
    """An open safetensors file, as a context; the library's own types say nothing."""
    return safe_open(path, framework="pt")  # pyright: ignore


def _names_in(path: Path) -> list[str]:
    try:
        with open_tensors(path) as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise problem(
            f"`{path}` can't be read as safetensors: {error}", "convert the checkpoint to safetensors"
        ) from None


def problem(message: str, way_out: str, *notes: str) -> CheckpointError:
    """A CheckpointError with one TP121 finding."""
    return CheckpointError([Diagnostic(code="TP121", message=message, help=way_out, notes=notes)])
