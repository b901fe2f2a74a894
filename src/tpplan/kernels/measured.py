"""Thresholds that were measured on this machine, in a file of the user's: written, read and checked.

in:  `$TPPLAN_KERNEL_THRESHOLDS`, or `$XDG_CACHE_HOME/tpplan/kernels/NVIDIA-H100-torch-2.11.0-triton-3.6.0.json`
out: a `Measured`; None where there is no such file, and with a warning where it is broken or of another device

    {"device": "NVIDIA H100", "torch": "2.11.0", "triton": "3.6.0", "date": "2026-11-27",
     "elements": {"gelu": {"16-bit forward": 65536, "16-bit step": null, …}, …}}

`null`: torch's own operator was faster at every size.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

VARIABLE = "TPPLAN_KERNEL_THRESHOLDS"
"""The environment variable that names a file to read and write in place of the one in the cache."""


@dataclass(frozen=True, slots=True)
class MeasuredSetting:
    """What thresholds depend on: the device's name, and the versions of torch and triton."""

    device: str
    torch: str
    triton: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured.

    Attributes:
        setting: where.
        date: the day, in UTC.
        elements: for each kernel and case, from how many elements on the kernel is faster; None if it never is.
    """

    setting: MeasuredSetting
    date: str
    elements: Mapping[str, Mapping[str, int | None]]


def setting_of(device: int | None) -> MeasuredSetting | None:
    """The setting of a GPU of this process, None for the current one; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    triton = getattr(importlib.import_module("triton"), "__version__", "unknown")
    return MeasuredSetting(torch.cuda.get_device_name(device), str(torch.__version__), triton)


def file_of(setting: MeasuredSetting) -> Path:
    """Where the thresholds of a setting are kept."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache")) / "tpplan" / "kernels"
    name = f"{setting.device}-torch-{setting.torch}-triton-{setting.triton}"
    return folder / f"{re.sub(r'[^A-Za-z0-9.+]+', '-', name)}.json"


def write_measured(measured: Measured) -> Path:
    """Keep what was measured, in place of what was there; returns the file."""
    file = file_of(measured.setting)
    file.parent.mkdir(parents=True, exist_ok=True)
    values = asdict(measured.setting) | {"date": measured.date, "elements": measured.elements}
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    beside.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    beside.replace(file)
    return file


def measured_on(device: int | None, kernels: Sequence[str], cases: Sequence[str]) -> Measured | None:
    """What was measured for a GPU of this process, None for the current one.

    Args:
        device: its number.
        kernels: those to take from the file; others are passed over.
        cases: what each of them must have.
    """
    setting = setting_of(device)
    if setting is None:
        return None
    file = file_of(setting)
    try:
        return _checked(json.loads(file.read_text(encoding="utf-8")), setting, kernels, cases)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(
            f"{file}: not used, so that thresholds of kernels are guesses: {error}. "
            "`tpplan bench kernels --tune` writes it anew",
            stacklevel=2,
        )
        return None


def _checked(values: Any, setting: MeasuredSetting, kernels: Sequence[str], cases: Sequence[str]) -> Measured:
    """Raises `ValueError` unless it is what `write_measured` writes, for this setting."""
    if not isinstance(values, dict) or not isinstance(values.get("elements"), dict):  # pyright: ignore
        raise ValueError("it holds no thresholds")
    held = cast(dict[str, Any], values)
    for key, here in asdict(setting).items():
        if held.get(key) != here:
            raise ValueError(f"it is of {key} {held.get(key)!r}, and this is {here!r}")
    if not isinstance(held.get("date"), str):
        raise ValueError("it has no date")
    elements = {name: row for name, row in held["elements"].items() if name in kernels}
    for name, row in elements.items():
        if not isinstance(row, dict) or set(row) != set(cases) or not all(map(_is_size, row.values())):  # pyright: ignore
            raise ValueError(f"`{name}` needs a number of elements or null for each of {', '.join(cases)}")
    return Measured(setting, held["date"], elements)


def _is_size(value: object) -> bool:
    return value is None or (type(value) is int and value >= 0)


__all__ = ["VARIABLE", "Measured", "MeasuredSetting", "file_of", "measured_on", "setting_of", "write_measured"]
