"""Runs cases on two real processes that stay up between cases, unless one hangs."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from tests.battery.ranks import Outcome, Verdict, awake, run_case
from tests.runtime.world import World, world

RANKS = 2
SECONDS = 40.0  # for all of a case
LONGER = 12.0  # for one rank after another has answered
ORDER: list[Verdict] = ["equal", "refused", "crashed", "hangs", "WRONG"]


@dataclass(frozen=True)
class Result:
    """What came of a case: the worst of all its steps on all ranks."""

    verdict: Verdict
    detail: str
    seconds: float


@functools.cache
def result_of(name: str) -> Result:
    """Run a case, once."""
    processes = world(RANKS)
    processes.run(awake)  # imports take seconds, and aren't the case's
    start = time.perf_counter()
    answers = _ask(processes, name)
    outcome = worst(answers)
    return Result(outcome.verdict, f"{outcome.step}: {outcome.detail}", time.perf_counter() - start)


def worst(answers: list[list[Outcome] | None]) -> Outcome:
    """The worst outcome of any rank; ranks that disagree on what is refused are wrong as well."""
    outcomes = [outcome for answer in answers if answer is not None for outcome in answer]
    if None in answers:
        last = [answer[-1] for answer in answers if answer]
        detail = ", ".join(f"{outcome.step} {outcome.verdict}: {outcome.detail}" for outcome in last)
        outcomes.append(Outcome("hangs", "hangs", detail or "no rank answers"))
    else:
        seen = [[(one.step, one.verdict) for one in answer or () if one.step != "compile_plan"] for answer in answers]
        if any(steps != seen[0] for steps in seen):
            steps = next(pair for pair in zip(*seen, strict=False) if len(set(pair)) > 1)
            outcomes.append(Outcome(steps[0][0], "crashed", f"ranks disagree: {[step[1] for step in steps]}"))
    return max(outcomes, key=lambda outcome: ORDER.index(outcome.verdict))


def _ask(processes: World, name: str) -> list[list[Outcome] | None]:
    for pipe in processes._pipes:
        pipe.send((run_case, (name,)))
    answers: list[list[Outcome] | None] = [None] * RANKS
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(processes._pipes)}
    while waiting:
        ready = wait(list(waiting), timeout=SECONDS if len(waiting) == RANKS else LONGER)
        if not ready:
            processes.close()
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                ok, value = pipe.recv()  # pyright: ignore
            except EOFError:
                ok, value = False, "the process died"
            answers[rank] = value if ok else [Outcome("harness", "crashed", str(value).strip().splitlines()[-1])]  # pyright: ignore
    return answers
