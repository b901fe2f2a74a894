"""Timing that a busy machine disturbs little: processor time, interleaved rounds, medians of ratios within a round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """What one subject took.

    Attributes:
        milliseconds: the median over rounds, of the thread's processor time.
        ratio: to the first subject in the same round, the median over rounds.
        low, high: the quartiles of that ratio.
    """

    milliseconds: float
    ratio: float
    low: float
    high: float


def time_interleaved(subjects: Mapping[str, Callable[[], float]], rounds: int, calls: int) -> dict[str, Timing]:
    """Time subjects in turn; the first is what the others are held against.

    Args:
        subjects: functions that run once and return the seconds that count.
        rounds: how often each subject has its turn.
        calls: how often it runs in a turn; the quickest run counts.
    """
    for subject in subjects.values():
        for _ in range(3):
            subject()
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            seconds[name].append(min(subject() for _ in range(calls)))
    base = seconds[next(iter(subjects))]
    return {name: timing_against(taken, base) for name, taken in seconds.items()}


def timing_against(taken: list[float], base: list[float]) -> Timing:
    """What rounds took, in seconds, against another subject's in the same rounds."""
    ratios = [mine / its for mine, its in zip(taken, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Timing(round(statistics.median(taken) * 1e3, 3), round(middle, 3), round(low, 3), round(high, 3))


def processor_seconds() -> float:
    """The processor time of this thread."""
    return time.thread_time()
