"""Binding rules to modules, and to parameters that no module of their own holds.

In: rules, and the names of a model's modules and parameters. Out: the rule that wins on each, and what's wrong.
An alternative that matches no module is held against the parameters: `experts.down_proj` may be either.

    `model.layers.*.mlp.up_proj: colwise`  +  `model.layers.0.mlp.up_proj`, `model.norm`
    →  {"model.layers.0.mlp.up_proj": <that rule>}
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tpplan.plan.diagnostic import Diagnostic, Severity
from tpplan.plan.nearest import Suggestions
from tpplan.plan.pattern import Alternative, Pattern, Specificity
from tpplan.plan.positions import Span
from tpplan.plan.rules import KernelRule, Rule
from tpplan.plan.vocabulary import Style


@dataclass(frozen=True, slots=True)
class Matched:
    """What matching yields.

    Attributes:
        rules: the winning rule by module name, in the order of the modules, then by parameter name; those on which
            `none` wins aren't in it.
        diagnostics: patterns that match nothing, contradictions, and rules without effect.
    """

    rules: dict[str, Rule]
    diagnostics: list[Diagnostic]


class _Tally:
    """What became of one rule."""

    def __init__(self) -> None:
        self.matched = 0
        self.won = False
        self.tied = False
        self.first_loss: tuple[str, Rule] | None = None


class _Contest:
    """The rules that compete for the modules, and the ties among them."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = rules
        self.tallies = [_Tally() for _ in rules]
        self.ties: dict[tuple[int, int], list[str]] = {}

    def decide(self, name: str, candidates: list[tuple[Specificity, int]]) -> Rule:
        """Find the winner on one module, and note who lost or tied."""
        best = max(specificity for specificity, _ in candidates)
        top = [index for specificity, index in candidates if specificity == best]
        winner = self.rules[top[0]]
        self.tallies[top[0]].won = True
        for _, index in candidates:
            tally = self.tallies[index]
            tally.matched += 1
            if index == top[0]:
                continue
            if index in top and self.rules[index].settings != winner.settings:
                self.ties.setdefault((top[0], index), []).append(name)
                tally.tied = True
            elif tally.first_loss is None:
                tally.first_loss = (name, winner)
        return winner


def match_rules(
    rules: Sequence[Rule],
    kernels: Sequence[KernelRule],
    module_names: Iterable[str],
    parameter_names: Iterable[str] = (),
) -> Matched:
    """Bind rules to modules, and those that match none to parameters; the most specific one wins."""
    names, parameters = list(module_names), list(parameter_names)
    index, parameter_index = _NameIndex(names), _NameIndex(parameters)
    candidates: dict[str, list[tuple[Specificity, int]]] = {}
    for number, rule in enumerate(rules):
        found: dict[str, Specificity] = {}
        for alternative in rule.pattern.alternatives:
            _closer(found, index.matched(alternative) or parameter_index.matched(alternative))
        for name, specificity in found.items():
            candidates.setdefault(name, []).append((specificity, number))
    contest = _Contest(rules)
    won = {name: contest.decide(name, candidates[name]) for name in (*names, *parameters) if name in candidates}
    suggestions = Suggestions(names, parameters)
    diagnostics = [
        *_unmatched(rules, contest.tallies, suggestions),
        *_unmatched_kernels(kernels, index, suggestions),
        *_ambiguous(contest),
        *_shadowed(contest),
    ]
    return Matched(
        {name: rule for name, rule in won.items() if rule.style is not Style.NONE},
        sorted(diagnostics, key=lambda diagnostic: diagnostic.sort_key),
    )


def of_a_part(matched: Matched) -> list[Diagnostic]:
    """The diagnostics for a model that looks like a stage: only some patterns match, and the others are near none."""
    way_out = "for a part of the plan's model pass `partial=True` (`--partial`)"
    return [
        replace(found, help=f"{found.help}; {way_out}")
        if matched.rules and found.code == "TP012" and not (found.help or "").startswith("did you mean")
        else found
        for found in matched.diagnostics
    ]


def matching_rules(rules: Iterable[Rule], names: Sequence[str]) -> list[Rule]:
    """Those of the rules that match any of these names, of modules and parameters alike."""
    index = _NameIndex(names)
    return [rule for rule in rules if index.find(rule.pattern)]


def _closer(found: dict[str, Specificity], more: dict[str, Specificity]) -> None:
    """Add `more` to `found`, the closer of two matches of a name counting."""
    for name, specificity in more.items():
        if name not in found or found[name] < specificity:
            found[name] = specificity


class _NameIndex:
    """Module names by their last segment: a large model has thousands of names, and a dozen of those."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.by_last: dict[str, list[str]] = {}
        for name in names:
            self.by_last.setdefault(name.rpartition(".")[2], []).append(name)

    def find(self, pattern: Pattern) -> dict[str, Specificity]:
        """The matching names, each with the specificity of the closest alternative."""
        found: dict[str, Specificity] = {}
        for alternative in pattern.alternatives:
            _closer(found, self.matched(alternative))
        return found

    def matched(self, alternative: Alternative) -> dict[str, Specificity]:
        """The names that one alternative matches."""
        fits = alternative.expression.fullmatch
        names = (name for name in self.candidates(alternative) if fits(f"{name}." if name else ""))
        return dict.fromkeys(names, alternative.specificity)

    def candidates(self, alternative: Alternative) -> Iterable[str]:
        """The names that begin and end as the alternative does."""
        last_segment, prefix = alternative.last_segment, alternative.prefix
        if last_segment is None:
            return (name for name in self.names if name.startswith(prefix))
        fitting = (names for last, names in self.by_last.items() if last_segment.fullmatch(last))
        return (name for names in fitting for name in names if name.startswith(prefix))


def _unmatched(rules: Sequence[Rule], tallies: Sequence[_Tally], suggestions: Suggestions) -> Iterable[Diagnostic]:
    for rule, tally in zip(rules, tallies, strict=True):
        if tally.matched or (rule.style is Style.NONE and rule.overrides):
            continue
        # A `none` that carves nothing out changes nothing, but it's likely to be misspelt.
        severity = Severity.WARNING if rule.style is Style.NONE else Severity.ERROR
        yield _unmatched_pattern(rule.pattern, rule.pattern_span, suggestions, severity)


def _unmatched_kernels(
    kernels: Sequence[KernelRule], index: _NameIndex, suggestions: Suggestions
) -> Iterable[Diagnostic]:
    scopes = {rule.pattern: rule.pattern_span for rule in kernels if rule.pattern is not None}
    for pattern, span in scopes.items():
        if not index.find(pattern):
            yield _unmatched_pattern(pattern, span, suggestions, Severity.ERROR)


def _unmatched_pattern(pattern: Pattern, span: Span | None, suggestions: Suggestions, severity: Severity) -> Diagnostic:
    return Diagnostic(
        "TP012",
        f"`{pattern}` matches none of the model's {len(suggestions.names)} modules",
        span=span,
        label="matches no module",
        help=suggestions.help_for(pattern),
        subject=pattern.text,
        severity=severity,
    )


def _ambiguous(contest: _Contest) -> Iterable[Diagnostic]:
    for (first_number, second_number), names in contest.ties.items():
        first, second = contest.rules[first_number], contest.rules[second_number]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield Diagnostic(
            "TP013",
            f"`{first.pattern}` and `{second.pattern}` match `{names[0]}`{more} equally closely and differ",
            span=second.pattern_span,
            label=f"says `{second.style}`, the other `{first.style}`",
            help=f"name the module in a rule of its own, such as `{names[0]}: {second.style}`",
            notes=(f"the other rule is at {first.origin}",),
            subject=second.pattern.text,
        )


def _shadowed(contest: _Contest) -> Iterable[Diagnostic]:
    for rule, tally in zip(contest.rules, contest.tallies, strict=True):
        if tally.won or tally.tied or tally.first_loss is None:
            continue
        name, winner = tally.first_loss
        yield Diagnostic(
            "TP014",
            f"`{rule.pattern}` takes effect nowhere: another rule wins on each of its modules",
            span=rule.pattern_span,
            label="never wins",
            help="remove the rule, or widen its pattern",
            notes=(f"on `{name}`, `{winner.pattern}` wins ({winner.origin})",),
            subject=rule.pattern.text,
        )
