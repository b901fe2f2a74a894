"""The pipeline: from a model and a plan to a program, pass by pass.

    bind -> capture -> regions -> place -> assign -> check -> emit
                          ^_________________________|
                          a check that fails teaches the placement, or localises an attribute

`TPPLAN_DUMP=dir` writes what each pass made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tpplan.compat import named_modules
from tpplan.compiler.bind.bind import bind, once
from tpplan.compiler.bind.named_attributes import named_attributes
from tpplan.compiler.bind.packing import pack
from tpplan.compiler.bind.regions import build_regions
from tpplan.compiler.check import local_run
from tpplan.compiler.check.compare import CheckInput
from tpplan.compiler.dump import Dump
from tpplan.compiler.emit.emit import emit
from tpplan.compiler.emit.substitute import substitute
from tpplan.compiler.explain import failures
from tpplan.compiler.explain.captures import of_capture
from tpplan.compiler.explain.neighbours import Neighbours
from tpplan.compiler.explain.uncovered import uncovered_finding
from tpplan.compiler.explain.warnings import gathers_columns, warnings_for
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.layout import REPLICATED, Layout
from tpplan.compiler.ir.program import Program
from tpplan.compiler.ir.region import Instance
from tpplan.compiler.ir.steps import Stream
from tpplan.compiler.ir.trace import Assumption, Location, Operation, Path, Trace, digest_of
from tpplan.compiler.later import after_a_call, refuse_difference
from tpplan.compiler.place.assign import Assignment, assign
from tpplan.compiler.place.conflicts import (
    conflicting_modules,
    mixed_gradient_findings,
    mixed_gradients,
    shared_biases,
    shared_module_findings,
    uses_of,
    uses_of_values,
)
from tpplan.compiler.place.place import Placer, root_solution
from tpplan.compiler.place.solution import Constraints, Failure
from tpplan.compiler.refine import learn
from tpplan.compiler.rewrite.lemmas import justify
from tpplan.compiler.rules.propagate import FILLS, Propagator
from tpplan.compiler.trace.branches import record_model
from tpplan.compiler.trace.capture import BodyError, Capture, without_collection
from tpplan.compiler.trace.effects import branch_findings, effect_findings, hidden_findings, left_findings
from tpplan.compiler.trace.preconditions import unfit_findings
from tpplan.compiler.work import Work
from tpplan.cost.communication import NVLINK
from tpplan.plan import CompileError, Diagnostic, InternalError, Plan, Severity, Style

_ROUNDS = 64


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a compilation yields.

    Attributes:
        program: the program.
        streams: for each rank, the steps that its bodies take in the example call.
        assumptions: the sides on which branches on data were taken.
        traced: a digest of the operations of the example call.
        later: the steps of calls after the first, if what that one left behind lets them take others.
    """

    program: Program
    streams: Mapping[int, Stream]
    assumptions: tuple[Assumption, ...]
    later: Mapping[int, Stream] = field(default_factory=dict[int, Stream])
    traced: str = ""

    @property
    def digest(self) -> str:
        """Of the program, and of the run that it was made from: equal on ranks that will do the same."""
        return f"{self.program.digest} {self.traced}"


def compile_program(
    model: nn.Module,
    plan: Plan,
    size: int,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    training: bool | None = None,
    partly: bool = False,
    parts: Mapping[Path, Layout] | None = None,
    device: torch.device | None = None,
) -> Program:
    """The program alone of `compile_call`."""
    return compile_call(model, plan, size, arguments, keywords, training, partly, parts, None, device).program


def compile_call(
    model: nn.Module,
    plan: Plan,
    size: int,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    training: bool | None = None,
    partly: bool = False,
    parts: Mapping[Path, Layout] | None = None,
    taken: frozenset[Location] | None = None,
    device: torch.device | None = None,
) -> Compiled:
    """Compile `plan` for `model` on an axis of `size` ranks.

    Args:
        model: the stock model, materialised or on `meta`; not changed.
        plan: the plan.
        size: number of ranks.
        arguments, keywords: an example call; only the tensors' geometry counts.
        training: the mode to capture in; None captures in training mode, whose random numbers need care, or in
            evaluation mode if training can't be captured.
        partly: whether the call may do without modules that the plan shards, as another call was proved with them.
        parts: how tensors of the call lie of which a rank gets its part only; the example has them whole.
        taken: the branches on data to take on their true side; None for those without which modules stay uncalled.
        device: where the model will run; None for where its parameters lie.

    Raises:
        CompileError: with every finding, if plan and model don't fit together.
    """
    unfit = unfit_findings(model)
    if unfit:
        raise CompileError(unfit)
    with without_collection():
        compiled, trace, state = _compile(
            model, plan, size, arguments, keywords, training, partly, parts or {}, taken, device
        )
        if not state.later:
            return compiled
        with after_a_call(model, trace, arguments, keywords) as later:
            other, *_ = _compile(
                later, plan, size, arguments, keywords, trace.training, True, parts or {}, trace.taken, trace.device
            )
        refuse_difference(compiled.program, other.program)
        return replace(compiled, later=other.streams)


def _compile(
    model: nn.Module,
    plan: Plan,
    size: int,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    training: bool | None,
    partly: bool,
    parts: Mapping[Path, Layout],
    taken: frozenset[Location] | None,
    device: torch.device | None,
) -> tuple[Compiled, Trace, Capture]:
    dump = Dump.from_environment()
    binding, diagnostics = bind(model, plan, size)
    dump.binding(binding)
    if any(d.severity is Severity.ERROR for d in diagnostics):
        raise CompileError(diagnostics)
    modes = (True, False) if training is None else (training,)
    trace, state = _capture(model, arguments, keywords, diagnostics, modes, taken, device)
    dump.trace(trace)
    flow = DataFlow(trace)
    unpacked = pack(model, flow, binding, size, partly)
    binding = unpacked.binding
    binding, inexact = justify(model, flow, binding)
    diagnostics += [*unpacked.findings, *inexact]
    if any(d.severity is Severity.ERROR for d in diagnostics):
        raise CompileError(diagnostics)
    constraints = Constraints(sequence=any(b.style is Style.SEQUENCE for b in binding.modules.values()))
    propagator = Propagator(size, _batch(trace))
    work = Work(
        model, plan, size, arguments, keywords, binding, trace, flow, state.results,
        constraints, propagator, Placer(propagator, NVLINK, constraints), heads=unpacked.heads,
        features=_filled(trace, unpacked.features), findings=list(diagnostics), parts=parts,
    )  # fmt: skip
    work.attributes, unknown = named_attributes(model, binding, size)
    work.findings += unknown
    instance, assignment = _search(work, dump)
    work.findings += [_with_reason(d, work.learned) for d in _warnings(work, instance, assignment)]
    work.findings += [] if work.findings else uncovered_finding(model, binding)
    if any(d.severity is Severity.ERROR for d in work.findings):
        raise CompileError(work.findings)
    modules = dict(named_modules(model))
    kernels = () if trace.takes_gradients else substitute(modules, plan, flow, binding, assignment, instance)
    work.findings += [*unpacked.notes, *_recorded_findings(work)]
    program = emit(
        model, plan, size, flow, binding, assignment, work.attributes, tuple(work.findings), kernels, work.recorded
    )
    dump.program(program)
    return Compiled(program, work.streams, trace.assumptions, traced=digest_of(trace.root)), trace, state


def _warnings(work: Work, instance: Instance, assignment: Assignment) -> list[Diagnostic]:
    def around() -> Neighbours:
        return Neighbours(work.model, work.flow, instance, work.propagator)

    return warnings_for(work.flow, work.binding, assignment, work.size, around)


def _recorded_findings(work: Work) -> list[Diagnostic]:
    found: list[Diagnostic] = []
    for name in sorted(work.recorded):
        bound = work.binding.first_inside(name)
        found.append(
            Diagnostic(
                code="TP124",
                message=f"`{name}` runs operation by operation from its record, as its own code can't work on shards",
                span=bound.rule.style_span if bound is not None else None,
                help="nothing is wrong; it takes a little longer than the module's own code would",
                subject=name,
            )
        )
    return once(found)


def _with_reason(warning: Diagnostic, learned: Sequence[Diagnostic]) -> Diagnostic:
    """A warning of a gather, with what the body does that keeps it from working on a shard."""
    for finding in learned if warning.code == "TP104" else ():
        if finding.span == warning.span:
            return replace(warning, notes=(finding.message, *finding.notes, *warning.notes))
    return warning


def _batch(trace: Trace) -> int:
    """The example's batch size: the first size of its first tensor."""
    shape = trace.values[trace.inputs[0]].shape if trace.inputs else ()
    return shape[0] if shape else 1


def _filled(trace: Trace, features: frozenset[int]) -> frozenset[int]:
    """Of these numbers of features those that tensors made anew, such as the first state of a scan, have as a size."""
    made = (
        size
        for frame in trace.root.walk()
        for node in frame.body
        if isinstance(node, Operation) and node.name in FILLS
        for output in node.outputs
        if output is not None
        for size in trace.values[output].shape
    )
    return features.intersection(made)


def _capture(
    model: nn.Module,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    diagnostics: list[Diagnostic],
    modes: tuple[bool, ...],
    taken: frozenset[Location] | None,
    device: torch.device | None,
) -> tuple[Trace, Capture]:
    """Record the model in the first of `modes` (training or not) in which it runs."""
    errors: list[BaseException] = []
    for training in modes:
        try:
            return record_model(model, arguments, keywords, training, taken, device)
        except BodyError as error:
            errors.append(error)
        except Exception as error:  # whatever the model raises is the finding
            errors.append(error)
    raise CompileError([*diagnostics, of_capture(errors[-1])])


def _search(work: Work, dump: Dump) -> tuple[Instance, Assignment]:
    """Place and check until a program passes, or nothing more can be learned."""
    for attempt in range(_ROUNDS):
        placed = _place(work)
        if placed is None:
            raise CompileError(work.findings)
        instance, assignment = placed
        dump.assignment(assignment, attempt)
        # Something that counts heads or features too may be in the way: a bias made elsewhere, a head that all share.
        if gathers_columns(work.flow, work.binding, assignment) and _try_more(work):
            continue
        if _reconcile(work, instance, assignment):
            continue
        given = CheckInput(
            work.model, work.trace, assignment, instance, work.size, work.arguments, work.keywords, work.results,
            work.parts,
        )  # fmt: skip
        work.streams = {}
        mismatch = local_run.check(given, work.attributes, work.excused, work.recorded, work.streams)
        if mismatch is None:
            work.findings += effect_findings(work.trace.kept, work.trace.outside, assignment.layouts)
            work.findings += hidden_findings(work.trace.hidden, assignment.layouts)
            work.findings += left_findings(work.trace, assignment.layouts)
            return instance, assignment
        learn(work, given, mismatch)
    raise InternalError(f"no program was settled on in {_ROUNDS} rounds")


def _reconcile(work: Work, instance: Instance, assignment: Assignment) -> bool:
    """Constrain what one module or one parameter can't serve both ways; True if the placement must be redone."""
    clashes = conflicting_modules(assignment)
    if clashes - work.fixed:
        work.fixed |= clashes
        return True
    work.findings += shared_module_findings(clashes, assignment, work.binding)
    biases = shared_biases(assignment, work.trace)
    if biases:
        work.constraints.reduced_biases |= uses_of(biases, instance, work.trace)
        return True
    mixed = mixed_gradients(assignment)
    uses = uses_of(mixed, instance, work.trace)
    if uses - work.constraints.whole_gradients:
        work.constraints.whole_gradients |= uses
        return True
    work.findings += mixed_gradient_findings(mixed, assignment)
    tested = {value for value in work.trace.tested if assignment.layouts.get(value, REPLICATED) != REPLICATED}
    places = uses_of_values(tested, instance) - work.constraints.whole
    if places:
        work.constraints.whole |= places
        return True
    work.findings += branch_findings({value: work.trace.tested[value] for value in tested}, assignment.layouts)
    return False


def _regions(work: Work) -> Instance:
    """The regions; of what a round learns, they depend on the fixed modules alone."""
    if work.regions is None or work.regions[0] != work.fixed:
        work.regions = (work.fixed, build_regions(work.trace, work.binding, work.fixed, work.table, work.given))
    return work.regions[1]


def _place(work: Work) -> tuple[Instance, Assignment] | None:
    """Solve the placement; on failure, report it, set the operation aside and look for the next mistake."""
    failed = False
    for _ in range(_ROUNDS):
        instance = _regions(work)
        inputs = tuple(work.given.get(instance.values[i], REPLICATED) for i in instance.region.inputs)
        solutions = work.placer.solve(instance.region, inputs)
        if not isinstance(solutions, Failure):
            if failed:
                return None
            return instance, assign(instance, root_solution(solutions), work.trace.parameters, inputs)
        if work.constraints.sequence and not work.constraints.slice_constants:
            work.constraints.slice_constants = True
            continue
        if _try_more(work):
            continue
        failed = True
        if work.learned_from is not None:
            work.findings.append(work.learned_from)
            return None
        work.findings = failures.with_one_cause(
            [*work.findings, failures.of_placement(instance, solutions, work.trace, work.binding, work.size)]
        )
        region = failures.instance_at(instance, solutions.path).region
        if solutions.node is None or (region.example, solutions.node) in work.constraints.forgiven:
            return None
        work.constraints.forgiven.add((region.example, solutions.node))
    return None


def _try_more(work: Work) -> bool:
    """From now on, let new tensors be split by features; then, let values be split by heads at every boundary."""
    if work.features and not work.constraints.features:
        work.constraints.features = work.propagator.features = work.features
        return True
    if work.heads and not work.constraints.heads:
        work.constraints.heads = work.propagator.heads = work.heads
        return True
    return False
