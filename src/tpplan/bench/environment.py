"""What a figure depends on besides the code: the machine, the versions and the date."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a benchmark ran.

    Attributes:
        date: the day, in UTC.
        processor: its model's name.
        cores: how many this process may use.
        load: the average number of busy processes in the minute before; more than one disturbs the figures.
        gpu: the name of the first GPU, or "none".
        python, versions: of the interpreter and of the packages that count.
    """

    date: str
    processor: str
    cores: int
    load: float
    gpu: str
    python: str
    versions: dict[str, str]

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self)


def describe_environment() -> Environment:
    """The environment of this process."""
    return Environment(
        date=datetime.now(UTC).date().isoformat(),
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        load=round(os.getloadavg()[0], 1),
        gpu=_gpu(),
        python=platform.python_version(),
        versions={name: _version(name) for name in ("tpplan", "torch", "transformers")},
    )


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    if file.is_file():
        for line in file.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
