"""The plan: rules, kernel choices, and the questions that the compiler asks of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpplan.plan.match import Matched, match_rules, matching_rules
from tpplan.plan.positions import Span
from tpplan.plan.rules import KernelRule, OperatorEntry, Rule
from tpplan.plan.vocabulary import (
    DEFAULT_AXIS,
    PLAN_VERSION,
    Exchange,
    KernelChoice,
    KernelKind,
    Overlaps,
    OverlapWord,
    Pin,
    Style,
)
from tpplan.plan.written import plan_to_dict, plan_to_yaml


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan as it was read, with everything that it extends merged in.

    Attributes:
        version: the version of the plan language.
        name: the plan's name; the file's stem where the plan gives none.
        axis: the mesh axis over which the modules are sharded.
        rules: the rules, a base plan's first.
        kernels: the kernel choices, a base plan's first.
        operators: the rules of operators, a base plan's first.
        one_shot: the largest all-reduces that ranks do in one step, in bytes.
        overlap: which collectives run beside matrix products, where a rule doesn't say otherwise.
        chunks: of how many products each layer is that runs beside a collective; None for what the cost model chooses.
        recompute_gather: whether the backward gathers the inputs of split layers again, and the forward keeps parts.
        fused_overlap: whether torch's fused operators run collectives beside products, where ranks share memory.
        option_spans: the tokens of the values of `overlap` and the three options after it, by option.
        sources: the files that it was read from, the outermost first.
        is_part: whether it is what a plan for a model says of a part of that, such as a stage of a pipeline.
    """

    version: int = PLAN_VERSION
    name: str = "plan"
    axis: str = DEFAULT_AXIS
    rules: tuple[Rule, ...] = ()
    kernels: tuple[KernelRule, ...] = ()
    operators: tuple[OperatorEntry, ...] = ()
    one_shot: int = 0
    overlap: Overlaps = OverlapWord.NONE
    chunks: int | None = None
    recompute_gather: bool = False
    fused_overlap: bool = False
    option_spans: Mapping[str, Span] = field(default_factory=dict[str, Span], compare=False, repr=False)
    sources: tuple[str, ...] = field(default=(), compare=False)
    is_part: bool = False

    def match(self, module_names: Iterable[str], parameter_names: Iterable[str] = ()) -> Matched:
        """Bind the rules to modules, and those that match none to parameters; the most specific one wins on each."""
        return match_rules(self.rules, self.kernels, module_names, parameter_names)

    def base_among(self, bases: Iterable[str], module_names: Sequence[str], parameter_names: Sequence[str]) -> str:
        """The module from which most of the rules match, of the root, "", and `bases`; the root in a tie."""
        best, most = "", self._matching("", (*module_names, *parameter_names))
        for base in bases if most < len(self.rules) else ():
            count = self._matching(f"{base}.", (*module_names, *parameter_names))
            if count > most:
                best, most = base, count
        return best

    def _matching(self, start: str, names: Iterable[str]) -> int:
        """How many of the rules match anything, if names start there."""
        return len(matching_rules(self.rules, [n.removeprefix(start) for n in names if n.startswith(start)]))

    def within(self, base: str) -> Plan | None:
        """The plan for the module `base` alone; None if it may mean others."""
        rules = [(rule, rule.pattern.within(base)) for rule in self.rules]
        kernels = [(rule, None if rule.pattern is None else rule.pattern.within(base)) for rule in self.kernels]
        if any(p is None for _, p in rules) or any(p is None and rule.pattern is not None for rule, p in kernels):
            return None
        return replace(
            self,
            rules=tuple(replace(rule, pattern=p) for rule, p in rules if p is not None),
            kernels=tuple(replace(rule, pattern=p) for rule, p in kernels),
        )

    def part(self, module_names: Sequence[str], parameter_names: Sequence[str]) -> Plan:
        """What the plan says of a part of the model: without patterns that match none of these names."""
        rules = matching_rules(self.rules, [*module_names, *parameter_names])
        kernels = [
            rule for rule in self.kernels if rule.pattern is None or any(map(rule.pattern.matches, module_names))
        ]
        return replace(self, rules=tuple(rules), kernels=tuple(kernels), is_part=True)

    def kernel_choice(self, kind: KernelKind | str, module_name: str = "") -> KernelChoice:
        """The choice for `kind` in a module, which is `auto` unless the plan says otherwise."""
        rule = self.kernel_rule(kind, module_name)
        return KernelChoice.AUTO if rule is None else rule.choice

    def kernel_rule(self, kind: KernelKind | str, module_name: str = "") -> KernelRule | None:
        """What the plan says of `kind` in a module: the rule of the nearest module around it that a pattern names.

        Where several patterns name the same module, the most specific wins; where none does, the plan's default holds.
        """
        rules = [rule for rule in self.kernels if rule.kind == kind]
        scoped = [(rule.pattern, rule) for rule in rules if rule.pattern is not None]
        for name in _inside_out(module_name) if scoped else ():
            found = [
                (specificity, rule)
                for pattern, rule in scoped
                if (specificity := pattern.specificity(name)) is not None
            ]
            if found:
                return max(found, key=lambda pair: pair[0])[1]
        return next((rule for rule in reversed(rules) if rule.pattern is None), None)

    def with_whole_sequences(self) -> Plan:
        """The plan with every value whole that it splits along the sequence."""
        return replace(self, rules=tuple(map(_whole, self.rules)))

    def to_dict(self) -> dict[str, object]:
        """The plan as nested plain data; `load_plan` reads it back. What it extends has been merged in."""
        return plan_to_dict(self)

    def to_yaml(self) -> str:
        """The plan as a plan file's text; `load_plan` reads it back. What it extends has been merged in."""
        return plan_to_yaml(self)


def _whole(rule: Rule) -> Rule:
    style = Style.REPLICATE if rule.style is Style.SEQUENCE else rule.style
    entry, leaving = (Pin.REPLICATE if pin is Pin.SEQUENCE else pin for pin in (rule.input, rule.output))
    exchange = None if rule.exchange is Exchange.ALL_TO_ALL else rule.exchange  # of whole tokens each rank has all
    return replace(rule, style=style, input=entry, output=leaving, exchange=exchange)


def _inside_out(module_name: str) -> Iterator[str]:
    """The module, then each module around it; the root's name is empty."""
    name = module_name
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
