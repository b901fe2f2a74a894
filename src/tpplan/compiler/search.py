"""The search for a program: place, check, and place again with what the check taught.

in:  a problem
out: `Solved`: the first placement that passes the check, with the steps that its bodies take

    place -> reconcile -> check -> solved
      ^__________|__________|
           a `Learned` with one constraint more
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tpplan.compiler.bind.regions import RegionTable, build_regions
from tpplan.compiler.check import local_run
from tpplan.compiler.check.same_steps import Mismatch
from tpplan.compiler.dump import Dump
from tpplan.compiler.explain import failures
from tpplan.compiler.explain.bounded import bounded
from tpplan.compiler.explain.computed_steps import of_computed
from tpplan.compiler.explain.left_behind import (
    branch_findings,
    effect_findings,
    hidden_findings,
    left_findings,
    seeded_findings,
)
from tpplan.compiler.explain.warnings import gathered_columns
from tpplan.compiler.ir.layout import REPLICATED
from tpplan.compiler.ir.program import splits_sequence
from tpplan.compiler.ir.region import Instance
from tpplan.compiler.ir.steps import Stream
from tpplan.compiler.ladder import Stuck, UnplacedError, widened
from tpplan.compiler.place.assign import assign
from tpplan.compiler.place.conflicts import (
    conflicting_modules,
    differing_moves,
    mixed_gradient_findings,
    mixed_gradients,
    shared_biases,
    shared_module_findings,
    uses_of,
    uses_of_values,
)
from tpplan.compiler.place.place import Placer, root_solution
from tpplan.compiler.place.solution import Failure
from tpplan.compiler.place.tails import tails
from tpplan.compiler.problem import Learned, Placed, Problem
from tpplan.compiler.refine import refine, unrecorded
from tpplan.compiler.rules.propagate import Propagator
from tpplan.cost.communication import NVLINK, Topology
from tpplan.plan import CompileError, Diagnostic, InternalError
from tpplan.progress import doing

_ROUNDS = 64


@dataclass(frozen=True, slots=True)
class Solved:
    """A placement that passed the check, for each rank the steps of its bodies, and what its choices cost by."""

    placed: Placed
    streams: Mapping[int, Stream]
    topology: Topology


def search(problem: Problem, learned: Learned, dump: Dump) -> Solved:
    """Place and check until a program passes, or nothing more can be learned.

    Raises:
        CompileError: no program passes; with every finding.
    """
    solver, guess = _Solver(problem), problem.request.attributes
    for attempt in range(_ROUNDS):
        placed = solver.place(learned)
        dump.assignment(placed.assignment, attempt)
        # Something that counts heads or features too may be in the way: a bias made elsewhere, a head that all share.
        unasked = bool(gathered_columns(problem.flow, problem.binding, placed.assignment, problem.heads))
        again = _wider_for_columns(problem, placed) if unasked else None
        again = again or _constrained(problem, placed)
        if again is not None:
            learned = again
            continue
        placed = replace(placed, learned=_recorded(problem, placed))
        learned = placed.learned.reporting(*_conflict_findings(problem, placed))
        subject = placed.to_check(problem)
        checked = local_run.check(subject, learned.attributes, learned.excused, learned.recorded)
        if isinstance(checked, Mismatch) and guess:
            guessed = replace(learned, attributes={**guess, **learned.attributes}).recording(learned.recorded)
            guess = {}
            again = local_run.check(subject, guessed.attributes, learned.excused, learned.recorded)
            if not isinstance(again, Mismatch):
                learned, checked = guessed, again
        if isinstance(checked, Mismatch):
            learned = refine(problem, subject, learned, checked)
            continue
        effects = _effect_findings(problem, placed)
        return Solved(replace(placed, learned=learned.reporting(*effects)), checked.streams, NVLINK)
    raise InternalError(f"no program was settled on in {_ROUNDS} rounds")


class _Solver:
    """Places one problem; remembers regions and their solutions from round to round."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._placer = Placer(Propagator(problem.request.size, problem.trace.batch), NVLINK)
        self._comparing = Propagator(problem.request.size, problem.trace.batch, extremes=True)
        self._table = RegionTable()
        self._instances: dict[frozenset[str], Instance] = {}

    @doing("placing collectives")
    def place(self, learned: Learned) -> Placed:
        """The cheapest placement; on failure, set the operation aside and look for the next mistake, to report all."""
        problem, trace = self._problem, self._problem.trace
        for _ in range(_ROUNDS):
            instance = self._instance(learned.fixed)
            inputs = tuple(problem.parts.get(instance.values[i], REPLICATED) for i in instance.region.inputs)
            constraints = replace(learned.constraints, tails=tails(instance, trace))
            solutions = self._placer.solve(instance.region, inputs, constraints)
            if not isinstance(solutions, Failure):
                if learned.constraints.forgiven:
                    break
                best, free = root_solution(solutions), constraints.freedoms
                assignment = assign(instance, best, trace.parameters, inputs, free.heads, free.features)
                for value, names in trace.parameters.items():  # a plan also splits what nobody reads
                    assignment.layouts.setdefault(value, problem.binding.parameters[names[0]])
                unrecorded = {i.frame.module for i in _instances(instance) if i.region.example in constraints.unsliced}
                assignment.exchange_in_backwards(trace, self._comparing, unrecorded)
                return Placed(instance, assignment, learned, dict(self._placer.cut))
            learned = self._after(learned, instance, solutions)
        raise UnplacedError(learned.findings, learned.unplaced)

    def _instance(self, fixed: frozenset[str]) -> Instance:
        """The regions; of what a round teaches, they depend on the fixed modules alone."""
        if fixed not in self._instances:
            problem = self._problem
            self._instances = {fixed: build_regions(problem.trace, problem.binding, fixed, self._table, problem.parts)}
        return self._instances[fixed]

    def _after(self, learned: Learned, instance: Instance, failure: Failure) -> Learned:
        """What to try after a failure; raises if there is nothing."""
        problem, constraints = self._problem, learned.constraints
        wider = widened(Stuck(problem, learned, _on_the_way(instance, failure.path)))
        if wider is not None:
            return wider
        if learned.reasons:
            raise CompileError([*learned.findings, learned.reasons[-1]])
        finding = failures.of_placement(instance, failure, problem.trace, problem.binding, problem.request.size)
        here = failures.instance_at(instance, failure.path)
        finding = of_computed(finding, here.frame.module, problem.request.model, problem.binding)
        findings = failures.with_one_cause([*learned.findings, finding])
        findings += [held for held in bounded(instance, self._placer.cut) if held not in findings]
        unplaced = learned.unplaced | {here.frame.module}
        learned = replace(learned, findings=tuple(findings), unplaced=unplaced)
        place = (here.region.example, failure.node)
        if place[1] is None or place in constraints.forgiven:
            raise UnplacedError(learned.findings, learned.unplaced)
        return learned.constrained(forgiven=constraints.forgiven | {place})


def _wider_for_columns(problem: Problem, placed: Placed) -> Learned | None:
    gathered = gathered_columns(problem.flow, problem.binding, placed.assignment)
    return widened(Stuck(problem, placed.learned, _reached(placed.instance, gathered), gathers=True))


def _reached(instance: Instance, modules: Collection[str]) -> Iterator[Instance]:
    """The bodies, but the root's, that call these modules, and all inside of them."""
    called = [child for child in instance.children if child.frame.module in modules]
    if called and instance.frame.module:
        yield from _instances(instance)
        return
    for child in instance.children:
        yield from _instances(child) if child in called else _reached(child, modules)


def _on_the_way(instance: Instance, path: Sequence[int]) -> Iterator[Instance]:
    """The calls that lead to a failure, from the outermost inwards."""
    for count in range(len(path) + 1):
        yield failures.instance_at(instance, (*path[:count],))


def _instances(instance: Instance) -> Iterator[Instance]:
    yield instance
    for child in instance.children:
        yield from _instances(child)


def _recorded(problem: Problem, placed: Placed) -> Learned:
    """Bodies in which whole values are sliced, or others moved, run from their records: their own code wouldn't."""
    return placed.learned.recording(placed.assignment.replayed)


def _constrained(problem: Problem, placed: Placed) -> Learned | None:
    """What one module or one parameter, which can't serve two ways, demands of the next placement."""
    learned, assignment, instance, trace = placed.learned, placed.assignment, placed.instance, problem.trace
    constraints = learned.constraints
    differing = differing_moves(assignment)
    if differing:
        return unrecorded(instance, learned, differing)
    clashes = conflicting_modules(assignment, trace)
    if clashes - learned.fixed:
        return replace(learned, fixed=learned.fixed | clashes)
    if clashes and "" not in learned.fixed:  # what they are called with may be resharded too early
        return replace(learned, fixed=(learned.fixed - clashes) | frozenset(_around(instance, clashes)))
    biases = shared_biases(assignment, trace)
    if biases:
        uses = uses_of(biases, instance, trace)
        return learned.constrained(reduced_biases=constraints.reduced_biases | uses)
    uses = uses_of(mixed_gradients(assignment), instance, trace)
    if uses - constraints.whole_gradients:
        return learned.constrained(whole_gradients=constraints.whole_gradients | uses)
    places = uses_of_values(_tested(problem, placed), instance)
    if places - constraints.whole:
        return learned.constrained(whole=constraints.whole | places)
    return None


def _around(instance: Instance, modules: Collection[str]) -> Iterator[str]:
    """The modules that call these, directly or not."""
    for child in instance.children:
        found = [*_around(child, modules)]
        yield from found
        if found or child.frame.module in modules:
            yield instance.frame.module


def _tested(problem: Problem, placed: Placed) -> set[int]:
    """Values that the model branches on, and that aren't whole on every rank."""
    layouts = placed.assignment.layouts
    return {value for value in problem.trace.numbers.tested if layouts.get(value, REPLICATED) != REPLICATED}


def _conflict_findings(problem: Problem, placed: Placed) -> list[Diagnostic]:
    """Report what no constraint could reconcile."""
    assignment = placed.assignment
    tested = {value: problem.trace.numbers.tested[value] for value in _tested(problem, placed)}
    return [
        *shared_module_findings(conflicting_modules(assignment, problem.trace), assignment, problem.binding),
        *mixed_gradient_findings(mixed_gradients(assignment), assignment),
        *branch_findings(tested, assignment.layouts),
    ]


def _effect_findings(problem: Problem, placed: Placed) -> list[Diagnostic]:
    """Report what a call would leave behind that isn't what the unsharded model leaves."""
    trace, layouts = problem.trace, placed.assignment.layouts
    return [
        *effect_findings(trace, layouts),
        *hidden_findings(trace.effects.hidden, layouts),
        *seeded_findings(trace.draws.seeded, layouts),
        *left_findings(trace, layouts, _split_lengths(problem, placed)),
    ]


def _split_lengths(problem: Problem, placed: Placed) -> set[int]:
    """The lengths of the sequences that reshards split or join."""
    moved = [move for frame in placed.assignment.frames for move in (*frame.entries, *frame.exits)]
    held = [(layout, problem.trace.values[move.value].shape) for move in moved for layout in (move.source, move.target)]
    return {shape[layout.dim or 0] // layout.interleave for layout, shape in held if splits_sequence(layout, shape)}


__all__ = ["Solved", "search"]
