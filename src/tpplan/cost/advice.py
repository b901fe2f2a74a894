"""Advice on degrees of parallelism, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, overload

from tpplan.cost.estimates import MemoryEstimate, StepEstimate
from tpplan.cost.other_degrees import OtherStep


@dataclass(frozen=True, slots=True)
class AdviceRow:
    """One choice of degrees.

    Attributes:
        tp, dp: ranks that share each layer, and replicas of them.
        sequence_parallel: whether the stream between layers is split along the sequence.
        fsdp: whether replicas share parameters, gradients and the optimizer's state.
        checkpointing: of activations, the least with which it fits.
        plan: the plan's name; empty where there is none.
        fits: whether a rank's memory is enough.
        memory: of a rank; None where no plan compiles.
        step: of a step; None likewise.
        tokens_per_second: of all GPUs; 0 where it doesn't fit.
        mfu: model FLOPs utilisation, in training.
        communication_share: of the step that is exposed communication, from 0 to 1.
        largest_batch: of one replica, that fits; 0 if none does.
        recommended: whether to take this one.
        reason: why it is recommended, or isn't possible; or what speaks against it.
    """

    tp: int
    dp: int
    sequence_parallel: bool
    fsdp: bool
    checkpointing: str
    plan: str
    fits: bool
    memory: MemoryEstimate | None
    step: StepEstimate | None
    tokens_per_second: float
    mfu: float | None
    communication_share: float
    largest_batch: int
    recommended: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Advice(Sequence[AdviceRow]):
    """Rows, by degree; and what they say together.

    Attributes:
        rows: the choices.
        model, gpu, gpus: what was asked for.
        batch, sequence: of one replica; a sequence of 1 for calls that have none.
        inference: whether for generation.
        available: bytes that tensors may take on a GPU.
        smallest: the least number of GPUs on which it fits, of these rows or a power of two; None if none up to 4096.
        summary: what to do, in a sentence or two.
        guesses: what rests on no measured or published figure.
        other: where no row fits, degrees of "pipeline", "context" and "experts" with which the row that needs the least
            memory would, each by itself; pipeline and context together if neither is enough.
        other_steps: what a step in training takes with those of pipeline and context.
    """

    rows: tuple[AdviceRow, ...]
    model: str
    gpu: str
    gpus: int
    batch: int
    sequence: int
    inference: bool
    available: int
    smallest: int | None
    summary: str
    guesses: tuple[str, ...]
    other: Mapping[str, int] = field(default_factory=dict[str, int])
    other_steps: tuple[OtherStep, ...] = ()

    @property
    def recommended(self) -> AdviceRow | None:
        """The row to take; None if nothing fits."""
        return next((row for row in self.rows if row.recommended), None)

    @overload
    def __getitem__(self, index: int) -> AdviceRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[AdviceRow]: ...
    def __getitem__(self, index: int | slice) -> AdviceRow | Sequence[AdviceRow]:
        """A row."""
        return self.rows[index]

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.rows)

    def to_json(self, indent: int | None = 2) -> str:
        """As JSON text."""
        plain: dict[str, Any] = asdict(self)
        for row, held in zip(plain["rows"], self.rows, strict=True):
            if held.memory is not None:
                row["memory"]["total"] = held.memory.total
        return json.dumps(plain, indent=indent)


__all__ = ["Advice", "AdviceRow"]
