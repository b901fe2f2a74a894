"""The pipeline: from a request to a program, pass by pass.

    bind -> capture -> pack -> justify -> search -> substitute -> emit

`search` places and checks until a program passes. `TPPLAN_DUMP=dir` writes what each pass made.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType

import torch

from tpplan.ambience import ambience
from tpplan.compat.modes import without_inference_kernels
from tpplan.compat.modules import named_modules
from tpplan.compiler.bind.arriving_parts import arriving_parts
from tpplan.compiler.bind.bind import Binding, bind_parameters, bind_rules, once, unlike_layers
from tpplan.compiler.bind.expert_groups import pack_in_groups
from tpplan.compiler.bind.lookers import lookers, not_looked_up
from tpplan.compiler.bind.named_attributes import named_attributes
from tpplan.compiler.bind.whole_experts import share_out
from tpplan.compiler.bind.wrappers import Members, bases_among, unwrap
from tpplan.compiler.check.attribute_reads import attributes_read
from tpplan.compiler.check.recurrent_proofs import prove_recurrent
from tpplan.compiler.check.shared_experts import prove_experts
from tpplan.compiler.check.tried_rules import Trial, try_rules, unused_rules
from tpplan.compiler.cover import Subject
from tpplan.compiler.dump import Dump
from tpplan.compiler.emit.digest import Digest, digest_of
from tpplan.compiler.emit.program_of import emit
from tpplan.compiler.emit.substitute import substitute
from tpplan.compiler.emit.unused_kernels import unused_kernels
from tpplan.compiler.explain.bounded import bounded
from tpplan.compiler.explain.failed_captures import models_own, of_capture, of_training
from tpplan.compiler.explain.ineffective import ineffective_rules
from tpplan.compiler.explain.neighbours import Neighbours
from tpplan.compiler.explain.uncovered import uncovered_finding
from tpplan.compiler.explain.warnings import exchanges, warnings_for
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.facts import Facts
from tpplan.compiler.ir.layout import Features
from tpplan.compiler.ir.observations import Asked, Assumption, CaptureSettings, FoundCount, Sides
from tpplan.compiler.ir.program import Program
from tpplan.compiler.ir.pytree import tensors_in, tensors_of
from tpplan.compiler.ir.steps import Stream
from tpplan.compiler.ir.trace import Operation, Path, Trace
from tpplan.compiler.ladder import UnplacedError, climb
from tpplan.compiler.later import (
    EMPTY_PARTS,
    OTHER_COUNTS,
    after_a_call,
    before_any_call,
    refuse_difference,
    refuse_other_rows,
)
from tpplan.compiler.overlap import overlapped
from tpplan.compiler.place.assign import Assignment
from tpplan.compiler.place.solution import Constraints
from tpplan.compiler.problem import Learned, Placed, Problem
from tpplan.compiler.request import Request
from tpplan.compiler.rewrite.lemmas import justify
from tpplan.compiler.rules.propagate import Propagator
from tpplan.compiler.search import search
from tpplan.compiler.split_inside import split_inside
from tpplan.compiler.trace.capture import BodyError, Capture, without_collection
from tpplan.compiler.trace.passed_on import passes_on_alike
from tpplan.compiler.trace.preconditions import unfit_findings, unseen_findings
from tpplan.compiler.trace.signatures import argument_names
from tpplan.compiler.trace.surroundings import same_files
from tpplan.compiler.trace.unread import are_read_for_nobody, with_unread
from tpplan.ops.declared import check_rule, scoped_rules
from tpplan.plan import CompileError, Diagnostic, Severity, Style
from tpplan.progress import doing
from tpplan.state.reads import ANYTHING, functions_read, kinds_of, reads

_EMPTIED = (1, 0), (1, 1), (2, 1)  # each place is empty in one, after an empty one and after another


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a compilation yields.

    Attributes:
        program: the program.
        streams: for each rank, the steps that its bodies take in the example call.
        assumptions: the sides on which branches on data were taken.
        later: the steps of calls after the first, if what that one left behind lets them take others.
        traced: what ranks that do the same have alike of the run that the program was made from.
        writes: whether the call changes attributes or globals.
        keeps_writing: whether each call after it does so, too.
        asked: what the call's bodies ask for beside sizes, dtypes and numbers.
        members: what became of rules on modules that wrap layers.
        facts: what the call's bodies read of numbers; None if they were kept from them.
        wraps: whether the call is passed, or leaves, tensors of classes of their own.
        subject: what was checked, of which `cover` tells for which sizes it holds; None where that is for the example's
            alone, as numbers are read, or as calls after the first take another way.
        called: the modules that the call runs, with those of their arguments to which a gradient comes back.
        drawn, draws_unseen, tests: see `Trace`.
        fewer: the steps of calls that leave parts without rows out.
        idle: the places that each call changes, and by which it steers nothing; see `Sequel`.
        untried: the rules that couldn't be tried where this was compiled.
        results: where the call returns tensors.
        reads: the names by which bodies ask their modules for something, and those of functions that their code reads.
        settings: how the run was recorded that the program was made from.
    """

    program: Program
    streams: Mapping[int, Stream]
    assumptions: tuple[Assumption, ...]
    later: Mapping[int, Stream] = field(default_factory=dict[int, Stream])
    traced: Digest = field(default_factory=Digest)
    writes: bool = False
    keeps_writing: bool = False
    asked: Asked = field(default_factory=Asked)
    members: Members = field(default_factory=dict[str, Style])
    facts: Facts | None = None
    wraps: bool = False
    subject: Subject | None = None
    called: Mapping[str, frozenset[Path]] = field(default_factory=dict[str, frozenset[Path]])
    drawn: frozenset[str] = frozenset()
    draws_unseen: bool = False
    fewer: tuple[Mapping[int, Stream], ...] = ()
    tests: Sides = field(default_factory=Sides)
    idle: frozenset[str] = frozenset()
    untried: tuple[Trial, ...] = ()
    results: frozenset[Path] = frozenset()
    reads: frozenset[str] = frozenset((ANYTHING,))
    settings: CaptureSettings = field(default_factory=lambda: CaptureSettings(True))

    @property
    def lowered_settings(self) -> CaptureSettings:
        """How a run of the lowered model is recorded: there, functions over classes and rows are the runtime's."""
        return replace(self.settings, reducing=frozenset[str](), looking=frozenset[str]())

    @property
    def digest(self) -> Digest:
        """Of the program, and of the run that it was made from: equal on ranks that will do the same."""
        return replace(self.traced, work=f"{self.program.digest} {self.traced.work}")


@ambience()
@same_files()
def compile_call(request: Request) -> Compiled:
    """Compile a plan for a model.

    Raises:
        CompileError: with every finding, if plan and model don't fit together.
    """
    unfit = unfit_findings(request.model)
    if unfit:
        raise CompileError(unfit)
    operators = {held.name: held for held in request.plan.operators}
    for name, held in operators.items():
        check_rule(name, held.rule, held.span)
    names = argument_names(type(request.model).forward)
    passed = [*tensors_of(request.arguments, request.keywords, names)]
    with reads() as read, scoped_rules({name: held.rule for name, held in operators.items()}):
        try:
            compiled = _compiled(request)
        except CompileError as error:
            named = functions_read((), kinds_of([*request.model.modules()]))
            unseen = unseen_findings(request.model, read | named, passed)
            if unseen:
                raise CompileError([*unseen, *error.diagnostics]) from error
            raise
    streams = (compiled.streams, compiled.later, *compiled.fewer)
    code = frozenset[CodeType]().union(*(stream.code() for held in streams for stream in held.values()))
    read |= functions_read(code, kinds_of([*request.model.modules()]))
    unseen = unseen_findings(request.model, read, passed)
    if unseen:
        raise CompileError(unseen)
    return replace(compiled, reads=frozenset(read))


def _compiled(request: Request) -> Compiled:
    with without_collection(), without_inference_kernels():
        compiled = _compile_with_later(request)
        if compiled.later:
            return compiled
        with before_any_call(request.model) as filled:  # a later call may need what isn't there yet
            if not filled:
                return compiled
            try:
                first = _compile_with_later(replace(request, captures=request.captures.where("before")))
                refuse_difference(compiled.program, first.program)
            except CompileError:  # it couldn't have been empty
                return compiled
        return replace(compiled, later=first.streams, subject=None, results=compiled.results | first.results)


def _compile_with_later(request: Request) -> Compiled:
    """Compile, and prove that the program is right for calls after the first as well."""
    request, (compiled, trace, state) = climb(_compile, request)
    settings = trace.settings
    found = replace(request, training=settings.training, taken=settings.taken, device=settings.device, partly=True)
    found = replace(found, members=compiled.members, attributes=compiled.program.local_attributes)
    for emptied in _EMPTIED if trace.numbers.leaving_out else ():
        other, fewer, _ = _compile(replace(found, emptied=emptied))
        refuse_other_rows(compiled.program, other.program, not _steering(fewer) <= _steering(trace), EMPTY_PARTS)
        left_out = {*compiled.program.picked, *compiled.called.keys() - other.called.keys()}
        picked = sorted(name for name in left_out if name.rpartition(".")[0] not in left_out)
        program = replace(compiled.program, picked=tuple(picked))
        compiled = replace(compiled, program=program, fewer=(*compiled.fewer, other.streams))
    if trace.numbers.chosen:
        _refuse_steering_counts(found, compiled, trace)
    if not state.sequel.differs:
        return compiled
    with after_a_call(request.model, trace, request.arguments, request.keywords) as later:
        again = replace(found, model=later)
        again = replace(again, captures=request.captures.where(("after", again.capture_settings(settings.training))))
        other, *_ = _compile(again)
    refuse_difference(compiled.program, other.program)
    return replace(compiled, later=other.streams, subject=None, results=compiled.results | other.results)


def _refuse_steering_counts(request: Request, compiled: Compiled, trace: Trace) -> None:
    """Refuse bodies that pass on something else where few entries are found, none, or all."""
    program, subject = compiled.program, compiled.subject
    replaced = {module.name for module in program.modules if module.experts is not None}
    few = 3 if request.size % 3 else 5  # no number of ranks divides it
    for found in (FoundCount(few), FoundCount(sys.maxsize, 0), FoundCount(sys.maxsize, 1), FoundCount(None)):
        tried, run, other = replace(request, found=found), trace, None
        try:
            run, _ = _capture(tried, [])
            layouts = None if subject is None else subject.given.assignment.layouts
            alike = layouts is not None and passes_on_alike(trace, run, layouts, replaced)
            if alike and _steering(run) <= _steering(trace):
                continue
            other, run, _ = _compile(tried)
        except CompileError as error:
            if models_own(error) is not None:
                continue  # so many can't be found
        steered = other is None or not _steering(run) <= _steering(trace)
        refuse_other_rows(program, None if other is None else other.program, steered, OTHER_COUNTS)


def _compile(request: Request) -> tuple[Compiled, Trace, Capture]:
    dump = Dump.from_environment()
    binding, findings = bind_rules(request.model, request.plan)
    dump.binding(binding)
    ruled = binding.modules
    if any(d.severity is Severity.ERROR for d in findings):
        findings = once([*findings, *unlike_layers(request.model, binding)])
    _refuse(findings)
    trace, state = _capture(request, findings)
    trace = with_unread(trace) if request.freedoms.unread else trace
    dump.trace(trace)
    flow = DataFlow(trace)
    wrappers = tuple(binding.wrappers)
    unwrapped, bases = unwrap(request.model, flow, binding, request.members), request.freedoms.bases
    if bases and request.members is None:
        members = bases_among(request.model, wrappers, unwrapped[2])
        unwrapped = unwrap(request.model, flow, binding, members)
    binding, unwrapped, members = unwrapped
    if request.plan.is_part and not request.partly:
        request = replace(request, parts=arriving_parts(trace, binding, request.size) | dict(request.parts))
    findings = [*findings, *unwrapped]
    unpacked = pack_in_groups(request.model, flow, binding, request.size, request.partly)
    unseen = {finding.subject or "" for finding in unpacked.findings}
    if unseen and not request.freedoms.unread and are_read_for_nobody(trace, unseen):
        raise UnplacedError([*findings, *unpacked.findings], unread=True)
    binding, inexact = justify(request.model, flow, unpacked.binding)
    looking = lookers(trace, binding) - request.looking
    if looking:
        return _compile(replace(request, looking=request.looking | looking))
    inexact = [*inexact, *not_looked_up(trace, binding, request.partly)]
    _refuse([*findings, *unpacked.findings, *inexact])
    inside, unsplit = split_inside(request, trace, binding)
    known = {name: held for name, held in inside.items() if held is not None}
    binding, unshared = share_out(request.model, binding, request.size, inside)
    findings = [*findings, *unpacked.findings, *inexact, *(unsplit or unshared)]
    _refuse(findings)
    binding, counts, unproved = prove_experts(request.model, flow, binding, request.size, known)
    findings = [*findings, *unproved, *prove_recurrent(request.model, flow, binding, request.size)]
    _refuse(findings)
    asked = binding
    if request.size == 1:
        binding, _ = bind_parameters(request.model, {})  # a single rank holds everything whole
    attributes, unknown = named_attributes(request.model, binding, request.size)
    attributes = attributes if request.size == 1 else attributes | counts
    problem = Problem(
        request, binding, flow, state.results, unpacked.heads, _filled(trace, unpacked.features),
        functools.cache(functools.partial(attributes_read, request.model, trace, request.arguments, request.keywords)),
    )  # fmt: skip
    constraints = Constraints(
        freedoms=request.freedoms, sequence=any(b.style is Style.SEQUENCE for b in binding.modules.values())
    )
    try:
        solved = search(problem, Learned(constraints, attributes, findings=(*findings, *unknown)), dump)
    except CompileError as error:
        try_rules(trace, None, _device_of(request), request.size)  # a rule that isn't true says more
        if isinstance(error, UnplacedError):
            error.bases = len(bases_among(request.model, wrappers, members)) < len(members)
        raise
    if request.size > 1 and not request.partly:
        _refuse(ineffective_rules(request.model, ruled, asked, trace, solved.placed.assignment, unpacked.notes))
    program = _program(problem, solved.placed, unpacked.notes, asked)
    untried: dict[str, Trial | None] = {}
    if request.size > 1:
        untried = try_rules(trace, solved.placed.assignment.layouts, _device_of(request), request.size)
        program = replace(program, assumed=tuple(untried))
    freedoms = solved.placed.learned.constraints.freedoms.taken()
    program = replace(program, freedoms=freedoms, topology=solved.topology)
    dump.program(program)
    compiled = Compiled(
        program, solved.streams, trace.branches.assumptions, traced=digest_of(trace, program),
        writes=bool(trace.effects.written), keeps_writing=state.sequel.writes, idle=state.sequel.idle,
        asked=trace.asked, members=members, facts=trace.numbers.facts, wraps=trace.effects.wraps,
        settings=trace.settings, subject=_subject(problem, solved.placed, program), called=_called(trace),
        drawn=trace.draws.told, draws_unseen=trace.draws.unseen, tests=trace.branches.tests,
        untried=tuple(trial for trial in untried.values() if trial is not None),
        results=frozenset(path for path, _ in tensors_in(state.results["", 0])),
    )  # fmt: skip
    return compiled, trace, state


def _steering(trace: Trace) -> frozenset[object]:
    """What a run asks, reads, draws and writes, each of which may steer it."""
    numbers, asked = trace.numbers, trace.asked
    told = (*numbers.tested.values(), *((call, repr(told)) for call, told in numbers.reads.items()))
    settings = (*asked.memory, *asked.flags, *asked.settings)
    return frozenset((*told, *settings, *trace.branches.tests.exact, *trace.draws.told, *trace.effects.written))


def _device_of(request: Request) -> torch.device:
    """Where the model runs; a CPU for one on `meta`."""
    held = request.device or next((p.device for p in request.model.parameters()), torch.device("cpu"))
    return torch.device("cpu") if held.type == "meta" else held


def _subject(problem: Problem, placed: Placed, program: Program) -> Subject | None:
    if problem.trace.numbers.facts is not None or program.arriving:
        return None
    learned = placed.learned
    return Subject(placed.to_check(problem), learned.attributes, learned.recorded, program.sequence_dims)


def _called(trace: Trace) -> dict[str, frozenset[Path]]:
    found: dict[str, frozenset[Path]] = defaultdict(frozenset)
    for frame in trace.recorded.walk():
        found[frame.module] |= {crossing.path for crossing in frame.entries if trace.sends_back(crossing.target)}
    return found


def _program(problem: Problem, placed: Placed, notes: Sequence[Diagnostic], asked: Binding) -> Program:
    """The program of a placement that passed the check; raises for findings that are errors.

    Args:
        problem, placed: what was solved.
        notes: further findings.
        asked: what the plan asks for, on however many ranks.
    """
    request, binding, flow, learned = problem.request, problem.binding, problem.flow, placed.learned
    findings = [*learned.findings, *(_with_reason(d, learned.reasons) for d in _warnings(problem, placed))]
    findings += [] if findings else uncovered_finding(request.model, asked)
    _refuse(findings)
    modules = dict(named_modules(request.model))
    kernels = (
        ()
        if flow.trace.gradients.taken_inside
        else substitute(
            modules, request.plan, flow, binding, placed.assignment, placed.instance, frozenset(learned.recorded)
        )
    )
    if not (request.partly or request.plan.is_part):
        findings += [*unused_kernels(request.plan, kernels, request.device), *unused_rules(request.plan, flow.trace)]
    findings += bounded(placed.instance, placed.cut)
    findings += [*notes, *_recorded_findings(binding, learned.recorded, placed.assignment)]
    program = emit(
        request.model, request.plan, request.size, flow, binding, placed.assignment, learned.attributes,
        tuple(findings), kernels, learned.recorded,
    )  # fmt: skip
    program, vain = overlapped(program, request.plan, flow, binding)
    return program if request.partly else replace(program, diagnostics=(*program.diagnostics, *vain))


def _refuse(findings: Sequence[Diagnostic]) -> None:
    if any(d.severity is Severity.ERROR for d in findings):
        raise CompileError(findings)


def _warnings(problem: Problem, placed: Placed) -> list[Diagnostic]:
    request, free = problem.request, placed.learned.constraints.freedoms

    def around() -> Neighbours:
        propagator = Propagator(request.size, problem.trace.batch, free.heads, free.features)
        return Neighbours(request.model, problem.flow, placed.instance, propagator)

    found = warnings_for(problem.flow, problem.binding, placed.assignment, request.size, around)
    return [*found, *exchanges(problem.trace, problem.binding, placed.assignment, request.size)]


def _recorded_findings(binding: Binding, recorded: frozenset[str], assignment: Assignment) -> list[Diagnostic]:
    findings: list[Diagnostic] = []
    for name in sorted(recorded):
        bound = binding.first_inside(name)
        slicing = [f" at {node.location.short}" if node.location else "" for node in assignment.sliced.get(name, ())]
        why = "as its own code can't work on shards"
        if slicing:
            why = f"so that values that are whole can be sliced beside split ones{', and'.join(dict.fromkeys(slicing))}"
        elif name in assignment.moved:
            why = "so that values can be exchanged between its operations"
        findings.append(
            Diagnostic(
                code="TP124",
                message=f"`{name}` runs operation by operation from its record, {why}",
                span=bound.rule.style_span if bound is not None else None,
                help="nothing is wrong; it takes a little longer than the module's own code would",
                subject=name,
            )
        )
    return once(findings)


def _with_reason(warning: Diagnostic, reasons: Sequence[Diagnostic]) -> Diagnostic:
    """A warning of a gather, with what the body does that keeps it from working on a shard."""
    for reason in reasons if warning.code == "TP104" else ():
        if reason.span == warning.span:
            return replace(warning, notes=(reason.message, *reason.notes, *warning.notes))
    return warning


def _filled(trace: Trace, features: Features) -> Features:
    """Of these features those whose number tensors made anew, such as the first state of a scan, have as a size."""
    made = {
        size
        for frame in trace.root.walk()
        for node in frame.body
        if isinstance(node, Operation) and node.is_a("fill", "new", "expand")
        for output in node.outputs
        if output is not None
        for size in trace.values[output].shape
    }
    return frozenset(packs for packs in features if sum(pack.size for pack in packs) in made)


@doing("running the model on shapes")
def _capture(request: Request, findings: list[Diagnostic]) -> tuple[Trace, Capture]:
    """Record the model in the mode of the request; without one, in training, or in evaluation if that fails.

    A finding is added if it fails for a model that is in training.
    """
    errors: list[BaseException] = []
    for training in (True, False) if request.training is None else (request.training,):
        try:
            settings = request.capture_settings(training)
            found = request.captures.record(request.model, request.arguments, request.keywords, settings)
            if errors and request.model.training:
                findings.append(of_training(errors[0]))
            return found
        except BodyError as error:
            errors.append(error)
        except Exception as error:  # whatever the model raises is the finding
            errors.append(error)
    raise CompileError([*findings, of_capture(errors[-1])]) from errors[-1]


__all__ = ["Compiled", "compile_call"]
