"""Measure every kernel against torch eager, torch.compile and Liger: `python -m tpplan.bench.kernels`.

Needs a GPU. Without one it runs dry: tiny tensors on the CPU, once each, to see that it all runs; such figures mean
nothing, and the files are named so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch

from tpplan.bench.environment import describe_environment
from tpplan.bench.kernels_plot import render_svg
from tpplan.bench.kernels_subjects import LIGER, SUBJECTS, KernelSubject, forms, liger, tensors_of
from tpplan.bench.kernels_timing import (
    copy_gigabytes_per_second,
    forward_of,
    microseconds,
    step_of,
    wall_microseconds,
)
from tpplan.kernels.thresholds import Kernel

ROWS = (128, 1_024, 8_192, 65_536)
COLUMNS = (1_024, 4_096, 8_192, 16_384)
LOSS_SIZES = ((8_192, 32_768), (8_192, 128_256))
DRY_SIZES = ((3, 64), (2, 1_000))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def sizes_of(subject: KernelSubject, dry: bool, rows: Iterable[int], columns: Iterable[int]) -> list[tuple[int, int]]:
    """The (rows, columns) on which a kernel is measured."""
    if dry:
        return list(DRY_SIZES)
    return list(LOSS_SIZES) if subject.loss else [(r, c) for r in rows for c in columns]


def measure(
    names: Sequence[Kernel] = tuple(SUBJECTS),
    rows: Sequence[int] = ROWS,
    columns: Sequence[int] = COLUMNS,
    dtypes: Sequence[str] = tuple(DTYPES),
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure in this process, on the GPU if there is one and dry otherwise.

    Args:
        names: of the kernels.
        rows, columns: the grid; cross entropy has sizes of its own.
        dtypes: "bf16", "fp32".
        progress: told what is measured next.

    Returns:
        Plain data: the environment, the copy rate in GB/s, notes, and rows with microseconds, GB/s (of the bytes that
        have to be moved at least) and the share of the copy rate.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dry = device == "cpu"
    copy = copy_gigabytes_per_second(device)
    found: list[dict[str, Any]] = []
    notes = [] if liger() is not None else [f"{LIGER} isn't installed and was left out"]
    for name in names:
        for size in sizes_of(SUBJECTS[name], dry, rows, columns):
            for dtype in dtypes:
                progress(f"{name}, {size[0]} × {size[1]}, {dtype}")
                found += _measure_one(name, size, dtype, device, copy, notes)
    environment = describe_environment().to_dict()
    environment["versions"] = cast(dict[str, str], environment["versions"]) | _versions()
    # Where it is installed, torch 2.13 and later run RMSNorm as a kernel in that language, which is another baseline.
    environment["cute_dsl"] = find_spec("cutlass") is not None
    whole = {
        "benchmark": "kernels",
        "dry": dry,
        "environment": environment,
        "copy_gigabytes_per_second": round(copy, 1),
    }
    return whole | {"notes": notes, "rows": found}


def _measure_one(
    name: Kernel, size: tuple[int, int], dtype: str, device: str, copy: float, notes: list[str]
) -> list[dict[str, Any]]:
    subject = SUBJECTS[name]
    backend = "inductor" if device == "cuda" else "aot_eager"
    found: list[dict[str, Any]] = []
    for form, function in forms(subject, backend).items():
        shared = {"kernel": name, "rows": size[0], "columns": size[1], "dtype": dtype, "form": form}
        try:
            found += _ways(subject, function, size, dtype, device, copy, shared)
        except Exception as error:  # one that fails, of memory or otherwise, says so and leaves the others be
            notes.append(f"{form}, {name}, {size[0]} × {size[1]}, {dtype}: {type(error).__name__}: {str(error)[:200]}")
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


def _ways(
    subject: KernelSubject,
    function: Callable[..., Any],
    size: tuple[int, int],
    dtype: str,
    device: str,
    copy: float,
    shared: dict[str, Any],
) -> list[dict[str, Any]]:
    inputs = tensors_of(subject, *size, DTYPES[dtype], device)
    step, forward = step_of(function, inputs), forward_of(function, inputs)
    element = inputs[0].element_size() * size[0] * size[1]
    timed = {"forward": microseconds(forward, device), "step": microseconds(step, device)}
    moved = {"forward": subject.forward * element, "step": (subject.forward + subject.backward) * element}
    timed["backward"] = max(timed["step"] - timed["forward"], 1e-3)
    moved["backward"] = subject.backward * element
    wall = wall_microseconds(step, device, 50 if device == "cuda" else 1)
    return [
        shared
        | {
            "way": way,
            "microseconds": round(taken, 2),
            "gigabytes_per_second": round(moved[way] / taken / 1e3, 2),
            "copy_share": round(moved[way] / taken / 1e3 / copy, 3),
            "wall_microseconds": round(wall, 2) if way == "step" else None,
        }
        for way, taken in timed.items()
    ]


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in ("triton", "liger-kernel"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["cuda"] = torch.version.cuda or "none"
    return found


def write(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write `kernels.json` and `kernels.svg`, for a dry run `kernels-dry` in their place; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = "kernels-dry" if result["dry"] else "kernels"
    raw, picture = folder / f"{stem}.json", folder / f"{stem}.svg"
    raw.write_text(json.dumps(result, indent=1) + "\n")
    picture.write_text(render_svg(result))
    return [raw, picture]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tpplan.bench.kernels", description=__doc__)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help=f"of {', '.join(SUBJECTS)} (default: all)")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--columns", type=int, nargs="+", default=COLUMNS)
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=tuple(DTYPES))
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="the folder to write to")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.kernels if name not in SUBJECTS]
    if unknown:
        parser.error(f"there is no kernel {unknown[0]!r}; choose from {', '.join(SUBJECTS)}")
    names = given.kernels or tuple(SUBJECTS)
    result = measure(names, given.rows, given.columns, given.dtypes, lambda text: print(text, file=sys.stderr))
    for file in write(result, given.out):
        print(f"wrote {file}", file=sys.stderr)
    for note in result["notes"]:
        print(f"note: {note}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
