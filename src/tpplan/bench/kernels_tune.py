"""From which size on a kernel is faster than torch's own operator, measured on the GPU at hand.

in:  the kernels of `kernels_subjects`
out: the file that `tpplan.kernels.measured` reads

Sizes are powers of two, of rows of 4,096 columns (of 32,768 for the loss). From the largest down, until the kernel
loses; so all sizes above a threshold were measured, and won. Both are timed in calls one after the other, nothing
waited for in between, so that what takes longer counts: the device or the host, which launches a kernel more slowly
than an operator of torch.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tpplan import kernels
from tpplan.bench.kernels_subjects import SUBJECTS, tensors_of
from tpplan.bench.kernels_timing import forward_of, step_of, wall_microseconds
from tpplan.bench.running import BenchmarkError
from tpplan.kernels.measured import VARIABLE, Measured, MeasuredSetting, file_of, setting_of, write_measured
from tpplan.kernels.thresholds import CASES, KERNELS, Kernel, forget_measured

_COLUMNS, _LOSS_COLUMNS = 4_096, 32_768
_LEAST_ROWS, _LARGEST = 4, 1 << 28
_ROUNDS = 8
_ROUND = 1_500.0  # microseconds
_MOST_CALLS = 100

Contest = Callable[[Kernel, str, int], float]
"""How many times as long as the kernel torch's own operator takes: of a kernel, in a case, on so many elements."""
Timer = Callable[[Callable[[], Any], int], float]
"""The microseconds of a call among so many."""


def tune(progress: Callable[[str], None] = lambda text: None) -> tuple[Measured, list[str]]:
    """Measure the thresholds of all kernels on the current GPU, and keep them; takes about a minute.

    Args:
        progress: told what is measured next, and where the result was written.

    Returns:
        What was measured; and notes on what couldn't run, for which torch's own operators stay.

    Raises:
        BenchmarkError: no GPU, no triton, or no place to write to.
    """
    setting = _setting()
    _check_writable(file_of(setting).parent)
    notes: list[str] = []
    elements = {kernel: measured_elements(kernel, contest, notes.append, progress) for kernel in KERNELS}
    found = Measured(setting, datetime.now(UTC).date().isoformat(), elements)
    progress(f"wrote {write_measured(found)}")
    forget_measured()
    return found, notes


def _setting() -> MeasuredSetting:
    there = kernels.available("cuda" if torch.cuda.is_available() else "cpu")
    setting = setting_of(None) if there.name == "triton" else None
    if setting is None:
        raise BenchmarkError(
            f"thresholds are measured on a GPU, and here no kernel runs on one: {there.reason}. Run it where the model "
            "is to run; until then thresholds are guesses"
        )
    return setting


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise BenchmarkError(f"{folder} can't be written to; name another file in the environment as {VARIABLE}")


def measured_elements(
    kernel: Kernel, contest: Contest, note: Callable[[str], None], progress: Callable[[str], None] = lambda text: None
) -> dict[str, int | None]:
    """For each case, from how many elements on the kernel wins; 0 if it always does, None if it never does."""
    found: dict[str, int | None] = {}
    for case in CASES:
        progress(f"{kernel}, {case}")
        try:
            found[case] = threshold(sizes_of(kernel), lambda size, case=case: _wins(contest, kernel, case, size))
        except Exception as error:  # a kernel that fails here isn't to be taken
            note(f"{kernel}, {case}: {type(error).__name__}: {str(error)[:200]}")
            found[case] = None
    return found


def sizes_of(kernel: Kernel) -> list[int]:
    """The numbers of elements that are tried, in ascending order."""
    least = _LEAST_ROWS * _columns(kernel)
    return list(itertools.takewhile(lambda size: size <= _LARGEST, (least << k for k in itertools.count())))


def threshold(sizes: Sequence[int], wins: Callable[[int], bool | None]) -> int | None:
    """The least of the sizes from which on all win; 0 if all do, None if the largest doesn't.

    Args:
        sizes: in ascending order.
        wins: whether a size wins; None where it is too large for the device.
    """
    found = None
    for size in reversed(sizes):
        won = wins(size)
        if won is False:
            break
        found = size if won else found
    return 0 if found == sizes[0] else found


def _wins(contest: Contest, kernel: Kernel, case: str, elements: int) -> bool | None:
    """Measured a second time before a loss is believed: a disturbed size would hide all smaller ones."""
    try:
        return any(contest(kernel, case, elements) >= 1.0 for _ in range(2))
    except torch.OutOfMemoryError:
        return None


def contest(kernel: Kernel, case: str, elements: int) -> float:
    """As `Contest`, on the current GPU."""
    width, way = case.split()
    subject = SUBJECTS[kernel]
    columns = _columns(kernel)
    dtype = torch.float32 if width == "32-bit" else torch.bfloat16
    try:
        inputs = tensors_of(subject, elements // columns, columns, dtype, "cuda")
        prepare = step_of if way == "step" else forward_of
        return speed_up(prepare(subject.ours, inputs), prepare(subject.eager, inputs), _wall)
    finally:
        if elements >= _LARGEST >> 2:
            torch.cuda.empty_cache()


def speed_up(ours: Callable[[], Any], others: Callable[[], Any], timer: Timer) -> float:
    """How many times as long the others take: the median over rounds in which both are timed, in turns."""
    calls = [max(1, min(_MOST_CALLS, round(_ROUND / max(timer(call, 3), 1e-3)))) for call in (ours, others)]
    ratios: list[float] = []
    for number in range(_ROUNDS):
        taken = [0.0, 0.0]
        for which in _turns(number):
            taken[which] = timer((ours, others)[which], calls[which])
        ratios.append(taken[1] / max(taken[0], 1e-3))
    return statistics.median(ratios)


def text_of_thresholds(found: Measured) -> str:
    """A line for each kernel: from which number of elements on it is taken, by case."""
    width = max(map(len, KERNELS))
    lines = [f"{'':{width}}" + "".join(f"{case:>16}" for case in CASES)]
    for kernel, row in found.elements.items():
        sizes = ["never" if row[case] is None else f"{row[case]:,}" for case in CASES]
        lines.append(f"{kernel:{width}}" + "".join(f"{size:>16}" for size in sizes))
    title = f"The least number of elements for which `kernels: auto` takes a kernel, on {found.setting.device}"
    return "\n".join([title, "", *lines])


def _turns(number: int) -> Iterable[int]:
    return (0, 1) if number % 2 else (1, 0)


def _wall(call: Callable[[], Any], calls: int) -> float:
    return wall_microseconds(call, "cuda", calls)


def _columns(kernel: Kernel) -> int:
    return _LOSS_COLUMNS if SUBJECTS[kernel].loss else _COLUMNS


__all__ = ["measured_elements", "sizes_of", "speed_up", "text_of_thresholds", "threshold", "tune"]
