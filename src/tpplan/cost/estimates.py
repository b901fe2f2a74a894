"""What a program costs on some GPUs, as data: memory of a rank, time of a step, tokens a second."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one rank.

    Attributes:
        parameters: its parts, and whole buffers.
        gradients: of parameters that train.
        optimizer: its state, see `OPTIMIZERS`.
        activations: what the forward leaves for the backward, and its result; without gradients, nothing.
        temporaries: the most that there is at once beside all of that.
        cache: what generated tokens are computed from, such as keys and values.
    """

    parameters: int
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporaries: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """By name, in the order of a bar."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TimeSlice:
    """What runs on a stream for a while.

    Attributes:
        stream: "compute" or "communication".
        module: whose forward or backward it is.
        name: of the operator or collective.
        backward: whether it is in the backward.
        start, seconds: from the block's beginning.
        bytes: of a collective's whole tensor, or that a kernel moves.
        hidden: of a collective, how many seconds are beside products; less than 0 where its parts cost more.
    """

    stream: str
    module: str
    name: str
    backward: bool
    start: float
    seconds: float
    bytes: int
    hidden: float = 0.0


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Seconds of a step: a forward, and in training its backward and the optimizer.

    Attributes:
        compute_seconds: of kernels.
        communication_seconds: of collectives, those of data parallelism among them.
        exposed_seconds: of collectives that nothing hides.
        host_seconds: that the host takes to launch the kernels, meanwhile; none if they are compiled.
        total_seconds: the longer of host and GPU.
        line: one repeated block forward and backward, on two streams.
    """

    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    host_seconds: float
    total_seconds: float
    line: tuple[TimeSlice, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationEstimate:
    """Seconds without gradients.

    Attributes:
        first_token_seconds: a forward of the whole prompts.
        token_seconds: one token more for each prompt.
        tokens_per_second: that are generated, of all prompts and replicas.
    """

    first_token_seconds: float
    token_seconds: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a program costs.

    Attributes:
        gpu: the cluster's name.
        plan, model: the program's.
        tp, dp, fsdp: degrees: ranks of the plan's axis, replicas, and whether these share parameters.
        batch, sequence: of one replica in one step.
        optimizer, checkpointing: what was asked for.
        memory: of a rank.
        step: of training; of generation, the forward of the prompts.
        tokens_per_second: of all replicas in training; in generation, tokens that are generated.
        mfu: model FLOPs utilisation in training, from 0 to 1; None in generation.
        fits: whether the memory fits the GPU.
        available: bytes that tensors may take on it.
        generation: of generation.
        guesses: what rests on no measured or published figure.
        assumptions: every number that this rests on, by name.
    """

    gpu: str
    plan: str
    model: str
    tp: int
    dp: int
    fsdp: bool
    batch: int
    sequence: int
    optimizer: str
    checkpointing: str
    memory: MemoryEstimate
    step: StepEstimate
    tokens_per_second: float
    mfu: float | None
    fits: bool
    available: int
    generation: GenerationEstimate | None
    guesses: tuple[str, ...]
    assumptions: Mapping[str, object]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        plain = asdict(self)
        plain["memory"]["total"] = self.memory.total
        return plain

    def to_json(self, indent: int | None = 2) -> str:
        """As JSON text."""
        return json.dumps(self.to_dict(), indent=indent)


__all__ = ["Estimate", "GenerationEstimate", "MemoryEstimate", "StepEstimate", "TimeSlice"]
