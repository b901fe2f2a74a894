"""Inside: the proof that stacked experts can be split inside, where several ranks share each of them.

in:  a request, its trace, and a binding with rules for tensors inside of stacks
out: `SplitInside` for each stack; findings where its experts can't be split so

    4 experts on 8 ranks, `gate_up: colwise`, `down: rowwise`   ->   each on 2 ranks, which have half of its features

The module is compiled as a model of its own for the ranks of one group, with the rules inside alone. All that may be
exchanged is what the ranks of the axis exchange for whole experts: gradients of the arguments are summed, and the
result. So the bodies of a group's ranks make parts of what the module makes of all experts. `check/experts` shows of
each such body that it is a sum over pairs of a token and an expert, of which a group may take those of its own experts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from tpplan.compat.modules import named_modules, own_parameters
from tpplan.compiler.bind.bind import Binding, Bound, once
from tpplan.compiler.bind.expert_groups import SplitInside, holds_stacks
from tpplan.compiler.bind.packing import pack
from tpplan.compiler.check.attribute_reads import attributes_read
from tpplan.compiler.check.fingerprint import Fingerprints
from tpplan.compiler.check.shared_experts import Arguments, arguments_of, meta_call
from tpplan.compiler.dump import Dump
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, REPLICATED_PARTIAL
from tpplan.compiler.ir.observations import CaptureSettings
from tpplan.compiler.ir.trace import Trace
from tpplan.compiler.place.assign import Assignment
from tpplan.compiler.place.solution import Constraints
from tpplan.compiler.problem import Learned, Problem
from tpplan.compiler.request import Request
from tpplan.compiler.rewrite.lemmas import justify
from tpplan.compiler.rewrite.routed import NotRoutedError
from tpplan.compiler.search import search
from tpplan.compiler.trace.branches import record_model
from tpplan.plan import CompileError, Diagnostic, Severity

_ARGUMENTS = (REPLICATED, REPLICATED_PARTIAL)


class _NotSplitError(Exception):
    """Why a stack can't be split inside."""


class _UnfitError(Exception):
    """Rules that don't fit what they are for, whose findings say what does."""

    def __init__(self, findings: Sequence[Diagnostic]) -> None:
        self.diagnostics = findings


def split_inside(
    request: Request, trace: Trace, binding: Binding
) -> tuple[dict[str, SplitInside | None], list[Diagnostic]]:
    """How the stacks are split that have rules inside, and are shared out over groups of several ranks.

    Of one that the call leaves out, which it may where another call was proved with it, nothing is known.
    """
    modules = dict(named_modules(request.model, remove_duplicate=False))
    stacks: dict[str, dict[str, Bound]] = {}
    for name, bound in binding.modules.items():
        owner, _, leaf = name.rpartition(".")
        if bound.is_parameter and 1 < bound.group[1] < request.size and holds_stacks(modules[owner]):
            stacks.setdefault(owner, {})[leaf] = bound
    fingerprints = Fingerprints(request.model, {})
    known: dict[object, SplitInside] = {}
    found: dict[str, SplitInside | None] = {}
    findings: list[Diagnostic] = []
    for name, rules in stacks.items():
        if any(n.startswith(f"{name}.") and not b.group[1] for n, b in binding.modules.items()):
            continue  # with a rule that has no meaning there
        (ranks,) = {bound.group[1] for bound in rules.values()}
        frames = [frame for frame in trace.root.walk() if frame.module == name]
        if not frames and request.partly:
            found[name] = None
            continue
        try:
            if not frames:
                raise _NotSplitError("the example doesn't call it")
            for frame in frames:
                call = arguments_of(modules[name], frame, trace)
                key = (fingerprints.of(name), call, ranks, *((leaf, id(bound.rule)) for leaf, bound in rules.items()))
                if key not in known:
                    known[key] = _compiled(request, trace, modules[name], rules, ranks, call)
                if found.setdefault(name, known[key]) != known[key]:
                    raise _NotSplitError("its calls would split it differently")
        except (_NotSplitError, _UnfitError, NotRoutedError, CompileError) as error:
            findings.append(_refused(name, next(iter(rules.values())), ranks, error))
    return found, once(findings)


def _compiled(
    request: Request, trace: Trace, module: nn.Module, rules: Mapping[str, Bound], ranks: int, given: Arguments
) -> SplitInside:
    """The module as a model of its own, on the ranks of a group."""
    call = meta_call(given)
    own, state = record_model(
        module, call, {}, CaptureSettings(trace.settings.training, frozenset(), trace.settings.device)
    )
    flow = DataFlow(own)
    bound = {leaf: replace(held, name=leaf, group=(0, 0)) for leaf, held in rules.items()}
    unpacked = pack(module, flow, Binding(bound, {}, {}), ranks)
    binding, inexact = justify(module, flow, unpacked.binding)
    findings = [*unpacked.findings, *inexact]
    if any(finding.severity is Severity.ERROR for finding in findings):
        raise _UnfitError(findings)
    alone = Request(
        module,
        request.plan,
        ranks,
        call,
        {},
        training=own.settings.training,
        device=own.settings.device,
        exchanges=False,
    )
    read = functools.cache(functools.partial(attributes_read, module, own, call, {}))
    problem = Problem(alone, binding, flow, state.results, unpacked.heads, unpacked.features, read)
    solved = search(problem, Learned(Constraints(), {}), Dump(None))
    placed = solved.placed
    errors = [finding for finding in placed.learned.findings if finding.severity is Severity.ERROR]
    if errors:
        raise CompileError(errors)
    if placed.learned.recorded or set(placed.learned.attributes) - {""}:
        raise _NotSplitError("it can't run its own code on a part of each expert")
    if not _exchanges_as_whole_experts(placed.assignment, own):
        raise _NotSplitError("it would have to exchange something inside")
    layouts = {leaf: binding.parameters[leaf] for leaf in own_parameters(module) if leaf in binding.parameters}
    for leaf, layout in layouts.items():
        by_expert = layout.dim == 0 or (layout == PARTIAL and own_parameters(module)[leaf].dim() < 2)  # pyright: ignore
        if by_expert or layout.has_replicas or layout.within:
            raise _NotSplitError(f"the ranks of a group can't share out `{leaf}`")
    return SplitInside(ranks, layouts, placed.learned.attributes.get("", ()))


def _exchanges_as_whole_experts(assignment: Assignment, trace: Trace) -> bool:
    """Whether gradients of arguments and of parameters are partial, the result is, and nothing else is exchanged."""
    root, *others = assignment.frames
    inside = [*root.moves, *(move for other in others for move in (*other.entries, *other.exits, *other.moves))]
    replaced = any(held.normed or held.averages for held in assignment.frames)
    if inside or replaced or assignment.once or assignment.sliced or len(root.exits) != 1:
        return False
    partial = all(
        assignment.layouts[entry.target] == _ARGUMENTS[trace.values[entry.target].differentiable]
        for entry in root.frame.entries
    )
    whole = [name for name in assignment.whole if assignment.layouts[_value(trace, name)] != PARTIAL]
    return partial and not whole and root.exits[0].source == PARTIAL


def _value(trace: Trace, name: str) -> int:
    return next(value for value, names in trace.parameters.items() if name in names)


def _refused(name: str, inside: Bound, ranks: int, error: Exception) -> Diagnostic:
    findings = error.diagnostics if isinstance(error, (_UnfitError, CompileError)) else ()
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    why = errors[0].message.replace("the body of the model", "its body") if errors else str(error)
    return Diagnostic(
        code="TP146",
        message=f"the experts of `{name}` can't be split over the {ranks} ranks that share each of them: {why}",
        span=inside.rule.style_span,
        help=errors[0].help
        if isinstance(error, _UnfitError)
        else "write `colwise` for the tensors that make an expert's features and `rowwise` for those that read them, "
        f"biases too; or remove the rule for `{name}`, so that all ranks share each expert",
        notes=tuple(note.replace("in the model,", f"in `{name}`,") for note in errors[0].notes) if errors else (),
        subject=name,
    )


__all__ = ["split_inside"]
