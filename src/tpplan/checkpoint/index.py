"""The index of a checkpoint of several files: which file holds which tensor."""

from __future__ import annotations

from pathlib import Path, PureWindowsPath
from typing import Any, cast

from tpplan.checkpoint.files import CheckpointError, listed, problem, unreadable
from tpplan.checkpoint.meter import Meter
from tpplan.checkpoint.strict_json import NotStrict, kind_of, read_object


def read_index(path: Path, meter: Meter) -> dict[str, str]:
    """The names of an index's tensors, and the files, next to it or further down, that it says hold them.

    Raises:
        CheckpointError: TP121, if it is no index, or names files outside of its folder.
    """
    try:
        data = path.read_bytes()
        meter.add(len(data))
        table = read_object(data)
    except NotStrict as error:
        raise _no_index(path, str(error)) from None
    except OSError as error:
        raise unreadable(path, error) from None
    if "weight_map" not in table:
        raise _no_index(path, "it has no `weight_map`")
    held: Any = table["weight_map"]
    if not isinstance(held, dict):
        raise _no_index(path, f"its `weight_map` is {kind_of(held)}, not an object")
    files = cast("dict[str, Any]", held)
    wrong = [f"it has {kind_of(file)} for `{name}`, not a file's name" for name, file in files.items() if not _is(file)]
    if wrong:
        raise _no_index(path, *wrong)
    outside = sorted({file for file in files.values() if _leaves(file)})
    if outside:
        raise problem(
            f"`{path}` names files outside of its own folder: {listed(outside)}",
            "trust no such index: a checkpoint's files lie in one folder",
        )
    return cast("dict[str, str]", files)


def _is(file: Any) -> bool:
    return isinstance(file, str) and bool(file)


def _leaves(file: str) -> bool:
    """Whether a path is absolute or goes up, on whatever system; links aren't followed, as the hub's cache has them."""
    windows = PureWindowsPath(file)
    return bool(windows.anchor) or ".." in windows.parts or "\0" in file


def _no_index(path: Path, reason: str, *more: str) -> CheckpointError:
    return problem(
        f"`{path}` is no safetensors index: {reason}", "it needs a `weight_map` of tensors to files", *more[:10]
    )


__all__ = ["read_index"]
