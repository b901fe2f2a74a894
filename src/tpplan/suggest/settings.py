"""Search: the settings that the compiler proves, out of those that the flow of the data proposes.

in:  a model, an example call, the number of ranks
out: `Suggestion`: settings, the program that they compile to, and a reason for whatever stays whole

All proposals are tried together first; that is nearly always the end of it. Otherwise each is judged by itself, what
fails is replaced by a more careful proposal, and what passes is put together again.

Four changes are weighed against that (`weigh`): where rows make more features than they contract, the layers before
them stay whole; so do columns that weren't proved, as others may be split then; and layers that stay whole are split,
and their results gathered, where these are small beside the weights, as those that modulate norms; and where not all
was proved, what is concatenated along the split dim stays whole. Memory comes first:
of the plans whose parameters take at most a twentieth more than the least, the one that weighs least is taken.

Where nothing can be split so, it is looked for once more with exchanges between the operations of a body, such as a
mean over all features. Such a plan is taken if no more is sent for these than at boundaries: scores of attention can be
exchanged, too, but there are as many as the length squared. What a body sums of its own rows counts as at boundaries;
where that is all, such a plan is taken as well if less than half could be split without.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from tpplan.ambience import ambience
from tpplan.compat.modules import computed_weights, named_modules, parametrized_tensors
from tpplan.compiler.ir.class_functions import LOSSES
from tpplan.compiler.ir.program import Program
from tpplan.compiler.ir.trace import Operation
from tpplan.compiler.queries import Rules, linear_form, same_files
from tpplan.cost.traffic import memory
from tpplan.plan import CompileError, Pin, Style
from tpplan.progress import doing
from tpplan.suggest.judge import Verdict, judge, runs
from tpplan.suggest.patterns import shape_of
from tpplan.suggest.roles import RoleGroup, RoleSetting, find_roles
from tpplan.suggest.sequence_norms import find_norms
from tpplan.suggest.sharded_share import model_share
from tpplan.suggest.subject import SuggestSubject, make_subject
from tpplan.suggest.vocabulary_tables import find_tables
from tpplan.suggest.weigh import SENT, exchanges_little, sums_at_boundaries, weigh

_WALKS = 4
_CANNOT_RUN = "TP136"
_ABOUT = 1.025  # of walks that take about the least memory, the one that sends least
_SLACK = 1.05
_SIZES = (64, 32, 16, 8, 6, 5, 4, 3, 2)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What a plan could say.

    Attributes:
        subject: the model.
        groups: what is sharded, in groups of modules that belong together.
        program: what the plan compiles to.
        reasons: by module, why it stays whole.
        sequence: why there is no sequence parallelism, where it was asked for; "" otherwise.
    """

    subject: SuggestSubject
    groups: tuple[RoleGroup, ...]
    program: Program
    reasons: Mapping[str, str]
    sequence: str = ""

    @property
    def settings(self) -> dict[str, RoleSetting]:
        """Every setting, by module."""
        return _merged(self.groups)


@dataclass(slots=True)
class _Search:
    subject: SuggestSubject
    accepted: list[RoleGroup] = field(default_factory=list[RoleGroup])
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    verdict: Verdict = field(default_factory=lambda: Verdict(None))
    last: Verdict = field(default_factory=lambda: Verdict(None))
    failed: list[RoleGroup] = field(default_factory=list[RoleGroup])
    sources: Mapping[str, set[str]] = field(default_factory=dict[str, set[str]])
    before_groups: Collection[str] = ()
    exchanges: bool = False
    joins: bool = False

    def together(self, groups: Sequence[RoleGroup]) -> bool:
        """Whether the accepted groups and these are proved together; they're accepted then."""
        verdict = judge(self.subject, _merged((*self.accepted, *groups)), self.exchanges)
        if verdict.ok:
            self.accepted += groups
            self.verdict = verdict
        self.last = verdict
        return verdict.ok

    def lighter(self, groups: Sequence[RoleGroup]) -> bool:
        """Whether the accepted groups and these are proved together, and weigh less; they're accepted then."""
        verdict = judge(self.subject, _merged((*self.accepted, *groups)), self.exchanges)
        if verdict.program is None or weigh(verdict.program) >= self.weight:
            return False
        self.accepted += groups
        self.verdict = verdict
        return True

    @property
    def settings(self) -> dict[str, RoleSetting]:
        """What is accepted, by module."""
        return _merged(self.accepted)

    @property
    def weight(self) -> float:
        """What the accepted groups weigh; as much as can be if there are none."""
        return math.inf if self.verdict.program is None else weigh(self.verdict.program)

    @property
    def memory(self) -> float:
        """Bytes of parameters that a rank holds with the accepted groups."""
        return math.inf if self.verdict.program is None else memory(self.verdict.program.parameters).local

    @property
    def splits_most(self) -> bool:
        """Whether the accepted groups split most of the parameters."""
        return self.verdict.program is not None and model_share(self.verdict.program).percent > 50

    def one_by_one(self, groups: Iterable[RoleGroup]) -> list[RoleGroup]:
        """Accept what is proved beside what is accepted already; returns the rest, with reasons noted."""
        failed: list[RoleGroup] = []
        for group in groups:
            if not self.together([group]):
                failed.append(group)
                self.reasons.update(dict.fromkeys(group.settings, self.last.reason))
        return failed


@ambience()
@same_files()
@doing("finding a plan")
def search(
    model: nn.Module, size: int, arguments: Sequence[Any], keywords: Mapping[str, Any], sequence_parallel: bool
) -> Suggestion:
    """Find a plan for `model` over `size` ranks.

    Raises:
        CompileError: the model can't be compiled at all, or nothing in it can be sharded; it says over how many ranks
            something can.
    """
    subject = make_subject(model, size, arguments, keywords)
    found, why = _found(subject, sequence_parallel)
    if not runs(subject, found.verdict):
        subject = replace(subject, rehearsed=True)
        found, why = _found(subject, sequence_parallel)
    assert found.verdict.program is not None
    taken = _merged(found.accepted)
    reasons = {name: reason for name, reason in found.reasons.items() if name not in taken}
    return Suggestion(subject, tuple(found.accepted), found.verdict.program, reasons, why)


def _found(subject: SuggestSubject, sequence_parallel: bool) -> tuple[_Search, str]:
    """What is taken, and why there is no sequence parallelism where it was asked for."""
    found = _lightest(subject)
    if not found.accepted:
        raise _nothing(subject, found)
    _split_idle(subject, found)
    why = _add_norms(subject, found) if sequence_parallel else ""
    _split_losses(found)
    return found, why


def _lightest(subject: SuggestSubject) -> _Search:
    """The lightest of what the walks find whose parameters take about the least memory."""
    rules = Rules(subject.size, subject.trace.batch)
    walks = [_walked(subject, rules, {})]
    whole: dict[str, str] = {}
    for _ in range(_WALKS):
        more = _before_wide_rows(subject, walks[-1]) | _failed(walks[-1])
        if not more.keys() - whole.keys():
            break
        whole |= more
        walks.append(_walked(subject, rules, whole))
    if walks[0].joins and walks[0].failed:
        walks.append(_walked(subject, rules, {}, apart=True))
    least = min(walk.memory for walk in walks)
    if not any(walk.accepted and walk.splits_most for walk in walks):
        exchanging = _walked(subject, rules, {}, exchanges=True)
        if _is_wanted(subject, exchanging, least):
            return exchanging
    if not any(walk.accepted for walk in walks):
        return walks[-1]  # the one that no longer tries what isn't wanted knows why the rest is whole
    return min((walk for walk in walks if walk.memory <= _ABOUT * least), key=lambda walk: walk.weight)


def _split_idle(subject: SuggestSubject, found: _Search) -> None:
    """Split layers that the call leaves out, such as experts that it picks by number, like those of their name."""
    called = {frame.module for frame in subject.trace.root.walk()}
    idle = [(name, form) for name, m in named_modules(subject.model) if name not in called and (form := linear_form(m))]
    if not idle:
        return
    groups: list[RoleGroup] = []
    for group in found.accepted:
        settings = dict(group.settings)
        for name, form in idle:
            like = (s for n, s in group.settings.items() if shape_of(n) == shape_of(name))
            alike = next(like, None)
            if alike is not None and any(subject.linears.get(n) == form for n in group.settings):
                settings[name] = alike
        groups.append(replace(group, settings=settings))
    verdict = judge(subject, _merged(groups), found.exchanges)
    if verdict.ok and groups != found.accepted:
        found.accepted, found.verdict = groups, verdict


def _is_wanted(subject: SuggestSubject, exchanging: _Search, least: float) -> bool:
    """Whether a plan with exchanges inside of bodies is better than one without, which needs `least` bytes."""
    program = exchanging.verdict.program
    if program is None or _SLACK * exchanging.memory >= least:
        return False
    moved = sums_at_boundaries(program, _crossing(subject))
    sums_alone = moved != program and not any(module.inner for module in moved.modules)
    return exchanges_little(moved) and (sums_alone or least >= memory(program.parameters).whole)


def _crossing(subject: SuggestSubject) -> frozenset[int]:
    """The numbers of elements of the values that cross a boundary."""
    values, frames = subject.trace.values, subject.trace.root.walk()
    crossed = (crossing.target for frame in frames for crossing in (*frame.entries, *frame.exits))
    return frozenset(math.prod(values[value].shape) for value in crossed)


def _walked(
    subject: SuggestSubject, rules: Rules, whole: Mapping[str, str], exchanges: bool = False, apart: bool = False
) -> _Search:
    """What is proved of what one walk proposes, in which these layers are no columns; then what is gathered."""
    roles = find_roles(subject, rules, lenient=True, left=whole, exchanges=exchanges, apart=apart)
    tables, left = find_tables(subject, roles.heads, {name for group in roles.groups for name in group.settings})
    found = _Search(
        subject, reasons=roles.reasons | left, sources=roles.sources, before_groups=roles.before_groups,
        exchanges=exchanges, joins=roles.joins,
    )  # fmt: skip
    everything = (*roles.groups, *tables)
    if not everything or not found.together(everything):
        failed = found.one_by_one(everything)
        if failed:
            found.failed = failed
            found.one_by_one(_careful(subject, rules, failed, found))
    _gather(found)
    return found


def _failed(found: _Search) -> dict[str, str]:
    """The columns of what isn't proved, without which others may be."""
    taken = _merged(found.accepted)
    lost = {name: setting for group in found.failed for name, setting in group.settings.items() if name not in taken}
    return {name: found.reasons[name] for name, held in lost.items() if held.style is Style.COLWISE}


def _before_wide_rows(subject: SuggestSubject, found: _Search) -> dict[str, str]:
    """The columns before rows whose sums have more features than what they contract.

    Also of those that make as many, for a convolution in groups: a column in place of the row would split that, too.
    """
    held: dict[str, str] = {}
    for row, columns in sorted(found.sources.items()):
        form = subject.linears.get(row) or subject.products.get(row)
        if form is None or found.settings.get(row) is None:
            continue
        if form.outputs > form.inputs:
            held |= dict.fromkeys(sorted(columns), f"`{row}` would sum more features than it contracts")
        elif form.outputs == form.inputs and row in found.before_groups:
            held |= dict.fromkeys(sorted(columns), f"`{row}` is split by columns instead, for the groups after it")
    return held


def _gather(found: _Search) -> None:
    """Split layers that would stay whole, and gather their results, where that makes the plan lighter."""
    subject, taken = found.subject, _merged(found.accepted)
    made = {frame.module: frame.exits for frame in subject.trace.root.walk()}
    families: dict[str, dict[str, RoleSetting]] = {}
    for name in found.reasons:
        if name in taken or name not in subject.layers or name not in subject.columns:
            continue
        result = sum(math.prod(subject.trace.values[crossing.target].shape) for crossing in made[name])
        if SENT * result < subject.weights[name]:
            families.setdefault(shape_of(name), {})[name] = RoleSetting(Style.COLWISE, output=Pin.REPLICATE)
    title = "layers whose results are small beside their weights, and are gathered"
    groups = [
        RoleGroup(title, settings, sum(map(subject.weights.__getitem__, settings))) for settings in families.values()
    ]
    if groups and not found.lighter(groups) and len(groups) > 1:
        for group in groups:
            found.lighter([group])


def _careful(subject: SuggestSubject, rules: Rules, failed: Sequence[RoleGroup], found: _Search) -> list[RoleGroup]:
    """What is left of the failed groups if nothing is taken for granted that the rules don't grant."""
    lost, taken = _merged(failed), _merged(found.accepted)
    careful = find_roles(subject, rules, lenient=False, exchanges=found.exchanges)
    known = [group.settings for group in failed]
    again = [
        group
        for group in careful.groups
        if group.settings.keys() <= lost.keys()
        and not group.settings.keys() & taken.keys()
        and group.settings not in known
    ]
    # What the compiler said of the group comes first: a careful walk stops at whatever it doesn't take for granted.
    found.reasons = {n: reason for n, reason in careful.reasons.items() if n in lost} | found.reasons
    return again


def _add_norms(subject: SuggestSubject, found: _Search) -> str:
    """Accept the norms that can work on a part of the sequence; returns why none can."""
    if not any(setting.style is Style.ROWWISE for setting in _merged(found.accepted).values()):
        return "no pair of linear layers is split, between which the stream could be"
    norms = find_norms(subject, _merged(found.accepted))
    if not norms:
        return "no norm sees a (batch, sequence, hidden) stream whose sequence divides evenly"
    if found.together(norms):
        return ""
    why = found.last.reason
    failed = found.one_by_one(norms)
    return why if len(failed) == len(norms) else ""


def _split_losses(found: _Search) -> None:
    """Leave the results of heads split where the call computes a loss of them, so that no rank has all logits."""
    bodies = (node for frame in found.subject.trace.root.walk() for node in frame.body)
    if not any(isinstance(node, Operation) and node.target in LOSSES for node in bodies):
        return
    for place, group in enumerate(found.accepted):
        heads = {name for name, held in group.settings.items() if held.output is Pin.REPLICATE}
        if not heads:
            continue
        settings = {n: replace(s, output=Pin.SHARD) if n in heads else s for n, s in group.settings.items()}
        title = group.title.replace("whose result is gathered", "whose result stays split for the loss")
        changed = replace(group, title=title, settings=settings)
        trial = [*found.accepted[:place], changed, *found.accepted[place + 1 :]]
        verdict = judge(found.subject, _merged(trial), found.exchanges)
        if verdict.program is not None and any(module.class_calls for module in verdict.program.modules):
            found.accepted, found.verdict = trial, verdict


def _nothing(subject: SuggestSubject, found: _Search) -> CompileError:
    bare = judge(subject, {})
    if not bare.ok and bare.finding is not None:
        return CompileError([bare.finding])
    heaviest = sorted(found.reasons, key=lambda name: (-_weight(subject, name), name))
    kind = type(subject.model).__name__
    notes = tuple(f"`{name}`: {found.reasons[name]}" for name in heaviest[:3])
    bare_cause = _of_parameter(subject)
    if bare_cause is not None and not bare_cause[1].compiles:
        notes += (f"`{bare_cause[0]}`: {bare_cause[1].reason}",)
    message = f"nothing in `{kind}` can be sharded over {subject.size} ranks"
    computed = next(
        (n for n, m in named_modules(subject.model) if {**parametrized_tensors(m), **computed_weights(m)}), None
    )
    if not subject.weights and computed is not None:
        message += f": the weight of `{computed}` is computed in each forward, of what can't be split with it"
        way_out = "remove what computes it, such as a spectral norm, or use data parallelism for this model"
    elif not subject.weights:
        message += ": none of its modules is a linear layer"
        way_out = "tensor parallelism splits linear layers and embedding tables; use data parallelism for this model"
        if bare_cause is not None:
            name, verdict = bare_cause
            if verdict.compiles:
                way_out = f"write a plan by hand: `{name}: colwise` compiles, though it isn't known to save anything"
            else:
                message += f", and its largest parameter, `{name}`, can't be split either"
                way_out = (
                    "use data parallelism for this model; what is computed of that parameter can't be split with it"
                )
    elif any(_CANNOT_RUN in note for note in notes):
        way_out = (
            "change the line that can't run on a rank's part as its finding says, and what the layer makes is split"
        )
    else:
        fewer = next((n for n in _SIZES if n < subject.size and _splits(subject, n)), None)
        if fewer is not None:
            way_out = f"try fewer ranks: over {fewer} of them something can be sharded"
        elif _computes(subject) and _splits_inside(subject):
            way_out = (
                f"call `{kind}` from a module around it whose `forward` names its arguments, and shard that one: there "
            )
            way_out += "its body can run from a record, which the outermost body can't, and something can be sharded"
        else:
            way_out = "no number of ranks changes that: what can be split is a linear layer whose result a second one "
            way_out += "reads, with nothing between them that needs all features"
    return CompileError.of("TP123", message, help=way_out, notes=notes, subject=kind)


def _of_parameter(subject: SuggestSubject) -> tuple[str, Verdict] | None:
    """The largest matrix of none of torch's modules and no product, and what speaks against a rule on it."""
    modules = dict(named_modules(subject.model))
    found = {
        name: held.numel()
        for name, held in subject.model.named_parameters()
        if held.dim() > 1
        and name not in subject.weights
        and not type(modules[name.rpartition(".")[0]]).__module__.startswith("torch.")
    }
    if not found:
        return None
    name = max(found, key=lambda held: found[held])
    verdict = judge(subject, {name: RoleSetting(Style.COLWISE)})
    # Without a line that reads it, as of a parameter that the call leaves aside, it is no cause.
    return (name, verdict) if verdict.compiles or (verdict.finding is not None and verdict.finding.notes) else None


def _splits(subject: SuggestSubject, size: int, model: nn.Module | None = None) -> bool:
    """Whether something could be sharded over so many ranks; of another model, where one is given."""
    try:
        other = make_subject(model or subject.model, size, subject.arguments, subject.keywords)
    except CompileError:
        return False
    return bool(_lightest(other).accepted)


class _Around(nn.Module):
    """A module that does nothing but call another."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training  # and nothing of the model's own

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.model(*arguments, **keywords)


def _computes(subject: SuggestSubject) -> bool:
    """Whether the body of the model does more than call modules."""
    return any(isinstance(node, Operation) for node in subject.trace.root.body)


def _splits_inside(subject: SuggestSubject) -> bool:
    """Whether something could be sharded if the model weren't the outermost module."""
    return _splits(subject, subject.size, _Around(subject.model))


def _weight(subject: SuggestSubject, name: str) -> int:
    return subject.weights.get(name, 0)


def _merged(groups: Iterable[RoleGroup]) -> dict[str, RoleSetting]:
    return {name: setting for group in groups for name, setting in group.settings.items()}
