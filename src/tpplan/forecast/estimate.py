"""Estimate: memory, time and throughput of a program on given GPUs.

in:  a program with its work, GPUs, what goes around it: optimizer, activation checkpoints, data parallelism
out: `Estimate`

Compute is a roofline of each kernel, one after the other. Collectives of the program itself are hidden where the plan
overlaps them; see `cost/hiding`. Those of data parallelism run beside the forward or the backward, and are exposed
where they take longer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tpplan.compiler.ir.program import Program
from tpplan.cost.asked_costs import TOPOLOGY, asked_cluster
from tpplan.cost.cluster import Cluster
from tpplan.cost.cost_errors import CostError
from tpplan.cost.estimates import Estimate, GenerationEstimate, MemoryEstimate, StepEstimate, TimeSlice
from tpplan.cost.hiding import Hiding, Rates
from tpplan.cost.kernel_times import known_dtype, peak_of, task_seconds
from tpplan.cost.link_times import Group, collective_seconds
from tpplan.cost.state_memory import optimizer_bytes, optimizer_seconds
from tpplan.cost.work import COLLECTIVE, Task, Work
from tpplan.ops.registry import has_role
from tpplan.plan.taken import FLAG, SHARE, SIZE, TEXT, ArgumentKind, optional, takes

_PROGRAM = ArgumentKind(lambda held: isinstance(held, Program), "a Program, which `tpplan.compile_plan` makes")


@takes(
    program=_PROGRAM, gpu=TEXT, optimizer=TEXT, checkpointing=TEXT, dp=SIZE, topology=TOPOLOGY, batch=optional(SIZE),
    sequence=optional(SIZE), fsdp=FLAG, inference=FLAG, precision=optional(TEXT), compiled=FLAG, overlap=SHARE,
)  # fmt: skip
def estimate(
    program: Program,
    gpu: str = "h100",
    *,
    optimizer: str = "adamw",
    checkpointing: str = "none",
    dp: int = 1,
    topology: str | os.PathLike[str] | Cluster | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    fsdp: bool = False,
    inference: bool = False,
    precision: str | None = None,
    compiled: bool = False,
    overlap: float = 1.0,
) -> Estimate:
    """What a program costs in memory and time, without a GPU.

    Args:
        program: of `compile_plan`; one from JSON has its work with it.
        gpu: `h100`, `h100-pcie`, `h200`, `a100` or `b200`, eight in a node.
        optimizer: `adamw`, `adamw-8bit`, `adamw-plain`, `muon`, `sgd` or `sgd-momentum`; see docs/costs.md.
        checkpointing: of activations: `none`; `selective`, which keeps results of products, attention and collectives
            in each block of a list of modules, and computes the others again; or `full`, which keeps a block's inputs.
        dp: replicas, each of the program's ranks.
        topology: a YAML file, or a `Cluster`, in place of `gpu`.
        batch, sequence: of one replica; those of the example call where not given.
        fsdp: whether replicas share parameters, gradients and state; one replica has nobody to share with.
        inference: whether to estimate generation after a prompt, and not training.
        precision: what products compute in, such as `tf32` or `fp8`, if not in their own dtype.
        compiled: whether kernels between products are one each, as torch.compile makes them.
        overlap: the share of a forward's or a backward's compute beside which data parallelism may run.

    Raises:
        CostError: TP220, something is asked for by a name that isn't known; TP222, the program carries no work, or
            none for that size.
        PlanError: TP221, the topology file has mistakes.
        ArgumentError: an argument is of another kind, such as a degree less than 1.

    Example:
        >>> plan = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
        >>> cost = tpplan.estimate(tpplan.compile_plan(model, plan, tp=2, inputs=x), "h100", optimizer="adamw")
        >>> cost.memory.parameters, cost.memory.optimizer
        (1120, 2240)
        >>> cost.step.communication_seconds > 0
        True
    """
    cluster = asked_cluster(gpu, topology, optimizer, checkpointing)
    work = _work(program, batch, sequence, inference)
    if not inference and not work.training:
        raise CostError.of(
            "TP222", "the program was captured in evaluation, and has no backward", help="pass `inference=True`"
        )
    hiding = Hiding.of(program, Rates(cluster, precision, 1.0 if inference else cluster.sustained))
    costing = _Costing(cluster, program.size, dp, fsdp, optimizer, checkpointing, precision, compiled, overlap, hiding)
    return costing.generation(program, work) if inference else costing.training(program, work)


def _work(program: Program, batch: int | None, sequence: int | None, inference: bool) -> Work:
    if program.measure is None and program.work is None:
        raise CostError.of(
            "TP222", "the program carries no work: it was compiled or written by something else than `compile_plan`",
            help="compile it again by `tpplan.compile_plan`, and write it by `Program.to_json`",
        )  # fmt: skip
    try:
        if program.measure is not None:
            return program.measure.at(batch, sequence, forward=inference, flops=not inference)
        assert program.work is not None
        return program.work.at(batch or program.work.example[0], sequence or program.work.example[1])
    except CostError:
        raise
    except Exception as error:  # whatever the model's code can't do at that size
        lines = str(error).strip().splitlines() or [type(error).__name__]
        size = f"a batch of {batch or 'the example'} and a sequence of {sequence or 'the example'}"
        raise CostError.of(
            "TP222", f"what it does for {size} isn't known: {lines[0]}",
            help="compile the plan for inputs of that size: `compile_plan(…, inputs=…)`",
        ) from error  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Costing:
    """What a program runs on, and in."""

    cluster: Cluster
    tp: int
    dp: int
    fsdp: bool
    optimizer: str
    checkpointing: str
    precision: str | None
    compiled: bool
    overlap: float
    hiding: Hiding

    # -- training -----------------------------------------------------------------------------------------------
    def training(self, program: Program, work: Work) -> Estimate:
        """A forward, its backward and the optimizer's step."""
        memory = self._training_memory(program, work)
        forward, backward, again = (
            (kernels / self.cluster.sustained, communication, launches, hidden)
            for kernels, communication, launches, hidden in (
                self._pass(work, False), self._pass(work, True), self._recomputed(work)
            )
        )  # fmt: skip
        kernels = forward[0] + backward[0] + again[0]
        optimizer = optimizer_seconds(memory, self.cluster)
        sums = sum(self._collective(name, held) for name, held in program.gradient_sums)
        own = forward[1] + backward[1] + again[1] + sums
        hidden = forward[3] + backward[3] + again[3]
        beside, exposed = self._data_parallel(program, forward[0], backward[0] + again[0])
        compute, communication = kernels + optimizer, own + beside
        host = 0.0 if self.compiled else self.cluster.launch * (forward[2] + backward[2] + again[2])
        total = max(compute + own - hidden + exposed, host)
        step = StepEstimate(compute, communication, own - hidden + exposed, host, total, self._line(work))
        useful = work.model_flops[0] / (total * self.tp * self._peak(work))
        return self._made(program, work, memory, step, work.tokens[0] * self.dp / total, useful, None)

    def _training_memory(self, program: Program, work: Work) -> MemoryEstimate:
        parameters = sum(p.local_bytes for p in program.parameters)
        gradients = sum(p.local_bytes for p in program.parameters if p.trainable)
        state = optimizer_bytes(self.optimizer, program.parameters, work.in_block)
        activations, again = self._activations(work)
        temporaries = work.temporary[0] + again
        if self.fsdp and self.dp > 1:  # a block and the next are whole, and the gradients of one
            blocks = _block_bytes(program, work)
            largest = max([*blocks.values(), parameters - sum(blocks.values())], default=0)
            temporaries += 3 * largest
            parameters, gradients, state = (-(-held // self.dp) for held in (parameters, gradients, state))
        return MemoryEstimate(parameters + _buffer_bytes(program), gradients, state, activations, temporaries)

    def _activations(self, work: Work) -> tuple[int, int]:
        """Bytes that are kept, and what the block that is computed again has beside them."""
        outside = sum(s.bytes[0] * s.times for s in work.saved if s.kind != "input" and not work.in_block(s.module))
        inside = sum(s.bytes[0] * s.times for s in work.saved if s.kind != "input" and work.in_block(s.module))
        kept = outside + work.results[0]
        if self.checkpointing == "none" or not work.lists:
            return kept + inside, 0
        one = sum(s.bytes[0] for s in work.saved if s.kind != "input" and work.in_block(s.module))
        if self.checkpointing == "full":
            return kept + work.block_inputs[0], one
        return kept + min(inside, work.block_inputs[0] + self._results_kept(work)), one

    def _results_kept(self, work: Work) -> int:
        """Bytes of results of products, attention and collectives in blocks.

        A product that is summed or gathered at once isn't kept beside its sum, and a sum that leaves a block is what
        the next one is passed.
        """
        heavy = [t for t in work.tasks if not t.backward and t.kind != "other" and work.in_block(t.module)]
        total = 0
        for task, following in zip(heavy, [*heavy[1:], None], strict=True):
            sends = task.kind == COLLECTIVE
            leaves = following is None or _block_of(following.module, work) != _block_of(task.module, work)
            summed = following is not None and following.kind == COLLECTIVE
            if not (leaves if sends else summed):
                total += task.made[0] // (self.tp if task.name == "reduce-scatter" else 1) * task.times
        return total

    def _recomputed(self, work: Work) -> tuple[float, float, int, float]:
        if self.checkpointing == "none":
            return 0.0, 0.0, 0, 0.0
        everything = self.checkpointing == "full"
        tasks = [
            t for t in work.tasks
            if not t.backward and work.in_block(t.module) and (everything or t.kind == "other")
        ]  # fmt: skip
        return self._times(tasks)

    def _pass(self, work: Work, backward: bool) -> tuple[float, float, int, float]:
        return self._times(t for t in work.tasks if t.backward is backward)

    def _times(self, tasks: Iterable[Task]) -> tuple[float, float, int, float]:
        """Seconds of kernels, of collectives, how many kernels the host launches, and what of collectives is hidden."""
        kernels = communication = hidden = 0.0
        launches = 0
        for task in tasks:
            if task.kind == COLLECTIVE:
                alone = self._collective(task.name, task.made[0])
                communication += alone * task.times
                hidden += self.hiding.seconds(task, alone) * task.times
            else:
                kernels += task_seconds(self.cluster, task, self.precision, self.compiled) * task.times
            launches += task.launches * task.times
        return kernels, communication, launches, hidden

    def _collective(self, name: str, whole: int) -> float:
        return collective_seconds(self.cluster, name, whole, self._group)

    @property
    def _group(self) -> Group:
        """The plan's ranks."""
        return Group.of(self.cluster, self.tp, gpus=self.tp * self.dp)

    def _data_parallel(self, program: Program, forward: float, backward: float) -> tuple[float, float]:
        """Seconds of the collectives of data parallelism, and of those that nothing hides."""
        if self.dp == 1:
            return 0.0, 0.0
        group = Group.of(self.cluster, self.dp, self.tp)
        held = sum(p.local_bytes for p in program.parameters)
        trained = sum(p.local_bytes for p in program.parameters if p.trainable)
        if not self.fsdp:
            after = collective_seconds(self.cluster, "all-reduce", trained, group)
            return after, max(after - self.overlap * backward, 0.0)
        gather = collective_seconds(self.cluster, "all-gather", held, group)
        scatter = collective_seconds(self.cluster, "reduce-scatter", trained, group)
        hidden = max(gather - self.overlap * forward, 0.0) + max(gather + scatter - self.overlap * backward, 0.0)
        return 2 * gather + scatter, hidden

    # -- generation ---------------------------------------------------------------------------------------------
    def generation(self, program: Program, work: Work) -> Estimate:
        """A forward of prompts, and one token more for each."""
        forward = [task for task in work.tasks if not task.backward]
        kernels, communication, launches, hidden = self._times(forward)
        host = 0.0 if self.compiled else self.cluster.launch * launches
        exposed = communication - hidden
        step = StepEstimate(kernels, communication, exposed, host, max(kernels + exposed, host))
        batch, sequence = work.points[0]
        cache = work.cache[0]
        one = [_for_one_token(task, sequence) for task in forward]
        token, sent, launched, _ = self._times(one)
        token += cache / (self.cluster.memory_bandwidth * self.cluster.memory_efficiency)
        token = max(token + sent, 0.0 if self.compiled else self.cluster.launch * launched)
        parameters = sum(p.local_bytes for p in program.parameters) + _buffer_bytes(program)
        memory = MemoryEstimate(parameters, cache=cache, temporaries=work.forward_temporary[0])
        rate = batch * self.dp / token
        generated = GenerationEstimate(step.total_seconds, token, rate)
        return self._made(program, work, memory, step, rate, None, generated)

    # -- both ---------------------------------------------------------------------------------------------------
    def _peak(self, work: Work) -> float:
        dtypes = [task.dtype for task in work.tasks if task.kind == "product"]
        most = max(dtypes, key=dtypes.count, default="bfloat16")
        return peak_of(self.cluster, self.precision or known_dtype(self.cluster, most))

    def _line(self, work: Work) -> tuple[TimeSlice, ...]:
        """The first repeated block, forward and backward."""
        inside = [task for task in work.tasks if work.in_block(task.module)]
        name = next((_block_of(task.module, work) for task in inside), None)
        slices: list[TimeSlice] = []
        at = 0.0
        for task in inside:
            if _block_of(task.module, work) != name:
                continue
            sends = task.kind == COLLECTIVE
            seconds = (
                self._collective(task.name, task.made[0])
                if sends
                else task_seconds(self.cluster, task, self.precision, self.compiled)
            )
            stream = "communication" if sends else "compute"
            moved = task.made[0] if sends else task.moved[0]
            hidden = self.hiding.seconds(task, seconds) if sends else 0.0
            start = at if task.name == "all-gather" else at - max(hidden, 0.0)  # a sum runs beside what was before
            slices.append(TimeSlice(stream, task.module, task.name, task.backward, start, seconds, moved, hidden))
            at += seconds - hidden
        return tuple(slices)

    def _made(
        self, program: Program, work: Work, memory: MemoryEstimate, step: StepEstimate, tokens: float,
        mfu: float | None, generation: GenerationEstimate | None,
    ) -> Estimate:  # fmt: skip
        available = int(self.cluster.memory * self.cluster.usable)
        batch, sequence = work.points[0]
        guesses = list(self.cluster.guesses)
        if program.measure is not None:
            guesses += program.measure.beyond(sequence)
        if self._group.nodes > 1:
            guesses.append("collectives of tensor parallelism between nodes")
        if self.checkpointing != "none" and not work.lists:
            guesses.append("checkpoints wrap blocks of a ModuleList, and the model has none: they change nothing here")
        return Estimate(
            self.cluster.name, program.plan, program.model, self.tp, self.dp, self.fsdp, batch, sequence,
            self.optimizer, self.checkpointing, memory, step, tokens, mfu, memory.total <= available, available,
            generation, tuple(guesses),
            {**self.cluster.assumptions, "overlap": self.overlap, "precision": self.precision,
             "compiled": self.compiled},
        )  # fmt: skip


def _for_one_token(task: Task, sequence: int) -> Task:
    """A task of a prompt's forward for one token: weights are read whole, rows shrink with the sequence.

    An attention is that of the prompt's average query; what it takes is the time to read its keys and values.
    """

    def part(n: int) -> int:
        return -(-n // sequence)

    if task.kind == "product":
        batch, rows, columns, summed = (n[0] for n in task.sizes[:4])
        fewer = part(rows)
        itemsize = max(1, task.made[0] // max(1, batch * rows * columns))
        weights = summed * columns
        if has_role(task.name, "grouped product"):
            experts = max(1, round((task.moved[0] / itemsize - rows * (summed + columns)) / weights))
            weights = round(weights * experts * (1 - (1 - 1 / experts) ** fewer))  # of those that rows choose at random
        moved = batch * (fewer * (summed + columns) + weights) * itemsize
        return replace(
            task, flops=(2 * batch * fewer * columns * summed,), moved=(moved,), fused=(moved,),
            made=(part(task.made[0]),), sizes=((batch,), (fewer,), (columns,), (summed,)),
        )  # fmt: skip
    return replace(
        task, flops=(part(task.flops[0]),), moved=(part(task.moved[0]),), fused=(part(task.fused[0]),),
        made=(part(task.made[0]),),
    )  # fmt: skip


def _block_of(module: str, work: Work) -> str | None:
    for name in work.lists:
        prefix = f"{name}." if name else ""
        if module.startswith(prefix):
            return prefix + module[len(prefix) :].partition(".")[0]
    return None


def _block_bytes(program: Program, work: Work) -> dict[str, int]:
    found: dict[str, int] = {}
    for parameter in program.parameters:
        block = _block_of(parameter.name, work)
        if block is not None:
            found[block] = found.get(block, 0) + parameter.local_bytes
    return found


def _buffer_bytes(program: Program) -> int:
    return sum(p.bytes for p in program.buffers)


__all__ = ["estimate"]
