"""Experts: the proof that whole experts can be shared out, one rank running its own alone.

in:  the trace, and a binding in which experts have their layouts
out: the binding, with the arguments that each stack takes; the counts to make local; findings where nothing is proved

A stack of experts is shown to compute result[t] = Σ_k g(tokens[t], weights[t, k], matrices of chosen[t, k]): see
`rewrite/routed`. So the sum over the pairs (t, k) of one rank's experts is that rank's part of the result. The runtime
calls the module's own code with these pairs, one expert for each token, and the experts counted from the rank's first.
That the code does the same then is no assumption: it is recorded on a rank's shapes, as it will be called, and must
have the same g. If the module counts its experts (`num_experts`), that number is made local.

An expert in a list makes a tensor of its arguments on the rank that holds it, and zeros on all others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tpplan.compat.modules import named_modules
from tpplan.compiler.bind.attributes import integer_attributes, replaced_attribute
from tpplan.compiler.bind.bind import Binding, Bound, once
from tpplan.compiler.bind.expert_groups import SplitInside
from tpplan.compiler.bind.whole_experts import INSIDE
from tpplan.compiler.check.fingerprint import Fingerprints
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.layout import Pack
from tpplan.compiler.ir.observations import CaptureSettings
from tpplan.compiler.ir.program import LocalAttribute
from tpplan.compiler.ir.replaced_bodies import SharedExperts
from tpplan.compiler.ir.trace import Frame, Operation, Trace
from tpplan.compiler.rewrite.lemmas import may_write
from tpplan.compiler.rewrite.routed import NotRoutedError, RoutedCall, routed_term
from tpplan.compiler.rewrite.terms import Terms
from tpplan.compiler.trace.capture import BodyError, Capture, record
from tpplan.compiler.trace.random_draws import is_draw
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.signatures import argument_names
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.plan import CompileError, Diagnostic

Attributes = dict[str, tuple[LocalAttribute, ...]]
_ROWS = (
    13,
    29,
    31,
    37,
    41,
    43,
    47,
    53,
    59,
    61,
    67,
)  # of the tokens of a record: primes, so that no other size is one of these by chance
_LISTED = 3  # of the places that a run changes
_BY_COUNT = "what it computes depends on the number of tokens"
_BY_HITS = "what it computes depends on how many experts are chosen"


@dataclass(frozen=True, slots=True)
class ProvedExperts:
    """What is known of a stack."""

    experts: SharedExperts
    attributes: tuple[LocalAttribute, ...]


def prove_experts(
    model: nn.Module, flow: DataFlow, binding: Binding, size: int, inside: Mapping[str, SplitInside]
) -> tuple[Binding, Attributes, list[Diagnostic]]:
    """Hold each call of experts that are shared out against what the runtime makes of it.

    `inside` tells of stacks how each expert is split over the ranks that share it.
    """
    held = {name: bound for name, bound in binding.modules.items() if bound.experts is not None}
    if not held:
        return binding, {}, []
    modules = dict(named_modules(model))
    frames: dict[str, list[Frame]] = {name: [] for name in held}
    for frame in flow.trace.root.walk():
        if frame.module in held:
            frames[frame.module].append(frame)
    prover = _Prover(model, flow, binding, size, inside)
    found, attributes, findings = dict(binding.modules), Attributes(), list[Diagnostic]()
    for name, bound in held.items():
        try:
            proved = prover.prove(modules[name], bound, frames[name])
        except NotRoutedError as error:
            findings.append(_unproved(bound, error))
            continue
        found[name] = replace(bound, experts=None if proved is None else proved.experts)
        if proved is not None and proved.attributes:
            attributes[name] = proved.attributes
    return replace(binding, modules=found), attributes, once(findings)


def _named(places: Collection[str]) -> str:
    """A few of the places that a run changes, such as attributes."""
    more = f" and {len(places) - _LISTED} more" if len(places) > _LISTED else ""
    return ", ".join(f"`{place}`" for place in sorted(places)[:_LISTED]) + more


class _Prover:
    """Remembers what was proved of equal modules."""

    def __init__(
        self, model: nn.Module, flow: DataFlow, binding: Binding, size: int, inside: Mapping[str, SplitInside]
    ) -> None:
        self.flow, self.trace, self.binding, self.size, self.inside = flow, flow.trace, binding, size, inside
        self._fingerprints = Fingerprints(model, {})
        self._known: dict[object, ProvedExperts] = {}

    def prove(self, module: nn.Module, bound: Bound, frames: list[Frame]) -> ProvedExperts | None:
        assert bound.experts is not None
        found: ProvedExperts | None = None
        for frame in frames:
            self._contained(frame, module)
            if bound.experts.owner is not None:
                if any(len(c.path) != 1 or c.aliases for c in frame.entries):
                    raise NotRoutedError("it takes tensors inside of other objects, or one in several places")
                found = ProvedExperts(bound.experts, ())
                continue
            other = self._stack(module, bound, frame)
            if found is not None and found != other:
                raise NotRoutedError("its calls take their arguments in different places")
            found = other
        return found

    # -- what any body must keep to ---------------------------------------------------------------------------------
    def _contained(self, frame: Frame, module: nn.Module) -> None:
        """Refuse a call that does more than to make one tensor of its arguments and parameters."""
        trace, flow = self.trace, self.flow
        if trace.gradients.taken_inside:
            raise NotRoutedError("the model takes gradients in its forward")
        if any(may_write(trace, inner) for _, inner in named_modules(module)):
            raise NotRoutedError(f"the model changes {_named(trace.effects.written)} while it runs, maybe there")
        if len(frame.exits) != 1 or frame.exits[0].path or frame.exits[0].aliases or not frame.entries:
            raise NotRoutedError("it doesn't return one tensor")
        inside = list(frame.walk())
        calls = {(inner.module, inner.call) for inner in inside}
        if any(inner.backwards for inner in inside):
            raise NotRoutedError("it has code in its backward that torch didn't derive")
        within = tuple(f"{inner.module}." for inner in inside)
        if any(a.module in {m for m, _ in calls} or a.module.startswith(within) for a in trace.branches.assumptions):
            raise NotRoutedError("it branches on the numbers in its tensors")
        made = {c.target for inner in inside for c in (*inner.entries, *inner.exits)}
        made.discard(frame.exits[0].target)
        for inner in inside:
            for node in inner.body:
                if isinstance(node, Operation):
                    made.update(o for o in node.outputs if o is not None)
                    if is_draw(node.target, node.arguments, node.keywords):
                        raise NotRoutedError("it draws random numbers, on the rank that holds the expert alone", node)
        ids = set(map(id, inside))
        for inner in inside:
            for node in inner.body:
                if isinstance(node, Operation):
                    foreign = [v for v in (*node.inputs, *node.overwritten) if v not in made]
                    if any(v not in trace.stored and trace.values[v].numbers is None for v in foreign):
                        raise NotRoutedError("it reads what isn't among its arguments", node)
                    if any(v in flow.written for v in foreign):
                        raise NotRoutedError("it writes to a parameter or buffer", node)
        leaving = trace.effects.leaving
        for value in made:
            readers = [f for f, _ in flow.operations.get(value, ())]
            if value in leaving or any(id(reader) not in ids for reader in readers):
                raise NotRoutedError("what it computes is kept, or read elsewhere")
            if set(flow.targets.get(value, ())) - made - {frame.exits[0].target}:
                raise NotRoutedError("what it computes is read elsewhere")
        entries = {c.target for c in frame.entries}
        if entries & flow.written:
            raise NotRoutedError("it writes to what it is given")

    # -- stacks -----------------------------------------------------------------------------------------------------
    def _stack(self, module: nn.Module, bound: Bound, frame: Frame) -> ProvedExperts:
        given = arguments_of(module, frame, self.trace)
        inside = self.inside.get(bound.name)
        key = (self._fingerprints.of(bound.name), given, None if inside is None else inside.key)
        if key not in self._known:
            self._known[key] = self._proved(module, bound, frame, dict(given))
        return self._known[key]

    def _proved(self, module: nn.Module, bound: Bound, frame: Frame, given: Mapping[str, Argument]) -> ProvedExperts:
        assert bound.experts is not None
        first: NotRoutedError | None = None
        for roles in _roles(given):
            experts = replace(bound.experts, tokens=roles[0], chosen=roles[1], weights=roles[2])
            try:
                return self._with_roles(module, bound.name, frame, experts, given)
            except NotRoutedError as error:
                first = first or error
        raise first or NotRoutedError("none of its arguments are the numbers of the experts chosen for each token")

    def _with_roles(
        self, module: nn.Module, name: str, frame: Frame, experts: SharedExperts, given: Mapping[str, Argument]
    ) -> ProvedExperts:
        terms = Terms()
        whole = _read(self.trace, frame, f"{name}.", experts, terms)
        rows, chosen = given[experts.chosen].shape
        around = (self.trace.settings.training, self.trace.settings.device)
        self._for_any_call(module, experts, given, ExpertPart(), whole, terms)
        inside, groups = self.inside.get(name), self.size // experts.ranks
        wholes = [(ExpertPart(groups), whole)]
        if inside is not None:
            wholes = []
            for held in _parts(module, inside):
                made = _run(module, experts, given, (rows, chosen), held, *around)
                term = _read(made, made.root, "", experts, terms)
                self._for_any_call(module, experts, given, held, term, terms)
                wholes.append((held._replace(groups=groups), term))
        few, most = _unlike(given, chosen)[1], _no_fewer(given, rows * chosen)
        local = () if inside is None else tuple(a.name for a in inside.attributes)
        reason: NotRoutedError | None = None
        for counts in _counts(module, experts.count, groups, local):
            try:
                # As it will be called, with few pairs and with all that there are.
                for (held, term), pairs in itertools.product(wholes, (few, most)):
                    own = held._replace(attributes=(*held.attributes, *((a.name, a.local) for a in counts)))
                    if set(_as_called(module, experts, given, pairs, own, *around, terms)) != {term}:
                        raise NotRoutedError("it computes something else with a rank's experts alone")
                return ProvedExperts(experts, (*counts, *_by_rank(inside, self.size)))
            except NotRoutedError as error:
                reason = reason or error
        raise reason or NotRoutedError("it can't run with a rank's experts alone")

    def _for_any_call(
        self, module: nn.Module, experts: SharedExperts, given: Mapping[str, Argument], part: ExpertPart, whole: int,
        terms: Terms,
    ) -> None:  # fmt: skip
        """Refuse a body that does something else with other tokens, or where some experts are chosen for none."""
        chosen, around = given[experts.chosen].shape[1], (self.trace.settings.training, self.trace.settings.device)
        other = _unlike(given, chosen)[0]
        again = _run(module, experts, given, (other, chosen), part, *around)
        if _read(again, again.root, "", experts, terms) != whole:
            raise NotRoutedError(_BY_COUNT)
        for missed in {1, experts.count - 1} if again.numbers.chosen else ():
            fewer = _run(module, experts, given, (other, chosen), part, *around, missed)
            if _read(fewer, fewer.root, "", experts, terms) != whole:
                raise NotRoutedError(_BY_HITS)


def _parts(module: nn.Module, inside: SplitInside) -> list[ExpertPart]:
    """What the ranks of a group have, each kind once."""
    found: list[ExpertPart] = []
    for place in range(inside.ranks):
        part = ExpertPart(1, tuple((a.name, a.on(place)) for a in inside.attributes), inside.shapes(module, place))
        found += [part] if part not in found else []
    return found


def _by_rank(inside: SplitInside | None, size: int) -> tuple[LocalAttribute, ...]:
    """The counts that are local inside of an expert, on each rank of the axis."""
    if inside is None:
        return ()
    ranks = range(size)
    return tuple(LocalAttribute.of(a.name, a.whole, [a.on(r % inside.ranks) for r in ranks]) for a in inside.attributes)


# -- records of a stack ---------------------------------------------------------------------------------------------
class Argument(NamedTuple):
    """What a record takes of an argument."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


Arguments = tuple[tuple[str, Argument], ...]


class ExpertPart(NamedTuple):
    """What one rank has of a stack.

    Attributes:
        groups: into how many parts the experts are shared out.
        attributes: the module's counts that are local, with their values.
        shapes: what its body reads of stacks that are split inside, as if it had all of the experts.
    """

    groups: int = 1
    attributes: tuple[tuple[str, int], ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = {}


def arguments_of(module: nn.Module, frame: Frame, trace: Trace) -> Arguments:
    """The arguments of a call of a stack.

    Raises:
        NotRoutedError: it is called with others.
    """
    names = argument_names(type(module).forward)
    given = {c.path[0]: trace.values[c.target] for c in frame.entries if len(c.path) == 1 and not c.aliases}
    if len(given) != len(frame.entries) or set(given) != set(names) or len(names) != 3:
        raise NotRoutedError("it takes other arguments than tokens, the experts chosen for each, and weights")
    return tuple((n, Argument(given[n].shape, given[n].dtype, given[n].differentiable)) for n in names)


def meta_call(given: Arguments) -> list[Tensor]:
    """Such arguments, without numbers."""
    return [_like(argument, argument.shape) for _, argument in given]


class OtherCounts:
    """Whether a stack computes for other numbers of tokens what was proved; asked at the first call with each."""

    def __init__(self, stock: nn.Module, experts: SharedExperts, part: ExpertPart) -> None:
        """Ask the stock module, on meta tensors, as it is and as this rank has it."""
        self._stock, self._experts, self._part = stock, experts, part
        self._terms = Terms()
        self._seen: set[object] = set()

    def ask(self, given: Mapping[str, Argument], device: torch.device, name: str) -> None:
        """Record the module as it is called unsharded, and as a rank may call it.

        Args:
            given: its arguments, whole.
            device: where they are.
            name: the module's, for errors.

        Raises:
            CompileError: it computes something else.
        """
        key = (*given.items(), self._stock.training, torch.is_grad_enabled())
        if key in self._seen:
            return
        chosen = given[self._experts.chosen].shape
        (proved, few), around = _unlike(given, chosen[1]), (self._stock.training, device)
        most = _no_fewer(given, chosen[0] * chosen[1])
        try:
            whole = {
                _read(trace, trace.root, "", self._experts, self._terms)
                for rows in (chosen[0], proved)
                for trace in (_run(self._stock, self._experts, given, (rows, chosen[1]), ExpertPart(), *around),)
            }
            own = {
                term
                for pairs in (few, most)
                for term in _as_called(self._stock, self._experts, given, pairs, self._part, *around, self._terms)
            }
            if len(whole) > 1 or len(own) > 1 or (not self._part.shapes and own != whole):
                raise NotRoutedError(_BY_COUNT)
        except NotRoutedError as error:
            finding = Diagnostic(
                "TP146", f"`{name}` can't run on {chosen[0]} tokens: {error}", help=INSIDE, subject=name
            )
            raise CompileError([finding]) from error
        self._seen.add(key)


def _read(trace: Trace, frame: Frame, prefix: str, experts: SharedExperts, terms: Terms) -> int:
    at = {c.path[0]: c.target for c in frame.entries}
    stacks = {
        value: own
        for value, names in trace.parameters.items()
        for own in (next((n.removeprefix(prefix) for n in names if n.startswith(prefix)), ""),)
        if own and "." not in own and trace.values[value].shape[:1] == (experts.count,)
    }
    call = RoutedCall(at[experts.tokens], at[experts.chosen], at[experts.weights], stacks, experts.count)
    return routed_term(trace, frame, call, terms)


def _run(
    module: nn.Module,
    experts: SharedExperts,
    given: Mapping[str, Argument],
    chosen: tuple[int, int],
    part: ExpertPart,
    training: bool,
    device: torch.device,
    missed: int = 0,
) -> Trace:
    """The record of the module with so many experts chosen for so many tokens, on a rank with this part.

    In it the first `missed` of the experts were chosen for no token.
    """
    shapes = {
        leaf: (experts.count // part.groups, *part.shapes.get(leaf, tuple(parameter.shape))[1:])
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.dim() and parameter.shape[0] == experts.count
    }
    skeleton = make_skeleton(module, shapes)
    for attribute, local in part.attributes:
        setattr(skeleton.model, *replaced_attribute(skeleton.model, attribute, local))
    names = argument_names(type(module).forward)
    call = [
        _like(given[name], (chosen[0], *given[name].shape[1:]) if name == experts.tokens else chosen) for name in names
    ]
    try:
        recorder = Recorder(CaptureSettings(training, device=device))
        recorder.picker.missed = missed
        return record(skeleton, call, {}, Capture(recorder, leaves=False))
    except BodyError as error:
        cause = error.__cause__ or error
        raise NotRoutedError(f"it can't run with a part of the pairs: {str(cause) or type(cause).__name__}") from error


def _as_called(
    module: nn.Module,
    experts: SharedExperts,
    given: Mapping[str, Argument],
    pairs: int,
    part: ExpertPart,
    training: bool,
    device: torch.device,
    terms: Terms,
) -> Iterator[int]:
    """The terms of the module as a rank with this part calls it, with so many pairs, also if some experts have none."""
    own = replace(experts, count=experts.count // part.groups)
    missing = {0, 1, own.count - 1}
    for missed in sorted(n for n in missing if n < own.count):
        local = _run(module, experts, given, (pairs, 1), part, training, device, missed)
        yield _read(local, local.root, "", own, terms)
        if not local.numbers.chosen:
            return


def _no_fewer(given: Mapping[str, Argument], pairs: int) -> int:
    """A number of pairs that is no other size, and no smaller than this."""
    used = {n for held in given.values() for n in held.shape}
    return next(n for n in itertools.count(max(pairs, 2)) if n not in used and _is_prime(n))


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _unlike(given: Mapping[str, Argument], choices: int) -> tuple[int, int]:
    """Two numbers of tokens that are no other size."""
    used = {n for held in given.values() for n in (*held.shape, held.shape[0] * choices)}
    first, second, *_ = (n for n in _ROWS if n not in used and n * choices not in used)
    return first, second


def _roles(given: Mapping[str, Argument]) -> Iterator[tuple[str, str, str]]:
    """Which arguments may be tokens, chosen numbers and weights."""
    whole = [n for n, v in given.items() if not v.dtype.is_floating_point and v.dtype is not torch.bool]
    for chosen in whole:
        shape = given[chosen].shape
        others = [n for n in given if n != chosen and given[n].dtype.is_floating_point]
        for tokens, weights in itertools.permutations(others, 2):
            fits = len(shape) == 2 and len(given[tokens].shape) >= 2 and given[tokens].shape[0] == shape[0]
            if fits and given[weights].shape == shape:
                yield tokens, chosen, weights


def _counts(module: nn.Module, count: int, groups: int, taken: Collection[str]) -> Iterator[tuple[LocalAttribute, ...]]:
    """Choices of attributes that count the experts, to be made local: none, one, all of the module's own."""
    local = Pack(count).local(groups, 0)
    counts = [name for name, number in integer_attributes(module) if number == count and name not in taken]
    held = [LocalAttribute(name, count, local) for name in counts]
    yield ()
    yield from ((attribute,) for attribute in held)
    own = tuple(attribute for attribute in held if "." not in attribute.name)
    if len(own) > 1:
        yield own


def _like(value: Argument, shape: tuple[int, ...]) -> Tensor:
    made = torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=value.differentiable)
    return made.clone() if value.differentiable else made  # no leaf, as bodies may write to it


def _unproved(bound: Bound, error: NotRoutedError) -> Diagnostic:
    at = error.operation.location if error.operation is not None else None
    return Diagnostic(
        code="TP146",
        message=f"`{bound.name}` can't be shared out in whole experts: {error}",
        span=bound.rule.style_span,
        help=INSIDE,
        notes=() if at is None else (f"in `{bound.name}`, at {at}",),
        subject=bound.name,
    )


__all__ = ["Argument", "Arguments", "ExpertPart", "OtherCounts", "arguments_of", "meta_call", "prove_experts"]
