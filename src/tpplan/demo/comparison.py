"""Running the demo: the unsharded model, each number of ranks under each plan, and what sets them apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path

import torch
from torch import Tensor

from tpplan.api import Program, compile_plan
from tpplan.demo.demo_ranks import RankRun, run_ranks
from tpplan.demo.embedding import Batch, embed, empty_model, load_model, tokenize
from tpplan.demo.sentences import SENTENCES

TOLERANCE = 1e-5
TIMEOUT = 240.0


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One plan on one number of ranks.

    Attributes:
        program: what the plan was compiled to.
        difference: the largest difference of an embedding's component, on any rank, from the unsharded model's.
        counted: collectives of one forward as counted at run time; the ranks' union if they differ.
        predicted: those that the program names.
        parameter_bytes: of each rank.
    """

    program: Program
    difference: float
    counted: Counter[str]
    predicted: Counter[str]
    parameter_bytes: tuple[int, ...]

    @property
    def agrees(self) -> bool:
        """Whether the embeddings are the unsharded model's."""
        return self.difference <= TOLERANCE

    @property
    def ok(self) -> bool:
        """Whether the embeddings agree and the program foresaw every collective."""
        return self.agrees and self.counted == self.predicted


@dataclass(frozen=True, slots=True)
class Comparison:
    """The demo's result.

    Attributes:
        embeddings: of the unsharded model, (sentences, hidden).
        sharded: of the last run's first rank.
        parameters: how many numbers the model has.
        parameter_bytes: the unsharded model's.
        batch_shape: (sentences, padded length).
        runs: in the order in which they ran.
    """

    embeddings: Tensor
    sharded: Tensor
    parameters: int
    parameter_bytes: int
    batch_shape: tuple[int, ...]
    runs: tuple[DemoRun, ...]

    @property
    def ok(self) -> bool:
        """Whether all runs are."""
        return all(run.ok for run in self.runs)


def compare(
    weights: Path, sizes: Sequence[int], plans: Sequence[str], progress: Callable[[str], None], timeout: float = TIMEOUT
) -> Comparison:
    """Embed the sentences without and with sharding.

    Args:
        weights: the model's folder.
        sizes: numbers of processes, one after the other.
        plans: files or names of plans.
        progress: told what is being done.
        timeout: seconds for each number of processes.

    Raises:
        PlanError: a plan has mistakes, or doesn't fit the model.
        RanksError: the processes couldn't finish.
    """
    progress("embedding with the unsharded model")
    batch = tokenize(weights, SENTENCES, multiple=lcm(*sizes))
    model = load_model(weights)
    embeddings = embed(model, batch)
    parameters = list(model.parameters())
    del model
    programs = _compile(weights, sizes, plans, batch, progress)
    runs: list[DemoRun] = []
    sharded = embeddings
    for size in sizes:
        progress(f"embedding on {size} processes under {' and '.join(plans)}")
        for plan, ranks in zip(plans, run_ranks(weights, batch, size, tuple(plans), timeout), strict=True):
            runs.append(_run(programs[size, plan], ranks, embeddings))
            sharded = ranks[0].embeddings
    return Comparison(
        embeddings=embeddings,
        sharded=sharded,
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.itemsize for p in parameters),
        batch_shape=tuple(batch["input_ids"].shape),
        runs=tuple(runs),
    )


def _compile(
    weights: Path, sizes: Sequence[int], plans: Sequence[str], batch: Batch, progress: Callable[[str], None]
) -> dict[tuple[int, str], Program]:
    """Every plan for every size, before a process is started: what doesn't fit is found at once."""
    progress(f"compiling {' and '.join(plans)} for {' and '.join(map(str, sizes))} ranks")
    model = empty_model(weights)
    return {(size, plan): compile_plan(model, plan, size, inputs=batch) for size in sizes for plan in plans}


def _run(program: Program, ranks: Sequence[RankRun], expected: Tensor) -> DemoRun:
    counted: Counter[str] = Counter()
    for rank in ranks:
        counted |= rank.collectives
    return DemoRun(
        program=program,
        # torch's max, unlike Python's, is NaN if any is.
        difference=float(torch.stack([(rank.embeddings - expected).abs().max() for rank in ranks]).max()),
        counted=counted,
        predicted=program.count_collectives(backward=False),
        parameter_bytes=tuple(rank.parameter_bytes for rank in ranks),
    )
