"""Export without a model: a plan's rules, word by word, in transformers' styles.

in:  a plan
out: `Exported`, with a warning that nothing is proved; or a `CompileError` with the rules that can't be said

    model.layers.*.mlp.{gate,up}_proj: colwise   ->   layers.*.mlp.gate_proj: colwise, layers.*.mlp.up_proj: colwise
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tpplan.plan import CompileError, Diagnostic, Pin, Plan, Rule, Style
from tpplan.suggest.export_hf import Exported, left_out

_WAY_OUT = "pass --model, so that the names and what the program does there are known"


def export_rules(plan: Plan) -> Exported:
    """What the rules of a plan are in transformers' words.

    Raises:
        CompileError: TP210 and TP211, with all rules that can't be said.
    """
    whole: dict[str, str] = {}
    errors: list[Diagnostic] = []
    for rule in plan.with_whole_sequences().rules:
        style, why = _style(rule)
        for text in (alternative.text for alternative in rule.pattern.alternatives if rule.style is not Style.NONE):
            reason = why or _unsaid(text)
            if reason:
                code = "TP211" if any(part.isdigit() for part in text.split(".")) else "TP210"
                message = f"`{text}` has no style of transformers: {reason}"
                errors.append(Diagnostic(code, message, span=rule.style_span, help=_WAY_OUT, subject=text))
            else:
                whole[text] = style
    if errors:
        raise CompileError(errors)
    prefix = _prefix(whole)
    base = {name.removeprefix(prefix): style for name, style in whole.items() if name.startswith(prefix)}
    told = (
        f"the base model's names are taken to begin with `{prefix}`"
        if prefix
        else "names are taken as the base model's"
    )
    unproved = Diagnostic(
        "TP213", f"nothing is proved of `{plan.name}` without a model; {told}", help=_WAY_OUT, subject=plan.name
    )
    return Exported(base, whole, (*left_out(plan), unproved))


def _style(rule: Rule) -> tuple[str, str]:
    """Transformers' style for a rule, and why there is none."""
    if rule.local:
        return "", "transformers doesn't divide attributes"
    if rule.packed is not None:
        equal = len(rule.packed) == 2 and len({pack.size for pack in rule.packed}) == 1
        return f"packed_{rule.style.value}", "" if equal else "transformers knows two equal packs"
    if rule.style is Style.EXPERTS:
        return "", "each rank holds whole experts, which transformers has another plan for"
    if rule.style is Style.COLWISE and rule.input in (None, Pin.REPLICATE):
        return ("colwise_rep" if rule.output is Pin.REPLICATE else "colwise"), ""
    if rule.style is Style.ROWWISE and rule.output in (None, Pin.REPLICATE):
        return ("rowwise_rep" if rule.input is Pin.REPLICATE else "rowwise"), ""
    whole = rule.input in (None, Pin.REPLICATE) and rule.output in (None, Pin.REPLICATE)
    if rule.style in (Style.VOCAB, Style.REPLICATE) and whole:
        return ("embedding_rowwise" if rule.style is Style.VOCAB else "replicate"), ""
    return "", "transformers has no such pins for it"


def _unsaid(text: str) -> str:
    segments = text.split(".")
    if any(segment.isdigit() for segment in segments):
        return "it names one layer by its number, and transformers has one style for all"
    if "**" in segments or any("*" in segment and segment != "*" for segment in segments):
        return "only whole numbers of layers can be a `*` there"
    return ""


def _prefix(names: Iterable[str]) -> str:
    """What most names with several parts begin with, and no names disagree about; otherwise ""."""
    first = Counter(name.partition(".")[0] for name in names if "." in name)
    return f"{next(iter(first))}." if len(first) == 1 and next(iter(first)) != "*" else ""


__all__ = ["export_rules"]
