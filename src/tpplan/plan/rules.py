"""What a plan consists of once it has been read: rules and kernel choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tpplan.plan.operator_rule import OperatorRule
from tpplan.plan.pattern import Pattern
from tpplan.plan.positions import Span
from tpplan.plan.vocabulary import Exchange, KernelChoice, KernelKind, Overlaps, Pin, Style


@dataclass(frozen=True, slots=True)
class NamedPack:
    """One matrix inside a packed projection: `q` of q|k|v, with its number of rows where the plan gives it."""

    name: str
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One line under `modules:`. Where it came from doesn't count when two rules are compared.

    Attributes:
        pattern: which modules are meant.
        style: what becomes of them.
        input: the placement demanded of the input; None leaves it to the compiler.
        output: the placement demanded of the output; None leaves it to the compiler.
        packed: the matrices in a packed projection, in order; None if the plan names none.
        local: integer attributes that count something global and have to become local.
        exchange: how tokens reach whole experts on other ranks; None leaves it to the compiler.
        overlap: which of its collectives run beside products; None for what the plan says for all.
        pattern_span: the pattern's token.
        style_span: the style's token.
        option_spans: the tokens of the other options' values, by option.
        origin: the file and line, such as `plans/llama.yaml:9`.
        overrides: whether it took the place of a rule with the same pattern in the plan that it extends.
    """

    pattern: Pattern
    style: Style
    input: Pin | None = None
    output: Pin | None = None
    packed: tuple[NamedPack, ...] | None = None
    local: tuple[str, ...] = ()
    exchange: Exchange | None = None
    overlap: Overlaps | None = None
    pattern_span: Span | None = field(default=None, compare=False, repr=False)
    style_span: Span | None = field(default=None, compare=False, repr=False)
    option_spans: Mapping[str, Span] = field(default_factory=dict[str, Span], compare=False, repr=False)
    origin: str = field(default="", compare=False)
    overrides: bool = field(default=False, compare=False, repr=False)

    @property
    def settings(self) -> tuple[object, ...]:
        """Everything but the pattern: two rules with equal settings can't contradict each other."""
        return (self.style, self.input, self.output, self.packed, self.local, self.exchange, self.overlap)

    def span_of(self, option: str) -> Span | None:
        """The token to point at for `option`: its value's, else the style's."""
        return self.option_spans.get(option, self.style_span)


@dataclass(frozen=True, slots=True)
class OperatorEntry:
    """One rule under `operators:`.

    Attributes:
        name: the operator's, `my::attn`, perhaps with an overload.
        rule: how it works on parts of its arguments.
        span: the rule's token.
        origin: the file and line.
    """

    name: str
    rule: OperatorRule
    span: Span | None = field(default=None, compare=False, repr=False)
    origin: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class KernelRule:
    """One choice under `kernels:`.

    Attributes:
        pattern: the modules in which it holds, they and all inside them; None means everywhere.
        kind: the operation.
        choice: the implementation.
        pattern_span: the pattern's token.
        choice_span: the choice's token.
        origin: the file and line.
    """

    pattern: Pattern | None
    kind: KernelKind
    choice: KernelChoice
    pattern_span: Span | None = field(default=None, compare=False, repr=False)
    choice_span: Span | None = field(default=None, compare=False, repr=False)
    origin: str = field(default="", compare=False)
