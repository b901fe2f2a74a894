"""From a plan file's nodes to a document: what one file says, before what it extends is merged in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tpplan.plan.nodes import MapNode, Node, ScalarNode, shorten
from tpplan.plan.operator_rule import RuleTextError, read_rule
from tpplan.plan.plan_keys import PLAN_KEYS
from tpplan.plan.positions import Span
from tpplan.plan.problems import Problems
from tpplan.plan.read_rule import (
    inner_span,
    origin_of,
    read_overlap,
    read_pattern,
    read_rules,
    read_word,
    unknown_key,
    wrong_type,
)
from tpplan.plan.rules import KernelRule, OperatorEntry, Rule
from tpplan.plan.vocabulary import PLAN_VERSION, KernelChoice, KernelKind, Overlaps

_KINDS = tuple(kind.value for kind in KernelKind)


class Document(NamedTuple):
    """What one plan file says.

    Attributes:
        name: the plan's name, if given.
        axis: the mesh axis, if given.
        extends: the token that names the base plan, if there is one.
        rules: the rules, in the order of the file.
        kernels: the kernel choices, in the order of the file.
        operators: the rules of operators, in the order of the file.
        one_shot: the largest all-reduces that are done in one step, in bytes, if given.
        overlap: which collectives run beside products, if given.
        chunks: of how many products layers beside collectives are, if given.
        recompute_gather: whether backwards gather inputs again, if given.
        fused_overlap: whether torch's fused operators are used, if given.
        option_spans: the tokens of the values of these four, by option.
    """

    name: str | None
    axis: str | None
    extends: ScalarNode | None
    rules: tuple[Rule, ...]
    kernels: tuple[KernelRule, ...]
    operators: tuple[OperatorEntry, ...]
    one_shot: int | None
    overlap: Overlaps | None
    chunks: int | None
    recompute_gather: bool | None
    fused_overlap: bool | None
    option_spans: Mapping[str, Span]


def read_document(root: Node | None, file: str, problems: Problems) -> Document | None:
    """Read a plan file; every mistake is collected. None where there's nothing to go on with."""
    if not isinstance(root, MapNode):
        example = f"begin with `version: {PLAN_VERSION}`"
        if root is None:
            problems.add("TP004", "the plan is empty", subject=file, help=example)
        else:
            wrong_type(root, "a plan has to be a mapping", problems, example)
        return None
    for key, _ in root.entries:
        if key.text not in PLAN_KEYS:
            unknown_key(key, PLAN_KEYS, "a plan", problems)
    _check_version(root, file, problems)
    given = root.by_key
    extends = _text(root, "extends", problems)
    if "modules" not in given and "extends" not in given:
        _missing(root, "modules", "add `modules:` with a rule for each module to shard", file, problems)
    name, axis = _text(root, "name", problems), _text(root, "axis", problems)
    return Document(
        name.text if name else None,
        axis.text if axis else None,
        extends,
        tuple(read_rules(given["modules"], file, problems)) if "modules" in given else (),
        tuple(_read_kernels(given["kernels"], file, problems)) if "kernels" in given else (),
        tuple(_read_operators(given["operators"], file, problems)) if "operators" in given else (),
        _read_number(given, "one_shot_all_reduce", range(2**63), "a number of bytes", 262144, problems),
        read_overlap(given["overlap"], problems) if "overlap" in given else None,
        _read_number(given, "chunks", range(2, 65), "a whole number from 2 to 64", 4, problems),
        _read_switch("recompute_gather", given["recompute_gather"], problems) if "recompute_gather" in given else None,
        _read_switch("fused_overlap", given["fused_overlap"], problems) if "fused_overlap" in given else None,
        {key: node.span for key, node in given.items() if key in _POINTED_AT and node.span is not None},
    )


def _check_version(root: MapNode, file: str, problems: Problems) -> None:
    node = root.by_key.get("version")
    if node is None:
        _missing(root, "version", f"add `version: {PLAN_VERSION}` at the top", file, problems)
    elif not isinstance(node, ScalarNode) or not isinstance(node.value, int) or isinstance(node.value, bool):
        wrong_type(node, "`version` has to be a whole number", problems, f"write `version: {PLAN_VERSION}`")
    elif node.value != PLAN_VERSION:
        message = f"this tpplan reads version {PLAN_VERSION} of the plan language, found {node.text}"
        help_text = f"write `version: {PLAN_VERSION}`, or use a tpplan that reads this plan"
        problems.add("TP006", message, node, label="unknown version", help=help_text)


def _missing(root: MapNode, key: str, help_text: str, file: str, problems: Problems) -> None:
    at = root.entries[0][0] if root.entries else root
    message = f"the plan has no `{key}`"
    problems.add("TP007", message, at.span, label=f"no `{key}`", help=help_text, subject=file)


def _text(root: MapNode, key: str, problems: Problems) -> ScalarNode | None:
    node = root.by_key.get(key)
    if node is None:
        return None
    if not isinstance(node, ScalarNode) or not isinstance(node.value, str):
        quoted = f'write `{key}: "{shorten(node.text)}"`' if isinstance(node, ScalarNode) and node.text else None
        wrong_type(node, f"`{key}` has to be text", problems, quoted)
        return None
    if not node.text.strip() or len(node.text.splitlines()) > 1:
        problems.add("TP021", f"`{key}` has to be one line of text", node, label="not a line of text")
        return None
    return node


def _read_operators(node: Node, file: str, problems: Problems) -> Iterator[OperatorEntry]:
    if not isinstance(node, MapNode):
        wrong_type(node, "`operators` has to be a mapping from operators to rules", problems, f"write `{_EXAMPLE}`")
        return
    for key, value in node.entries:
        space, divides, name = key.text.partition("::")
        if not (space and divides and name):
            message = f"`{shorten(key.text)}` is no operator of torch.library"
            problems.add("TP022", message, key, label="no name of an operator", help=f"write `{_EXAMPLE}`")
        if not isinstance(value, ScalarNode) or not isinstance(value.value, str):
            wrong_type(value, "a rule of an operator has to be text", problems, f"write `{_EXAMPLE}`")
            continue
        try:
            rule = read_rule(value.text)
        except RuleTextError as error:
            span = inner_span(value, error.offset, error.length)
            problems.add("TP022", error.message, span, label=error.message, help=error.help)
            continue
        yield OperatorEntry(key.text.removesuffix(".default"), rule, value.span, origin_of(key, file))


def _read_number(
    given: Mapping[str, Node], key: str, allowed: range, what: str, example: int, problems: Problems
) -> int | None:
    node = given.get(key)
    if node is None:
        return None
    if not isinstance(node, ScalarNode) or type(node.value) is not int or node.value not in allowed:
        wrong_type(node, f"`{key}` has to be {what}", problems, f"write `{key}: {example}`")
        return None
    return node.value


def _read_switch(key: str, node: Node, problems: Problems) -> bool | None:
    if not isinstance(node, ScalarNode) or type(node.value) is not bool:
        wrong_type(node, f"`{key}` has to be true or false", problems, f"write `{key}: true`")
        return None
    return node.value


_POINTED_AT = ("overlap", "chunks", "recompute_gather", "fused_overlap")
"""The options that findings about a model point at."""
_EXAMPLE = '"my::attn": "b h s! d!, b h t! d!, b h t! d! -> b h s! d!"'


def _read_kernels(node: Node, file: str, problems: Problems) -> list[KernelRule]:
    if not isinstance(node, MapNode):
        wrong_type(node, "`kernels` has to be a mapping from kinds to choices", problems)
        return []
    rules: list[KernelRule] = []
    for key, value in node.entries:
        if isinstance(value, MapNode):
            rules += _scoped_kernels(key, value, file, problems)
        elif rule := _kernel(key, value, None, file, problems):
            rules.append(rule)
    return rules


def _scoped_kernels(key: ScalarNode, scope: MapNode, file: str, problems: Problems) -> list[KernelRule]:
    pattern_key = key if read_pattern(key, problems) is not None else None
    rules = [_kernel(kind, choice, pattern_key, file, problems) for kind, choice in scope.entries]
    return [rule for rule in rules if rule is not None]


def _kernel(key: ScalarNode, value: Node, scope: ScalarNode | None, file: str, problems: Problems) -> KernelRule | None:
    if key.text not in _KINDS:
        unknown_key(key, _KINDS, "`kernels`", problems)
    choice = read_word(value, KernelChoice, "a kernel choice", "TP021", problems)
    if key.text not in _KINDS or choice is None:
        return None
    pattern = read_pattern(scope, problems) if scope else None
    span = scope.span if scope else None
    return KernelRule(pattern, KernelKind(key.text), choice, span, value.span, origin_of(key, file))
