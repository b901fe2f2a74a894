"""Advise: which degrees of tensor and data parallelism to take for a model on given GPUs.

in:  a model, GPUs, the batch and sequence of one replica
out: `Advice`: a row for each choice, the recommended one among them

Each degree of tensor parallelism is compiled, by the plan that ships for the architecture or by one that `suggest`
finds, and estimated; so what isn't possible has the compiler's reason. The rules are those that Megatron-LM's and
torchtitan's papers come to: no tensor parallelism where a model fits one GPU, inside of a node otherwise, replicas
across nodes, and pipeline or context parallelism where all that isn't enough.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tpplan.compiler.ir.program import Program
from tpplan.compiler.pipeline import compile_call
from tpplan.compiler.request import Request
from tpplan.compiler.trace.surroundings import same_files
from tpplan.cost.advice import Advice, AdviceRow
from tpplan.cost.asked_costs import CHECKPOINTING, MEMORY, TOPOLOGY, asked_cluster, bytes_of
from tpplan.cost.cluster import Cluster
from tpplan.cost.estimates import Estimate
from tpplan.cost.link_times import Group
from tpplan.cost.other_degrees import (
    ASSUMED,
    Microbatch,
    OtherStep,
    degrees_text,
    other_degrees,
    other_step,
    ways_of,
)
from tpplan.cost.state_memory import optimizer_seconds
from tpplan.forecast.estimate import estimate
from tpplan.forecast.measurement import Measurement, SizedCall
from tpplan.inputs import beyond_positions, example_call, step_settings, usual_length, with_labels
from tpplan.plan import ArgumentError, CompileError, Plan, load_plan
from tpplan.plan.locate import shipped_plan_names
from tpplan.plan.taken import FLAG, SIZE, TEXT, optional, takes
from tpplan.progress import doing
from tpplan.report.quantities import bytes_text
from tpplan.runtime.compiled.compiled_before import bare
from tpplan.runtime.parameters.taken_apart import taken_apart
from tpplan.served import served
from tpplan.suggest import search, write_plan
from tpplan.taken_models import INPUTS, MODEL

_MOST_GPUS = 4096
_NODES_OF_TP = 2  # beyond, tensor parallelism never pays


@takes(
    model=MODEL, gpus=SIZE, gpu=TEXT, batch=optional(SIZE), sequence=optional(SIZE), inference=FLAG,
    target_memory=MEMORY, optimizer=TEXT, topology=TOPOLOGY, inputs=INPUTS, compiled=FLAG,
)  # fmt: skip
def advise(
    model: nn.Module,
    gpus: int = 8,
    gpu: str = "h100",
    *,
    batch: int | None = None,
    sequence: int | None = None,
    inference: bool = False,
    target_memory: int | str | None = None,
    optimizer: str = "adamw",
    topology: str | os.PathLike[str] | Cluster | None = None,
    inputs: Mapping[str, Any] | None = None,
    compiled: bool = False,
) -> Advice:
    """Degrees of tensor and data parallelism for a model, with what each costs and whether it fits.

    Args:
        model: the stock model; on `meta` it takes no memory. It is not changed.
        gpus: how many there are; the ranks of a row's plan times its replicas.
        gpu: see `estimate`.
        batch, sequence: of one replica in one step: sequences, and tokens of each. By default those of `inputs`, or one
            sequence of 4096 tokens, or of as many as the model has positions for.
        inference: whether for generation after a prompt of that size, and not for training.
        target_memory: bytes that a rank may take, or a text such as `70GiB`; less than the GPU has, for the rest.
        optimizer: see `estimate`.
        topology: see `estimate`.
        inputs: an example call of that size, for a model whose calls can't be made up.
        compiled: see `estimate`.

    Returns:
        Rows in the order of degrees, with tensor parallelism over two nodes at the most. A row that isn't possible says
        why. `Advice.recommended` is the one to take.

    Raises:
        CostError: TP220, a name that isn't known.
        PlanError: TP221, the topology file has mistakes.
        CompileError: TP111, there are no inputs, and none can be made up; TP110, they don't fit.
        ArgumentError: an argument is of another kind, `target_memory` is no size, or `inputs` are of another size.

    Example:
        >>> advice = tpplan.advise(model, gpus=2, gpu="h100", batch=4, sequence=1, inputs={"x": x})
        >>> [(row.tp, row.dp, row.fsdp, row.fits) for row in advice]
        [(1, 2, False, True), (1, 2, True, True), (2, 1, False, True), (2, 1, False, True)]
        >>> advice.recommended.reason
        'it fits one GPU: data parallelism sends the least'
    """
    cluster = asked_cluster(gpu, topology, optimizer)
    available = int(cluster.memory * cluster.usable)
    if target_memory is not None:
        available = min(available, bytes_of(target_memory))
    if inputs is None:
        batch, sequence = batch or 1, sequence or usual_length(model)
    else:
        held = SizedCall.of(model, *example_call(model, 1, inputs))
        batch, sequence = batch or held.batch, sequence or held.sequence
        if held.batch != batch or held.sequence not in (1, sequence):  # a picture has none
            sizes = f"`batch={held.batch}, sequence={held.sequence}`"
            raise ArgumentError(f"advise: `inputs` are of another size than {batch} × {sequence}: pass {sizes}")
    with bare(model) as stock, taken_apart(stock), same_files():
        subject = _AdvisedModel(stock, batch, sequence, inference, inputs)
        around = _Choices(subject, cluster, available, gpus, optimizer, compiled)
        most = _NODES_OF_TP * cluster.in_node
        rows: list[AdviceRow] = []
        for tp in (tp for tp in _divisors(gpus) if tp <= most):
            with doing(f"tp={tp}"):
                rows += around.rows(tp)
        best = around.best(rows)
        rows = [around.told(row, recommended=row is best) for row in rows]
        smallest = around.smallest(rows)
        other = around.other(rows) if best is None else None
    sequence = next((cost.sequence for cost in around.known.values()), sequence)  # a picture has none
    guesses = tuple(dict.fromkeys(guess for held in around.known.values() for guess in held.guesses))
    return Advice(
        tuple(rows), type(model).__name__, cluster.name, gpus, batch, sequence, inference, available, smallest,
        around.summary(next((row for row in rows if row.recommended), None), smallest, other),
        (*guesses, *(other.assumed if other else ())), other.degrees if other else {}, other.steps if other else (),
    )  # fmt: skip


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclass(frozen=True, slots=True)
class _AdvisedModel:
    """What is compiled."""

    model: nn.Module
    batch: int
    sequence: int
    inference: bool
    inputs: Mapping[str, Any] | None

    def program(self, tp: int, sequence_parallel: bool) -> Program:
        """The program over so many ranks, which measures itself.

        Raises:
            CompileError: there is none.
        """
        shipped = self._plan(sequence_parallel)
        if shipped is not None:
            try:
                return self._program(shipped, tp, sequence_parallel)
            except CompileError as error:
                if all(found.code != "TP012" for found in error.diagnostics):
                    raise
        return self._program(None, tp, sequence_parallel)  # none ships, or for another of the architecture's models

    def _program(self, plan: Plan | None, tp: int, sequence_parallel: bool) -> Program:
        inner = served(self.model, plan, tp, self.inputs, batch=self.batch, sequence=self.sequence)
        call = (inner.arguments, self._keywords(inner.model, inner.keywords))
        if plan is None and tp > 1:
            name = type(inner.model).__name__
            plan = load_plan(write_plan(search(inner.model, tp, *call, sequence_parallel), name))
        return measured_program(Request(inner.model, plan or Plan(), tp, *call, training=not self.inference))

    def _plan(self, sequence_parallel: bool) -> Plan | None:
        kind = getattr(getattr(self.model, "config", None), "model_type", None)
        name = f"{kind}-sequence" if sequence_parallel else str(kind)
        return load_plan(name) if name in shipped_plan_names() else None

    def _keywords(self, model: nn.Module, keywords: dict[str, Any]) -> dict[str, Any]:
        labelled = keywords if self.inference or self.inputs is not None else with_labels(model, keywords)
        return {**step_settings(model, self.inference), **labelled}


def measured_program(request: Request) -> Program:
    """The program of a request, which measures itself.

    Raises:
        CompileError: there is none.
    """
    compiled, call = compile_call(request), (request.arguments, dict(request.keywords))
    return replace(compiled.program, measure=Measurement(request.model, compiled, *call))


@dataclass(frozen=True, slots=True)
class _Others:
    """Other parallelism beside a row, with which a rank would fit: degrees, ways to combine them, and their steps."""

    row: AdviceRow
    degrees: Mapping[str, int]
    ways: Sequence[Mapping[str, int]]
    steps: tuple[OtherStep, ...] = ()

    @property
    def assumed(self) -> tuple[str, ...]:
        """What the steps rest on."""
        return tuple(text for name, text in ASSUMED.items() if any(getattr(step, name) > 1 for step in self.steps))


class _Choices:
    """The choices for a model on some GPUs."""

    def __init__(
        self, subject: _AdvisedModel, cluster: Cluster, available: int, gpus: int, optimizer: str, compiled: bool
    ) -> None:
        """Nothing is compiled yet."""
        self.subject = subject
        self.cluster = cluster
        self.available = available
        self.gpus = gpus
        self.optimizer = optimizer
        self.compiled = compiled
        self.known: dict[tuple[object, ...], Estimate] = {}
        self._programs: dict[tuple[int, bool], Program | CompileError] = {}

    def rows(self, tp: int) -> Iterator[AdviceRow]:
        """Those of a degree of tensor parallelism."""
        dp = self.gpus // tp
        for split in (False, True) if tp > 1 and not self.subject.inference else (False,):
            program = self.program(tp, split)
            for fsdp in (False, True) if dp > 1 and not self.subject.inference else (False,):
                if isinstance(program, CompileError):
                    found = program.diagnostics[0]
                    yield _impossible(tp, dp, split, fsdp, f"{found.code}: {found.message}")
                else:
                    yield self._row(program, dp, split, fsdp)

    def program(self, tp: int, split: bool) -> Program | CompileError:
        """The program of these degrees, or why there is none."""
        if (tp, split) not in self._programs:
            try:
                program: Program | CompileError = self.subject.program(tp, split)
                if tp > 1 and not any(p.layout.is_sharded for p in program.parameters):
                    program = CompileError.of("TP123", "the plan leaves every parameter whole")
            except CompileError as error:
                if error.code == "TP111":
                    raise
                program = error
            self._programs[tp, split] = program
        return self._programs[tp, split]

    def cost(self, program: Program, dp: int, fsdp: bool, checkpointing: str, batch: int | None = None) -> Estimate:
        """What a choice costs; of another batch, its memory alone is wanted."""
        key = (program.size, program.plan, dp, fsdp, checkpointing, batch)
        if key not in self.known:
            if batch is not None:
                work = program.measure.at(batch, forward=self.subject.inference, flops=False)
                program = replace(program, work=work, measure=None)
            self.known[key] = estimate(
                program, optimizer=self.optimizer, checkpointing=checkpointing, dp=dp, topology=self.cluster,
                batch=batch, fsdp=fsdp, inference=self.subject.inference, compiled=self.compiled,
            )  # fmt: skip
        return self.known[key]

    def least(self, program: Program, dp: int, fsdp: bool) -> Estimate:
        """With the least checkpointing that fits; the most where none does."""
        *lighter, most = CHECKPOINTING[:1] if self.subject.inference else CHECKPOINTING
        for kind in lighter:
            cost = self.cost(program, dp, fsdp, kind)
            if self.fits(cost):
                return cost
        return self.cost(program, dp, fsdp, most)

    def fits(self, cost: Estimate) -> bool:
        """Whether a rank's memory is enough."""
        return cost.memory.total <= self.available

    def _row(self, program: Program, dp: int, split: bool, fsdp: bool) -> AdviceRow:
        cost = self.least(program, dp, fsdp)
        fits = self.fits(cost)
        shares = cost.step.exposed_seconds / cost.step.total_seconds
        largest, batch = self._largest(program, dp, fsdp, cost.checkpointing), self.subject.batch
        return AdviceRow(
            program.size, dp, split, fsdp, cost.checkpointing, program.plan, fits, cost.memory, cost.step,
            cost.tokens_per_second if fits else 0.0, cost.mfu if fits else None, shares,
            max(largest, batch) if fits else min(largest, batch - 1), False, "",
        )  # fmt: skip

    def _largest(self, program: Program, dp: int, fsdp: bool, checkpointing: str) -> int:
        """The largest batch that fits: memory is linear in it."""
        batch = self.subject.batch
        try:
            one, two = (self.cost(program, dp, fsdp, checkpointing, n).memory.total for n in (2 * batch, 4 * batch))
        except Exception:  # it runs at its example's size alone
            return batch if self.fits(self.cost(program, dp, fsdp, checkpointing)) else 0
        each = max((two - one) / (2 * batch), 1e-9)
        return max(int((self.available - (one - 2 * batch * each)) / each), 0)

    def best(self, rows: list[AdviceRow]) -> AdviceRow | None:
        """The row to take: no tensor parallelism where that fits, else the fastest that stays inside of a node.

        Of rows without, one that computes nothing again; else the fastest.
        """
        fitting = [row for row in rows if row.fits]
        alone = [row for row in fitting if row.tp == 1 and not row.fsdp]
        if any(row.checkpointing != "none" for row in alone):
            alone = [row for row in fitting if row.tp == 1]
        inside = [row for row in fitting if self._nodes(row.tp) == 1]
        return max(alone or inside or fitting, key=lambda row: (row.tokens_per_second, -row.tp), default=None)

    def _nodes(self, tp: int) -> int:
        return Group.of(self.cluster, tp, gpus=self.gpus).nodes

    def told(self, row: AdviceRow, recommended: bool) -> AdviceRow:
        """The row with its reason."""
        if row.memory is None:
            return row
        over = row.memory.total - self.available
        reasons: list[str] = []
        if over > 0:
            largest = max(row.memory.parts, key=lambda name: row.memory.parts[name] if row.memory else 0)
            reasons.append(f"a rank lacks {bytes_text(over)}; most of it is {largest}")
        if self._nodes(row.tp) > 1:
            reasons.append(f"warning: tensor parallelism over {self._nodes(row.tp)} nodes goes by their network")
        if recommended:
            reasons.append(self._why(row))
        beyond = beyond_positions(self.subject.model, self.subject.sequence)
        reasons += [f"warning: {text}" for text in beyond]
        return replace(row, recommended=recommended, reason="; ".join(reasons))

    def _why(self, row: AdviceRow) -> str:
        if row.tp == 1 and not row.fsdp:
            if row.dp == 1:
                return "it fits one GPU, which needs no parallelism"
            return "it fits one GPU: data parallelism sends the least"
        if row.tp == 1:
            return "what is kept from step to step fits once replicas share it (FSDP), and layers needn't be split"
        inside = "inside of a node" if self._nodes(row.tp) == 1 else "over nodes, as nothing else fits"
        kind = "tensor and sequence parallelism" if row.sequence_parallel else "tensor parallelism"
        return f"the fastest of those that fit: {kind} {inside}{', replicas beside it' if row.dp > 1 else ''}"

    def smallest(self, rows: list[AdviceRow]) -> int | None:
        """The least number of GPUs on which the model fits: of the rows, or a power of two."""
        alone = self.subject.inference  # replicas share nothing
        fitting = [row.tp * (row.dp if row.fsdp and not alone else 1) for row in rows if row.fits]
        least: int | None = min(fitting, default=None)
        inside = [tp for tp in (1, 2, 4, 8, 16) if tp <= self.cluster.in_node]
        for tp in [tp for tp in inside if tp <= self.gpus] + [tp for tp in inside if tp > self.gpus]:
            if least is not None and least <= tp:
                continue
            for split in (False, True) if tp > 1 and not self.subject.inference else (False,):
                program = self.program(tp, split)
                if not isinstance(program, CompileError):
                    least = min(filter(None, (least, self._smallest_of(program))), default=None)
        return least

    def _smallest_of(self, program: Program) -> int | None:
        dp = 1
        while program.size * dp <= _MOST_GPUS:
            shared = (False, True) if dp > 1 else (False,)
            if any(self.fits(self.least(program, dp, fsdp)) for fsdp in shared):
                return program.size * dp
            if self.subject.inference:
                break
            dp *= 2
        return None

    def summary(self, best: AdviceRow | None, smallest: int | None, other: _Others | None) -> str:
        """What to do."""
        count = f"{self.gpus} {self.cluster.name}"
        if best is not None:
            parts = [f"tp {best.tp}"] + (["sequence parallel"] if best.sequence_parallel else [])
            parts += [f"{'fsdp' if best.fsdp else 'dp'} {best.dp}"] if best.dp > 1 else []
            parts += [f"{best.checkpointing} checkpointing"] if best.checkpointing != "none" else []
            return f"On {count}: {', '.join(parts)}. {best.reason[0].upper()}{best.reason[1:]}."
        told = [f"It doesn't fit {count}."] + ([f"The least are {smallest}."] if smallest is not None else [])
        if other is None:
            return " ".join(told) if smallest is not None else f"No plan compiles for {count}."
        row, ways = other.row, degrees_text(other.ways, other.steps)
        if not ways:
            return " ".join([*told, "Pipeline, context or expert parallelism isn't enough either."])
        beside = f"beside tp {row.tp}{f' and fsdp {row.dp}' if row.fsdp and row.dp > 1 else ''}"
        return " ".join([*told, f"Or other parallelism {beside}, on as many times more GPUs: {ways}."])

    def other(self, rows: list[AdviceRow]) -> _Others | None:
        """The row that needs the least memory, and other parallelism with which it would fit."""
        row = min((r for r in rows if r.memory), key=lambda r: r.memory.total if r.memory else 0, default=None)
        if row is None or row.memory is None:
            return None
        program = self.program(row.tp, row.sequence_parallel)
        assert not isinstance(program, CompileError)
        held = [(p, p.name.partition(".experts.")[1:]) for p in program.parameters]
        experts = sum(p.local_bytes for p, (there, _) in held if there) / sum(p.local_bytes for p, _ in held)
        numbers = {n for p, (there, rest) in held if there for n in _expert_numbers(p.shape, rest)}
        blocks = {tuple(found[:2]) for p, _ in held if len(found := re.split(r"\.(?=\d+\.)|(?<=\d)\.", p.name)) > 1}
        most = {"pipeline": len(blocks), "experts": len(numbers)}
        tokens = next(cost.sequence for cost in self.known.values())
        most |= {"context": tokens} if tokens > 1 else {}  # patches of a picture aren't counted
        degrees = other_degrees(row.memory, self.available, experts, most)
        ways = ways_of(degrees, row.memory, self.available)
        timed = [way for way in ways if "experts" not in way and not self.subject.inference]
        if row.step is None or not timed:
            return _Others(row, degrees, ways)
        work = program.measure.at(forward=True, flops=False)
        cost = self.cost(program, row.dp, row.fsdp, row.checkpointing)
        optimizer, count = optimizer_seconds(row.memory, self.cluster), max(len(blocks), 1)
        one = Microbatch(
            row.step.total_seconds - optimizer, optimizer, cost.batch * cost.sequence * row.dp, (row.tp, row.dp), count,
            work.block_inputs[0] // count, work.cache[0], row.memory.gradients,
        )  # fmt: skip
        return _Others(row, degrees, ways, tuple(other_step(self.cluster, one, **way) for way in timed))


def _expert_numbers(shape: Sequence[int], rest: str) -> Iterable[int]:
    """Which experts a parameter inside of `experts` is of: the one of its name, or all that are stacked in it."""
    number = rest.partition(".")[0]
    return (int(number),) if number.isdecimal() else range(shape[0] if len(shape) == 3 else 0)


def _impossible(tp: int, dp: int, split: bool, fsdp: bool, reason: str) -> AdviceRow:
    return AdviceRow(tp, dp, split, fsdp, "none", "", False, None, None, 0.0, None, 0.0, 0, False, reason)


__all__ = ["advise", "measured_program"]
